"""Tests of `pydist train` as a launcher, under other launchers, interrupted and failing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.data import UniverseOptions, generate_universes
from pydist.launch.backends import available
from pydist.train import checkpoint, log
from support.jobs.children import wait_until

CONFIG = """
[model]
variant = "mlperf"
width = 32
[data]
path = "data"
normalize = "log1p"
[train]
epochs = 1
batch = 2
[output]
folder = "run"
"""
SPLIT = ["--mesh.spatial", "2", "1", "1"]


def train(*arguments: str, launcher: list[str] | None = None, code: int = 0, **extra: str) -> str:
    """Runs `pydist train`; returns what it printed."""
    command = [*(launcher or [sys.executable, "-m"]), "pydist", "train", "run.toml", *arguments]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **extra},
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def losses() -> list[float]:
    return list(log.losses(Path("run/log.jsonl")).values())


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> list[float]:
    """Returns the losses of the same run on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "data").symlink_to(data)
    (folder / "run.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(OMP_NUM_THREADS="1")
        return losses()


@pytest.mark.parametrize("mpi", ["openmpi", "mpich", "gloo"])
def test_as_launcher_it_draws_progress_and_writes_the_results(place, whole, mpi):
    if mpi not in [backend.name for backend in available()]:
        pytest.skip(f"{mpi} is not installed")
    shown = train("-n", "2", "--mpi", mpi, *SPLIT)
    assert "2 ranks: depth 2" in shown
    assert "step 2/2  loss " in shown
    assert "compute " in shown
    assert "halo " in shown
    assert "waiting for data " in shown
    assert "train      epochs=1" in shown, "the resolved configuration"
    written = {path.name for path in Path("run").iterdir()}
    assert written == {
        "config.toml",
        "tuning.json",
        "log.jsonl",
        "predictions.csv",
        "progress.png",
        "result.png",
        "samples",
        "ckpt",
    }
    assert Path("run/result.png").read_bytes().startswith(b"\x89PNG")
    assert losses() == pytest.approx(whole, abs=5e-6)


def test_under_torchrun(place, whole):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    train(*SPLIT, launcher=torchrun)
    assert losses() == pytest.approx(whole, abs=5e-6)


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_under_plain_mpirun(place, whole, mpi):
    backend = next((b for b in available() if b.name == mpi), None)
    if backend is None:
        pytest.skip(f"{mpi} is not installed")
    launcher = backend.command(2, [sys.executable, "-m"])
    train(*SPLIT, launcher=launcher, **backend.variables(2, place))
    assert losses() == pytest.approx(whole, abs=5e-6)


def test_ctrl_c_saves_a_checkpoint_ends_with_75_and_the_run_goes_on(place):
    command = [sys.executable, "-m", "pydist", "train", "run.toml", "-n", "2", *SPLIT]
    options = ["--train.epochs", "1000", "--checkpoint.every", "1000000"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: Path("run/log.jsonl").exists() and len(losses()) > 1, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "stopped by SIGINT after step" in said
    (saved,) = checkpoint.complete(Path("run/ckpt"))
    step = checkpoint.read(saved)["step"]
    assert step == len(losses())
    train("--train.epochs", "1000", "--train.steps", str(step + 2), *SPLIT, "-n", "2")
    assert len(losses()) == step + 2


def test_a_second_run_in_a_folder_is_refused_and_a_killed_one_blocks_nobody(place):
    """The first run is a single process and is killed without a chance to clean up."""
    command = [sys.executable, "-m", "pydist", "train", "run.toml"]
    options = ["--train.epochs", "1000", "--checkpoint.every", "1"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    wait_until(lambda: Path("run/log.jsonl").exists() and len(losses()) > 1, process)
    before = Path("run/config.toml").read_bytes()
    said = train("--train.epochs", "2", code=2)
    assert said.count(f"run is in use: process {process.pid} on ") == 1
    assert len(said.strip().splitlines()) == 1
    assert process.poll() is None
    assert Path("run/config.toml").read_bytes() == before
    process.kill()
    process.wait()
    done = len(losses())
    train("--train.epochs", "1000", "--train.steps", str(done + 2))
    assert not Path("run/.pydist-lock").exists()
    assert {event["status"] for event in log.read(Path("run/log.jsonl")) if "status" in event} == {
        "done"
    }


def test_data_that_shrink_during_training_end_it_with_65(place):
    Path("data").unlink()
    generate_universes("data", UniverseOptions(count=6, width=32, box_width=32, validation=0.3))
    process = subprocess.Popen(
        [sys.executable, "-m", "pydist", "train", "run.toml", "--train.epochs", "1000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: Path("run/log.jsonl").exists() and len(losses()) > 1, process)
    victim = next(Path("data").glob("univ_000001*.hdf5"))
    size = victim.stat().st_size
    os.truncate(victim, size // 2)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 65
    assert said == f"error: {victim}: shrank from {size} to {size // 2} bytes while it was open\n"


def test_an_error_of_all_ranks_is_printed_once_with_its_exit_code(place):
    said = train("-n", "2", "--data.path", "nowhere", *SPLIT, code=65)
    assert said.count("nowhere: no such folder") == 1
    assert len(said.strip().splitlines()) == 1
    assert "\0" not in said
    said = train("-n", "2", "--output.folder", "data", *SPLIT, code=2)
    assert len(said.strip().splitlines()) == 1
    assert "output.folder = 'data' is the data set's folder" in said
    said = train("-n", "2", "--mesh.data", "3", code=2)
    assert said.count("(data 3) and 2 ranks: possible are 3") == 1


def test_a_full_disk_ends_with_74(place):
    """A limit on file sizes simulates it: everything but a checkpoint fits."""
    limited = (
        "import resource, runpy, sys; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)); "
        "sys.argv = sys.argv[1:]; runpy.run_module('pydist', run_name='__main__')"
    )
    said = train("--output.no-plot", launcher=[sys.executable, "-c", limited], code=74)
    assert "can't write checkpoint run/ckpt/step-000002" in said
    assert not list(Path("run/ckpt").iterdir())


def test_data_universes_then_train_as_in_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    made = subprocess.run(
        [sys.executable, "-m", "pydist", "data", "universes", "data", "--count", "2"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "2 universes of 64³ voxels → 16 samples of 32³ (8 train, 8 val) in data" in made.stdout
    train("--train.steps", "1")
    assert len(losses()) == 1
