"""Reads results in benchmarks/results, and formats their numbers in tables of Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def result_of(name: str) -> dict[str, Any]:
    """Returns a result of benchmarks/results by name."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def three_digits(value: float) -> str:
    """Formats a number with three significant digits."""
    return f"{value:.3g}"


def ratio_text(value: float | None) -> str:
    """Formats a ratio; "" for none."""
    return "" if value is None else f"{value:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
