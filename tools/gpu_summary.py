"""Counts the outcomes in the logs of tools/gpu_check.sh, prints a table, and writes JSON.

    python tools/gpu_summary.py LOGS RESULT.json

LOGS holds parts.tsv (name, verdict, seconds) and a log per part; $DEVICE is nvidia-smi's line
(name, driver, compute capability), $COMMIT the commit.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

COUNTED = ("passed", "failed", "skipped", "errors")
PACKAGES = ("torch", "numpy", "cupy-cuda13x", "nvidia-nccl-cu13")


def counts(log: str) -> dict[str, int]:
    """Returns the last counts of pytest, the kernels' tests ("3 passed"), or compute-sanitizer."""
    found: dict[str, int] = {}
    for number, name in re.findall(r"\b(\d+) (passed|failed|skipped|error)s?\b", log):
        found["errors" if name == "error" else name] = int(number)
    return {name: found[name] for name in COUNTED if name in found}


def collect(logs: Path) -> list[dict[str, object]]:
    """Returns the parts in the order in which they ran."""
    parts: list[dict[str, object]] = []
    for line in (logs / "parts.tsv").read_text().splitlines():
        name, verdict, seconds = line.split("\t")
        log = (logs / f"{name}.log").read_text(errors="replace")
        parts.append({"name": name, "verdict": verdict, "seconds": int(seconds), **counts(log)})
    return parts


def versions() -> dict[str, str]:
    """Returns versions of the installed packages that affect the results."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Prints the table and writes the result."""
    logs, result = Path(sys.argv[1]), Path(sys.argv[2])
    name, driver, capability = (text.strip() for text in os.environ["DEVICE"].rsplit(",", 2))
    parts = collect(logs)
    about: dict[str, Any] = {
        "device": name,
        "driver": driver,
        "compute_capability": capability,
        "versions": versions(),
        "commit": os.environ.get("COMMIT", ""),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    result.write_text(json.dumps({**about, "parts": parts}, indent=1) + "\n")
    print(f"\n{name}, driver {driver}, commit {about['commit'][:12] or 'unknown'}")
    for part in parts:
        numbers = ", ".join(f"{part[key]} {key}" for key in COUNTED if key in part)
        print(f"{part['name']:<16} {part['verdict']:<12} {part['seconds']:>4} s  {numbers}")
    good = sum(part["verdict"] == "passed" for part in parts)
    print(f"{good} of {len(parts)} parts passed; written to {result}")
    return int(good < len(parts))


if __name__ == "__main__":
    sys.exit(main())
