"""Files with the least seconds measured of each kernel, which later runs read.

Other load on a machine only makes a kernel slower. So the least seconds of each candidate over all
runs are stored: with more measurements they approach its time on an idle machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydist import owner
from pydist.cache import cache_folder
from pydist.errors import UsageError
from pydist.parsing import parse_json


def is_wanted() -> bool:
    """Returns whether kernels are measured: `PYDIST_TUNE` is 1 (the default), not 0.

    Raises:
        UsageError: the variable holds something else.
    """
    text = os.environ.get("PYDIST_TUNE") or "1"
    if text not in ("0", "1"):
        raise UsageError(f"PYDIST_TUNE={text}: possible are 0 (off) and 1")
    return text == "1"


def key_of(kind: str, facts: Mapping[str, Any]) -> str:
    """Returns a file name that identifies all facts that a measurement depends on."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{kind}-{digest[:32]}"


@dataclass
class TuningRecord:
    """Measurements that one problem has, by candidate.

    Attributes:
        seconds: the least seconds, by candidate.
        visits: number of measurements, by candidate.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    visits: dict[str, int] = field(default_factory=dict)

    def add(self, candidate: str, seconds: float, visits: int = 1) -> None:
        """Adds measurements of a candidate.

        Args:
            candidate: its name.
            seconds: the least of the measured times.
            visits: number of measurements.
        """
        self.seconds[candidate] = min(seconds, self.seconds.get(candidate, math.inf))
        self.visits[candidate] = self.visits.get(candidate, 0) + visits

    def merge(self, other: TuningRecord) -> None:
        """Adds the measurements of another record."""
        for candidate, seconds in other.seconds.items():
            self.add(candidate, seconds, other.visits[candidate])

    def dump(self) -> dict[str, list[float]]:
        """Returns the record as a JSON value."""
        return {name: [seconds, self.visits[name]] for name, seconds in self.seconds.items()}

    @classmethod
    def load(cls, content: Any, candidates: Iterable[str]) -> TuningRecord:
        """Reads the measurements of some candidates from JSON, and ignores everything else."""
        found = cls()
        for name in candidates:
            entry = content.get(name) if isinstance(content, dict) else None
            match entry:
                case [int() | float() as seconds, int() as visits] if 0 < seconds < 1e9:
                    found.add(name, float(seconds), max(1, visits))
        return found


class Records:
    """Folder that holds the records, with one file per problem; see `cache_folder`."""

    def __init__(self) -> None:
        self._folder = cache_folder()

    def is_writable(self) -> bool:
        """Returns whether files can be stored; creates the folder."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return os.access(self._folder, os.W_OK)

    def read(self, key: str, candidates: Iterable[str]) -> TuningRecord:
        """Returns the record with a key; an empty one if it is missing or damaged."""
        path = self._path(key)
        try:
            if path.exists() and not path.is_file():  # reading a pipe would block
                return TuningRecord()
            return TuningRecord.load(parse_json(path.read_bytes()), candidates)
        except (OSError, ValueError):
            return TuningRecord()

    def write(self, key: str, record: TuningRecord) -> None:
        """Replaces a record, which the caller has merged; the last of concurrent jobs wins."""
        path = self._path(key)
        owner.remove_temporaries(self._folder)
        fresh = owner.temporary(path)
        try:
            fresh.write_text(json.dumps(record.dump()), encoding="utf-8")
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)  # the record still holds for this run

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"
