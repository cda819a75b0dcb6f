"""Tests that each GPU benchmark completes on the CPU at a tiny size.

They find typos before a GPU session does. Their times mean nothing and are marked as a CPU's.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pydist import Mesh, ShardedTensor, layout_for_sample, parallelize
from pydist.backend import conv_tuning

FOLDER = Path(__file__).parents[2] / "benchmarks" / "python"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Yields a function that runs a script in this process and returns its JSON result."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "cache"))
    written = tmp_path / "result.json"

    def main(name: str, *arguments: str) -> dict[str, Any]:
        script = str(FOLDER / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [script, "--json", str(written), *arguments])
        runpy.run_path(script, run_name="__main__")
        result = json.loads(written.read_text())
        assert result["benchmark"] == f"{name}_cpu"
        assert result["machine"]["device"] == "none: a self-test on the CPU"
        assert result["not_run"] == []
        return result

    yield main
    for name in set(sys.modules) - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(FOLDER)):
            del sys.modules[name]  # their module names are too general to keep


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(run, capsys):
    for script in sorted(FOLDER.glob("gpu_*.py")):
        with pytest.raises(SystemExit) as ended:
            run(script.stem)
        said = f"{script.stem}: needs a CUDA device, torch and pydist built with CUDA"
        assert ended.value.code == said
    assert capsys.readouterr().out == ""


def test_pack(run, capsys):
    rows = run("gpu_pack", "--device", "cpu")["rows"]
    assert {(r["kernel"], r["face"], r["format"]) for r in rows if r["face"]} == {
        (kernel, face, layout)
        for kernel in ("pack", "unpack", "unpack_add")
        for face in ("depth", "height", "width")
        for layout in ("contiguous", "channels-last")
    }
    goals = {(r["face"], r["format"]): r["goal"] for r in rows if r["face"]}
    assert goals["depth", "contiguous"] == goals["height", "channels-last"] == 0.85
    assert goals["width", "contiguous"] is None  # pieces of 4 bytes
    assert goals["width", "channels-last"] is None  # of 16, at this size
    (copy,) = (r for r in rows if not r["face"])
    for row in rows:
        for source in ("memory", "cache"):
            taken, one = row[source], copy[source]
            arrays = 3 if row["kernel"] == "unpack_add" else 2
            expected = arrays / 2 * one["seconds"] / taken["seconds"]
            assert taken["of_copy"] == pytest.approx(expected)
            assert taken["of_torch"] == taken["torch_seconds"] / taken["seconds"]
            useful, all_bytes = taken["bytes_per_s"], taken["granule_bytes_per_s"]
            granules = 64 // row.get("piece_bytes", 64) if row["face"] == "width" else 1
            assert all_bytes * arrays == pytest.approx(useful * (1 + (arrays - 1) * granules))
    assert "unpack_add width, channels-last" in capsys.readouterr().out


def test_boundary(run, capsys):
    result = run("gpu_boundary", "--device", "cpu")
    for row in result["rows"]:
        assert row["seconds"].keys() == {"library", "plain"}
        assert row["chosen"] == "plain"
        assert row["gain"] == row["seconds"]["library"] / row["seconds"]["plain"]
    assert {row["role"] for row in result["rows"]} == {"forward", "dgrad", "wgrad"}
    low, high = (f(row["gain"] for row in result["rows"]) for f in (min, max))
    assert low <= result["gain"] <= high
    assert result["met"] == (result["gain"] >= 1.3 and not result["slower_by_choice"])
    assert "goal 1.3" in capsys.readouterr().out


def test_step(run):
    result = run("gpu_step", "--device", "cpu")
    assert {(r["network"], r["precision"]) for r in result["rows"]} == {
        ("mlperf", "bf16"), ("paper", "fp32")
    }  # fmt: skip
    for row in result["rows"]:
        assert row["steps"].keys() == row["losses"].keys() == {"torch", "pydist"}
        assert row["samples_per_s"] == row["batch"] / row["steps"]["pydist"]["median"]
    assert result["worst_ratio"] == {
        "as they are": max(row["ratio"] for row in result["rows"]), "as graphs": None
    }  # fmt: skip


def test_shards(run):
    rows = run("gpu_shards", "--device", "cpu")["rows"]
    whole, half = rows
    assert (whole["ranks"], half["ranks"]) == (1, 2)
    assert "of_ideal" not in whole
    assert half["of_ideal"] == 2 * half["median"] / whole["median"]
    assert half["median"] == max(each["median"] for each in half["ranks_measured"])
    assert half["paper_gib"] == pytest.approx(52.7 / 16**3 / 2)


def test_overlap(run, capsys):
    rows = run("gpu_overlap", "--device", "cpu")["rows"]
    assert len(rows) == 2
    for row in rows:
        for way in ("overlapped", "awaited", "silent"):
            assert 0 < row[way]["min"] <= row[way]["median"]
        assert row["ratio"] is None or row["ratio"] == row["exposed"] / row["halo"]
        assert row["layers"]["features.conv1"]["exposed"] > 0
    assert "features.conv1" in capsys.readouterr().out


def test_a_rank_that_is_alone_chooses_kernels_by_itself(run, monkeypatch, tmp_path):
    from lone_rank import LoneRank, choosing_alone

    monkeypatch.setattr(conv_tuning, "_MEASURED_FLOPS", 0)
    monkeypatch.setattr(conv_tuning, "_SECONDS", 0.0)
    mesh = Mesh(LoneRank(1, 3), 1, (3, 1, 1))
    model = parallelize(nn.Sequential(nn.Conv3d(2, 4, 3, padding=1)), mesh)
    layout = layout_for_sample(mesh, (1, 2, 12, 6, 6))
    x = ShardedTensor.from_local(torch.randn(layout.local_shape), layout)
    with choosing_alone():
        model(x).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    assert list(tmp_path.glob("cache/*")) == []


def test_input(run):
    rows = run("gpu_input", "--device", "cpu")["rows"]
    assert [row["what"] for row in rows] == ["copy", "log1p", "standardize"]
    assert rows[0]["of_copy"] == 1


def test_unet(run):
    (row,) = run("gpu_unet", "--device", "cpu")["rows"]
    assert row["steps"].keys() == row["losses"].keys() == {"torch", "pydist"}
    assert row["losses"]["pydist"] == pytest.approx(row["losses"]["torch"], rel=1e-4)
    assert row["torch / pydist"] > 0


def test_whole(run):
    (row,) = run("gpu_whole", "--device", "cpu")["rows"]
    assert row["1"]["loss"] == pytest.approx(row["2"]["loss"], rel=1e-4)
    assert 0 < row["gradient_error"] < 1e-4


def test_transports(run):
    rows = run("gpu_transports", "--device", "cpu")["rows"]
    assert [row["what"] for row in rows] == ["halo", "all-reduce"]
    for row in rows:
        assert row["seconds"].keys() == {"host", "torch NCCL"}
