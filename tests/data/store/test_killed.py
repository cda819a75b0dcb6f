"""Runs with samples on disk are killed 112 times."""

from __future__ import annotations

import json
from pathlib import Path

from support.data.spilled import run_program


def test_the_run_after_a_killed_one_has_the_same_result(tmp_path: Path) -> None:
    """112 runs on 2 ranks are killed, while they write, publish or read what is on disk."""
    counts = json.loads(run_program("kill", tmp_path, 112).stdout)
    assert counts["kills"] == 112
    assert counts["runs"] >= 14
    assert counts["1 packs left"] > 0
    assert counts["2 packs left"] > 0
