"""Tests of `pydist plan` and `pydist env --bench`: tables, JSON, and measured profiles."""

from __future__ import annotations

import json
import re

import pytest

from pydist.cli import main as cli

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


def shown(capsys, *arguments: str) -> str:
    assert cli.main(["plan", "run.toml", *arguments]) == 0
    return capsys.readouterr().out


def test_every_mesh_has_a_row_the_best_first(place, capsys):
    text = shown(capsys, "--ranks", "4", "--hardware", "v100")
    heading, head, *rows = text.splitlines()
    assert heading.startswith("4 ranks of v100 (Lassen: 4 V100 16 GB per node")
    assert head.split() == [
        "mesh", "GiB", "fits", "compute", "halo", "sums", "gradient", "optimiz.", "reading", "ms",
        "samples/s", "effic.", "most", "time",
    ]  # fmt: skip
    assert len(rows) == 15  # 4 = 2² over five axes
    times = [float(re.findall(r"(\S+)  +\S+  +\d+ %", row)[0]) for row in rows]
    assert times == sorted(times)
    few = shown(capsys, "--ranks", "4", "--rows", "2", "--memory", "1MB")
    assert few.splitlines()[-1] == "13 more meshes: --rows 15"
    assert all(" no " in row and row.endswith("memory") for row in few.splitlines()[2:-1])


def test_json_has_all_numbers(place, capsys):
    found = json.loads(shown(capsys, "--ranks", "2", "--json", "--memory", "4GB"))
    assert found["hardware"]["name"] == "cpu"
    assert found["memory"] == 4 * 10**9
    assert len(found["meshes"]) == 5
    for each in found["meshes"]:
        assert each["step"] == pytest.approx(sum(each["seconds"].values()))
        assert each["peak"] == pytest.approx(sum(each["memory"].values()))
        assert each["samples_per_second"] == pytest.approx(2 / each["step"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ranks None: 1 or more are possible"),
        (["--ranks", "0"], "--ranks 0: 1 or more are possible"),
        (["--ranks", "2", "--memory", "16"], "--memory 16: a size is expected, such as"),
        (["--ranks", "2", "--hardware", "k80"], "hardware 'k80': possible are cpu, v100"),
        (["--ranks", "2", "--data.path", "none"], "none"),
        (["--ranks", "2", "--mesh.stages", "2"], "a plan compares meshes, and mesh.stages"),
    ],
)
def test_mistakes_are_named(arguments, message, place, capsys):
    assert cli.main(["plan", "run.toml", *arguments]) in (2, 65, 74)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_measured_profile_is_planned_with_and_its_meshes_measured(place, monkeypatch, capfd):
    monkeypatch.setenv("PYDIST_CACHE", str(place / "cache"))
    launch = ["-n", "2", "--mpi", "gloo"]
    assert cli.main(["env", "--bench", "mine.json", *launch]) == 0
    found = json.loads((place / "mine.json").read_text())
    assert found["name"] == "mine"
    assert found["ranks_per_node"] == 2
    assert 1e8 < found["flops"]["float32"] < 1e13
    assert 1e7 < found["within"]["bandwidth"] < 1e12
    assert 0 < found["exchange"] < 0.1
    own = ["--ranks", "1", "--mpi", "gloo", "--hardware", "mine.json", "--measure"]
    assert cli.main(["plan", "run.toml", *own]) == 0
    text = capfd.readouterr().out
    assert "1 rank of mine (pydist env --bench on 2 ranks" in text
    assert re.search(r"^measured here, the best 1:\n1 rank: \S+ ms$", text, re.MULTILINE)
