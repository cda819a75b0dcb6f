"""The counters of a program's calls on files, which `csrc/preload/profile.cpp` fills."""

from __future__ import annotations

import json
import mmap
import struct
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from pydist.errors import UsageError

KINDS = (
    "open", "close", "read", "write", "seek", "map", "stat", "list", "access", "change",
)  # fmt: skip
"""The kinds of calls, in the order of `CallKind` in csrc/preload/profile.hpp."""

_CALLS = struct.Struct("=8Q")
_TOTALS = struct.Struct("=3Q")
_SLOTS = 1 << 22
_SIZE = _CALLS.size * len(KINDS) + _TOTALS.size + 8 * _SLOTS


@dataclass(frozen=True)
class CallCounts:
    """Counts of the calls of one kind, which all processes of a program have made."""

    calls: int
    failed: int
    bytes: int
    seconds: float
    """The sum over threads of the time in such calls."""
    threads: int
    """The most threads, of all processes, that were in such a call at one time."""
    processes: int
    """The most processes that were in such a call at one time."""


class Counters:
    """The file in which all processes of a program count, and the report. A context manager.

    Args:
        report: the JSON file to be written.
    """

    def __init__(self, report: Path) -> None:
        if not report.parent.is_dir():
            raise UsageError(f"--profile {report}: there is no folder {report.parent}")
        self._report = report

    def __enter__(self) -> Counters:
        with tempfile.NamedTemporaryFile(prefix="pydist-counters-", delete=False) as made:
            made.truncate(_SIZE)  # pages that are not used take no space
        self.file = Path(made.name)
        return self

    def __exit__(self, *error: object) -> None:
        self.file.unlink(missing_ok=True)

    def read(self) -> tuple[dict[str, CallCounts], int, int, int]:
        """Returns the calls by kind, and the numbers of files, directories and processes."""
        with (
            self.file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as counted,
        ):
            kinds = {}
            for i, kind in enumerate(KINDS):
                calls, failed, moved, nanoseconds, _, threads, _, processes = _CALLS.unpack_from(
                    counted, i * _CALLS.size
                )
                seconds = nanoseconds / 1e9
                kinds[kind] = CallCounts(calls, failed, moved, seconds, threads, processes)
            files, directories, processes = _TOTALS.unpack_from(counted, len(KINDS) * _CALLS.size)
        return kinds, files, directories, processes

    def finish(self) -> str:
        """Writes the report and returns it as a table; raises `DiskError`."""
        from pydist.data.publish import publish

        kinds, files, directories, processes = self.read()
        content = {
            "files": files,
            "directories": directories,
            "processes": processes,
            "calls": {kind: asdict(calls) for kind, calls in kinds.items()},
        }
        publish(self._report, (json.dumps(content, indent=1) + "\n").encode())
        head = f"{'':<8}{'calls':>12}{'failed':>10}{'MB':>12}{'seconds':>10}"
        lines = [head + f"{'threads':>9}{'processes':>11}"]
        for kind, calls in kinds.items():
            if calls.calls:
                lines.append(
                    f"{kind:<8}{calls.calls:>12,}{calls.failed:>10,}{calls.bytes / 1e6:>12,.1f}"
                    f"{calls.seconds:>10.3f}{calls.threads:>9}{calls.processes:>11}"
                )
        lines.append(f"{files:,} files, {directories:,} directories, {processes:,} processes")
        return "\n".join(lines)
