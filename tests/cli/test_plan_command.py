"""Tests of `pydist plan` and `pydist env --bench`: tables, JSON, and measured profiles."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from pydist.cli import balance, plan, profile
from pydist.cli import main as cli
from support.jobs.children import child_environment

CONFIG = """
[model]
width = 32
[data]
path = "data"
[train]
batch = 2
[output]
folder = "run"
"""

GROWING = ("--train.batch-schedule.noise-scale", "--train.batch-schedule.largest", "9")
"""Options that need several sample groups, or passes."""


def shown(capsys, *arguments: str) -> str:
    assert cli.main(["plan", "run.toml", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "values"),
    [
        (plan, ["--data.store", "memory"]),
        (profile, ["--output.folder", "trace"]),
        (balance, ["--output.folder", "rounds"]),
    ],
)
def test_values_of_other_options_are_not_taken_for_misspelled_ones(command, values):
    assert command._parse(["run.toml", "-n", "4", *values])[1] == values


def test_every_mesh_has_a_row_the_best_first(place, capsys):
    text = shown(capsys, "--ranks", "4", "--hardware", "v100", "--rows", "21")
    heading, head, *rows = text.splitlines()
    assert heading.startswith("4 ranks of v100 (Lassen: 4 V100 16 GB per node")
    assert head.split() == [
        "mesh", "GiB", "fits", "compute", "halo", "sums", "gradient", "optimiz.", "waiting",
        "reading", "ms", "samples/s", "effic.", "most", "time", "gathered",
    ]  # fmt: skip
    # 4 = 2² over five axes, and 2 and 4 stages; 2 samples are too few for data 4.
    assert len(rows) == 15 + 5 + 1 - 1
    times = [float(re.findall(r"(\S+)  +\S+  +\d+ %", row)[0]) for row in rows]
    assert times == sorted(times)
    few = shown(capsys, "--ranks", "4", "--rows", "2", "--memory", "1MB")
    assert few.splitlines()[-1] == "18 more meshes: --rows 20"
    assert all(" no " in row and " memory" in row for row in few.splitlines()[2:-1])
    gathered = [row.split()[-1] for row in rows if row.startswith("depth 4 ")]
    assert gathered[0].startswith("features.")  # blocks of one plane


def test_json_has_all_numbers(place, capsys):
    found = json.loads(shown(capsys, "--ranks", "2", "--json", "--memory", "4GB"))
    assert found["hardware"]["name"] == "cpu"
    assert found["memory"] == 4 * 10**9
    assert len(found["meshes"]) == 6
    assert {each["stages"] for each in found["meshes"]} == {1, 2}
    for each in found["meshes"]:
        assert each["bubble"] == pytest.approx(each["seconds"]["waiting"] / each["step"])
        assert each["step"] == pytest.approx(sum(each["seconds"].values()))
        assert each["peak"] == pytest.approx(sum(each["memory"].values()))
        assert each["samples_per_second"] == pytest.approx(2 / each["step"])


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        (["--train.batch", "4", "--train.accumulate", "4"], {1}),
        (["--train.batch", "4", "--train.accumulate", "2"], {1, 2}),
        (["--train.batch", "4"], {1, 2, 4}),
        (["--train.batch", "4", *GROWING], {2, 4}),
    ],
)
def test_meshes_that_a_run_refuses_are_not_planned(settings, groups, place, capsys):
    found = json.loads(shown(capsys, "--ranks", "4", "--json", *settings))
    alone = [each for each in found["meshes"] if each["stages"] == 1]
    assert {each["mesh"]["data"] for each in alone} == groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ranks N is missing"),
        (["--ranks", "0"], "--ranks 0: 1 or more are possible"),
        (["--ranks", "2", "--memory", "16"], "--memory 16: a size is expected, such as"),
        (["--ranks", "2", "--hardware", "k80"], "hardware 'k80': possible are auto, cpu, v100"),
        (["--ranks", "2", "--data.path", "none"], "none"),
        (["--ranks", "3", "--mesh.stages", "2"], "--ranks 3: mesh.stages = 2 does not divide them"),
        (["--ranks", "1", *GROWING], "compares parts of a step, which is one pass of one"),
        (["--ranks", "2", "--chart", "none/plan.png"], "can't write none/plan.png"),
        (["--ranks", "2", "--chart", "plan.txt"], "plan.txt: Format 'txt'"),
    ],
)
def test_mistakes_are_named(arguments, message, place, capsys):
    assert cli.main(["plan", "run.toml", *arguments]) in (2, 65, 74)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_measured_profile_is_planned_with_and_its_meshes_measured(place, monkeypatch, capfd):
    monkeypatch.setenv("PYDIST_CACHE", str(place / "cache"))
    limited = f"ulimit -v {(8 << 30) // 1024} && exec {sys.executable} -m pydist env --bench"
    command = f"{limited} mine.json -n 2 --mpi gloo"
    subprocess.run(command, shell=True, check=True, env=child_environment())
    found = json.loads((place / "mine.json").read_text())
    assert found["name"] == "mine"
    assert found["ranks_per_node"] == 2
    assert 0 < found["memory"] < 8 << 30
    assert 1e8 < found["flops"]["float32"] < 1e13
    assert 1e7 < found["within"]["bandwidth"] < 1e12
    assert 0 < found["exchange"] < 0.1
    own = ["--ranks", "1", "--mpi", "gloo", "--hardware", "mine.json", "--measure"]
    assert cli.main(["plan", "run.toml", *own]) == 0
    text = capfd.readouterr().out
    assert "1 rank of mine (pydist env --bench on 2 ranks" in text
    line = r"^1 rank: \S+ ms predicted, \S+ ms measured$"
    assert re.search(line, text, re.MULTILINE)


def test_the_shell_of_srun_starts_the_ranks_that_are_measured(place, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setattr(plan, "_measure_best", lambda *_: 66)
    assert plan.plan(["run.toml", "--ranks", "2", "--hardware", "v100", "--measure"]) == 66
    assert capsys.readouterr().out.startswith("2 ranks of v100")
    monkeypatch.setattr(plan, "_measure", lambda *_: 72)
    assert plan.plan(["run.toml", "--measure"]) == 72
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert plan.plan(["run.toml", "--ranks", "2", "--measure"]) == 72


def test_a_chart_of_the_stages_is_drawn(place, capsys):
    text = shown(capsys, "--ranks", "4", "--mesh.stages", "2", "--chart", "plan.png")
    assert all("2 stages, " in row for row in text.splitlines()[2:])
    assert (place / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_parts_of_a_chart_have_colors_of_their_own(place, capsys, monkeypatch):
    drawn = []
    save = "matplotlib.figure.Figure.savefig"
    monkeypatch.setattr(save, lambda figure, _, dpi: drawn.append(figure))
    shown(capsys, "--ranks", "2", "--chart", "plan.png")
    for axes in drawn[0].axes:
        colors = [bars.patches[0].get_facecolor() for bars in axes.containers]
        assert len(set(colors)) == len(colors) > 1


def test_a_run_takes_the_mesh_of_its_plan_and_shows_both_times(place, capsys):
    options = ["--mesh.spatial", "auto", "--train.epochs", "4", "--train.validate-every", "0"]
    assert cli.main(["train", "run.toml", *options, "--output.no-plot"]) == 0
    text = capsys.readouterr().out
    assert re.search(r'^mesh.spatial = "auto": 1 rank, predicted \S+ ms and', text, re.MULTILINE)
    both = r"^a step: predicted \S+ ms and \S+ GiB per rank \(cpu\); measured \S+ ms \(median of "
    assert re.search(both, text, re.MULTILINE)
    saved = (place / "run" / "config.toml").read_text()
    assert "spatial = [1, 1, 1]" in saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh.spatial", "auto", "--mesh.stages", "2"], "it chooses one mesh"),
        (["--mesh.spatial", "auto", "--mesh.data", "3"], "no mesh of 1 ranks has channel 1 and"),
        (["--mesh.spatial", "most"], "spatial"),
    ],
)
def test_mistakes_with_auto_are_named(arguments, message, place, capsys):
    assert cli.main(["train", "run.toml", *arguments]) == 2
    assert message in capsys.readouterr().err
