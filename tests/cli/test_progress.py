"""Tests of the progress display: its text, and how events reach the terminal."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from pydist.cli.events import followed
from pydist.cli.progress import ProgressView, describe_parts, mean_parts
from pydist.errors import UsageError
from pydist.train import log

START = {
    "event": "start", "steps": 4, "epochs": 2, "step": 0, "parameters": 9437636, "samples": 6,
    "mesh": "4 ranks: data 2 × depth 2",
    "predicts": "volumes",
    "config": {"train": {"batch": 3}, "model": {"name": "unet3d"}, "output": {"folder": "runs/x"}},
    "device": "cpu", "transport": "mpi", "precision": "fp32",
    "unused_device": "rank 3 on n07: torch sees no GPU",
}  # fmt: skip


def step(number: int) -> dict:
    return {
        "event": "step", "step": number, "epoch": (number - 1) // 2, "loss": 1 / number,
        "lr": 1e-3, "seconds": 0.1, "samples_per_second": 30.0,
        "parts": {"compute": 0.07, "halo": 0.02, "data": 0.01},
    }  # fmt: skip


def shown(terminal: bool) -> str:
    out = io.StringIO()
    view = ProgressView(Console(file=out, force_terminal=terminal, width=120), verbose=True)
    view(START)
    for number in range(1, 5):
        view(step(number))
    view({"event": "validation", "mae": 0.25, "loss": 0.1, "step": 4, "epoch": 1, "samples": 3})
    view(step(4))
    view({"event": "end", "status": "done", "step": 4, "seconds": 1.0, "reason": ""})
    view.close()
    return out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_speed_loss_and_parts_are_shown(terminal):
    text = shown(terminal)
    assert text.lstrip().startswith(
        "train      device cpu, transport mpi, precision fp32; a CUDA device is available but not "
        "used: rank 3 on n07: torch sees no GPU"
    )
    assert "9,437,636 parameters, 6 samples, 4 ranks: data 2 × depth 2" in text
    assert "epoch 2/2" in text
    assert "loss 0.2500  validation mae 0.250  30.0 samples/s" in text
    assert "step 100 ms: compute 70 % · halo 20 % · waiting for data 10 %" in text
    assert ("━" in text) == terminal
    assert "batch=3" in text
    assert "result     runs/x: " in text


def test_a_run_ends_with_its_results_and_the_next_commands(tmp_path):
    for name in ("log.jsonl", "dice.csv", "ckpt/last/manifest.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    made = {"name": "factory", "factory": "nets.py:make", "task": "regression"}
    own = {**made, "task": "mine.py:MyTask"}
    out = io.StringIO()
    for model, what in (({"name": "unet3d"}, "images"), (made, "samples"), (own, "volumes")):
        view = ProgressView(Console(file=out, width=200), verbose=True)
        config = {"model": model, "output": {"folder": tmp_path}}
        view({**START, "predicts": what, "config": config})
        view({"event": "end", "status": "done", "step": 0, "seconds": 1.0, "reason": ""})
    lines = [line for line in out.getvalue().splitlines() if line.startswith(("result", "next"))]
    made_by = "--factory nets.py:make"
    code = f" {made_by} --task mine.py:MyTask"
    assert lines == [
        f"result     {tmp_path}: dice.csv, log.jsonl, ckpt/last",
        f"next       pydist predict {tmp_path} image.npy -o labels",
        f"next       pydist export {tmp_path} model.safetensors",
        f"result     {tmp_path}: dice.csv, log.jsonl, ckpt/last",
        f"next       pydist predict {tmp_path} sample.npy -o predictions.csv {made_by}",
        f"next       pydist export {tmp_path} model.safetensors {made_by}",
        f"result     {tmp_path}: dice.csv, log.jsonl, ckpt/last",
        f"next       pydist predict {tmp_path} case.nii.gz -o labels.nii.gz{code}",
        f"next       pydist export {tmp_path} model.safetensors{code}",
    ]


def test_figures_of_another_task_are_shown():
    out = io.StringIO()
    view = ProgressView(Console(file=out, width=120))
    figures = {"loss": 0.5, "accuracy": 0.75, "samples": 3, "step": 4, "epoch": 1, "time": 1.5}
    for event in (START, step(1), {"event": "validation", **figures}, step(4)):
        view(event)
    view({"event": "end", "status": "done", "step": 4, "seconds": 1.0, "reason": ""})
    assert "validation loss 0.500 accuracy 0.750" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_other_parts_of_the_mesh_are_shown_and_the_display_goes_on(terminal):
    out = io.StringIO()
    view = ProgressView(Console(file=out, force_terminal=terminal, width=120))
    rebalance = {"axis": "depth", "sizes": [16, 16], "busy": [0.125, 0.5], "next_sizes": [25, 7]}
    for event in (START, step(1), {"event": "rebalance", "step": 1, **rebalance}, START, step(2)):
        view(event)
    view.close()
    assert "depth 25 + 7 from here on, 16 + 16 were busy for 0.125, 0.5 s" in out.getvalue()
    last = out.getvalue().rpartition("were busy")[2]
    assert last.count("epoch 1/2") <= 1, "one bar, of the run that goes on"


def test_a_part_that_only_some_steps_have_counts_as_zero_in_the_others():
    mean = mean_parts([{"compute": 1.0}, {"compute": 2.0, "halo": 1.0}])
    assert mean == {"compute": 1.5, "halo": 0.5}
    assert describe_parts(mean, 2.0) == "step 2000 ms: compute 75 % · halo 25 %"


def test_small_exchanges_are_shown_together_and_last():
    parts = {"redistribute": 0.02, "compute": 0.9, "statistics": 0.03, "data": 0.05}
    shown = "step 1000 ms: compute 90 % · waiting for data 5 % · other 5 %"
    assert describe_parts(parts, 1.0) == shown


@pytest.mark.parametrize("count", [100, 5000])
def test_events_go_through_the_pipe_whole_and_in_order(count):
    heard = []
    with followed(heard.append):
        send = log.to_pipe(Path(os.environ[log.PIPE_VARIABLE]))
        for number in range(1, count + 1):
            send(step(number))
    numbers = [event["step"] for event in heard]
    assert heard == [step(number) for number in numbers]
    assert numbers == sorted(set(numbers))
    # A burst that fills the pipe may lose events: the run must not wait for the screen.
    assert len(numbers) == count if count <= 100 else len(numbers) > 100
    assert log.PIPE_VARIABLE not in os.environ


def test_a_run_whose_launcher_is_gone_goes_on(tmp_path):
    log.to_pipe(tmp_path / "nothing")(step(1))
    with followed(lambda _: None):
        send = log.to_pipe(Path(os.environ[log.PIPE_VARIABLE]))
    send(step(1))


def test_only_a_pipe_is_written_to(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(UsageError, match=r"PYDIST_EVENTS names .*notes.txt, which is not a named"):
        log.to_pipe(path)
    assert path.read_text() == "precious"


def test_the_log_is_json_where_numbers_are_not(tmp_path):
    path = tmp_path / "log.jsonl"
    log.EventLog(path).emit("validation", step=1, loss=math.inf, dice={"a": math.nan, "b": 0.5})
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    (event,) = log.read(path)
    assert event["loss"] is None
    assert event["dice"] == {"a": None, "b": 0.5}


def test_half_a_line_of_a_killed_run_does_not_spoil_the_log(tmp_path):
    path = tmp_path / "log.jsonl"
    log.EventLog(path).emit("step", step=1, loss=0.5)
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    log.EventLog(path).emit("step", step=2, loss=0.25)
    log.EventLog(path).emit("step", step=2, loss=0.125)
    assert log.losses(path) == {1: 0.5, 2: 0.125}
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "step"
