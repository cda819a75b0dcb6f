"""Tests of `pydist balance`: what it prints and writes, and that training reads the parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pydist.cli import main as cli
from pydist.train import config_io, log

CONFIG = """
[model]
width = 32
[data]
path = "data"
[train]
batch = 1
[output]
folder = "run"
"""
SPLIT = {
    "data": ["--mesh.data", "2", "--train.batch", "4"],
    "depth": ["--mesh.spatial", "2", "1", "1"],
    "channel": ["--mesh.channel", "2"],
}


def run(*arguments: str) -> str:
    """Runs Python; returns what it printed."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=dict(os.environ),
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("axis", ["data", "depth", "channel"])
def test_parts_are_measured_and_training_reads_them(axis, place):
    length = ["--steps", "2", "--rounds", "2"]
    launch = ["-n", "2", "--mpi", "gloo"]
    shown = run("-m", "pydist", "balance", "run.toml", *launch, *length, *SPLIT[axis])
    lines = shown.splitlines()
    assert lines[0].startswith(f"{axis}, ")
    assert re.match(rf"{axis} (\d+) \+ \1   busy \S+  \S+ s   step \S+ s", lines[1])
    found = config_io.load(place / "run.balanced.toml")
    sizes = " + ".join(f"{part:.0f}" for part in found.mesh.shares.given[axis])
    assert any(line.startswith(f"{axis} {sizes} ") for line in lines[1:-1])
    assert f"the fastest: {axis} {sizes}, " in lines[-1]

    length = ["--train.epochs", "2", "--train.steps", "2"]
    given = ["--mesh.shares." + axis, "3", "1"]  # whatever was measured
    run("-m", "pydist", "train", "run.balanced.toml", *launch, *length, *given)
    split = log.losses(place / "run" / "log.jsonl")
    whole = ["--output.folder", "whole", "--train.batch", str(found.train.batch)]
    run("-m", "pydist", "train", "run.toml", *whole, *length)
    whole = log.losses(place / "whole" / "log.jsonl")
    assert list(split.values()) == pytest.approx(list(whole.values()), abs=5e-6)


def test_the_axis_of_an_automatic_mesh_is_left_to_the_ranks(place, monkeypatch):
    started = []
    monkeypatch.setattr(
        "pydist.launch.supervisor.launch", lambda *given: started.append(given) or 0
    )
    for axis in (["--axis", "depth"], []):
        given = ["balance", "run.toml", "-n", "2", "--mesh.spatial", "auto", *axis]
        assert cli.main(given) == 0
    assert [ranks for ranks, *_ in started] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh.data", "1"], "no axis has several parts: set mesh.data, mesh.spatial or mesh.ch"),
        ([*SPLIT["depth"], *SPLIT["channel"]], "choose an axis with --axis: depth or channel"),
        ([], "train.batch = 1: a sample for each of 2 parts is needed"),
        ([*SPLIT["depth"], "--axis", "channel"], "--axis channel: the mesh has 1 part along it"),
        ([*SPLIT["depth"], "--axis", "data"], "--axis data: the mesh has 1 part along it; poss"),
        ([*SPLIT["depth"], "--multiple", "17"], "--multiple 17: 1 to 16 are possible, for 2 par"),
        ([*SPLIT["depth"], "--rounds", "0"], "--rounds 0: at least 1 of each is possible"),
        ([*SPLIT["depth"], "--round", "2"], "unknown option --round; did you mean --rounds?"),
        ([*SPLIT["depth"], "--out", "data/dataset.json"], "data/dataset.json exists: choose anot"),
        ([*SPLIT["depth"], "--out", "none/run.toml"], "none: no such folder"),
        ([*SPLIT["depth"], "--data.path", "none"], "none"),
    ],
)
def test_mistakes_are_named_before_a_rank_starts(arguments, message, place, capsys):
    code = cli.main(["balance", "run.toml", "-n", "2", *arguments])
    assert code in (2, 65, 74)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_parts_of_one_rank_need_no_balance(place, capsys):
    assert cli.main(["balance", "run.toml", *SPLIT["depth"]]) == 2
    assert "needs 2 ranks a sample, but 1 rank was started" in capsys.readouterr().err
