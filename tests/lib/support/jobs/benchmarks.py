"""Runs the scripts of benchmarks/python at a tiny size, as tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import ROOT
from support.jobs.children import run_python


def run(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Runs a script; returns the JSON that it writes."""
    written = folder / "result.json"
    script = ROOT / "benchmarks" / "python" / f"{name}.py"
    options = "--quick", "--json", written
    ended = run_python(script, *options, *arguments, folder=folder, seconds=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(written.read_text())
    assert result["benchmark"]
    assert result["machine"].keys() >= {
        "cpu", "cores", "memory_gb", "system", "torch", "commit", "date", "load_before"
    }  # fmt: skip
    return result


def check_times(row: dict[str, Any]) -> None:
    first, third = row["quartiles"]
    assert 0 < row["min"] <= first <= row["median"] <= third
    assert row["rounds"] >= 2
