"""Tests of scripts of benchmarks/python that need no MPI, as those of `test_python.py`."""

from __future__ import annotations

import math
import os

import pytest

from support.jobs.benchmarks import run


def test_checks(tmp_path):
    pytest.importorskip("monai")
    rows = {row["variant"]: row for row in run("checks", tmp_path)["rows"]}
    assert len(rows) == 6
    assert rows.keys() >= {"all on", "all off"}
    assert all(row["step"]["rounds"] == 2 for row in rows.values())


@pytest.mark.parametrize("case", ["small", "cosmoflow"])
def test_large_batch(tmp_path, case):
    rows = {row["contestant"]: row for row in run("large_batch", tmp_path, "--case", case)["rows"]}
    assert len(rows) == 4
    small, large = rows["batch 4"], rows["batch 64, recipe"]
    assert large["lr"] == pytest.approx((16 if case == "small" else 4) * small["lr"])
    assert rows["batch 64, no scaling"]["lr"] == small["lr"]
    assert small["over_small"] == 1
    assert small["within"]
    for row in rows.values():
        assert [len(curve) for curve in row["curves"]] == [2, 2]
        assert row["mse_of_seeds"] == [curve[-1] for curve in row["curves"]]
        assert all(0 < each < math.inf for each in row["mse_of_seeds"])


@pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2,
    reason="binds two ranks to two cores",
)
def test_unequal_ranks(tmp_path):
    rows = run("unequal_ranks", tmp_path)["rows"]
    assert [row["axis"] for row in rows] == ["depth", "channel"]
    for row in rows:
        assert len(row["even"]["sizes"]) == len(row["balanced"]["sizes"]) == 2
        assert sum(row["even"]["sizes"]) == sum(row["balanced"]["sizes"])
        assert min(*row["even"]["busy"], *row["balanced"]["busy"], row["ideal"]) > 0
        searched = [each["sizes"] for each in row["search"]]
        assert row["even"]["sizes"] == searched[0]
        assert row["balanced"]["sizes"] in searched
