"""Test that the benchmark of accuracies trains every contestant; its errors mean nothing here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs.children import child_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "python" / "large_batch.py"


@pytest.mark.parametrize("case", ["small", "cosmoflow"])
def test_every_contestant_is_trained(tmp_path, case):
    written = tmp_path / "large_batch.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--case", case, "--json", str(written)]
    subprocess.run(command, cwd=tmp_path, env=child_environment(), check=True, timeout=200)
    rows = {row["contestant"]: row for row in json.loads(written.read_text())["rows"]}
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
