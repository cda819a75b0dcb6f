"""Tests of the benchmark of slow links: bytes as computed, times no shorter than the link's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.launch.backends import available
from support.jobs.children import child_environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "python" / "slow_link.py"

pytestmark = pytest.mark.skipif(
    available()[0].name == "gloo", reason="the benchmark's bytes are those of messages over MPI"
)


@pytest.mark.parametrize(
    ("layout", "forms"),
    [("2 hosts of 1 rank, 2 groups", 5), ("2 hosts of 2 ranks, 4 groups", 7),
     ("2 hosts of 2 ranks, 2 groups", 7)],
)  # fmt: skip
def test_every_form_is_measured(tmp_path, layout, forms):
    written = tmp_path / "slow_link.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--layout", layout, "--json", str(written)]
    subprocess.run(command, cwd=tmp_path, env=child_environment(), check=True, timeout=200)
    result = json.loads(written.read_text())
    rows = result["rows"]
    assert len(rows) == forms
    for row in rows:
        # Beside gradients ranks exchange which of them exist.
        assert 0 <= row["bytes"] - row["computed"] < 10_000, row["form"]
        slow = row["steps"]["1 Gb/s"]
        assert slow["min"] > row["link"]["1 Gb/s"] > 0, row["form"]
        assert row["steps"]["none"]["median"] > 0
    sent = {row["form"]: row["bytes"] for row in rows}
    assert sent["bf16"] == sent["fp16"] < sent["dense"]
    assert result["break_even"]["groups"]["dense"] == pytest.approx(1000, rel=0.05)
