"""Claims a folder for a study, so that the same command continues it and no other one writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydist.data.lock import FolderLock
from pydist.data.publish import make_folder, publish
from pydist.errors import UsageError
from pydist.parsing import parse_json

FILE_NAME = "study.json"
RESULTS_FILE = "results.json"


@contextmanager
def claimed(folder: Path, record: Mapping[str, Any]) -> Iterator[None]:
    """Claims a folder within the `with` block.

    Args:
        folder: made if missing.
        record: what identifies the study. A folder that was claimed with the same record is
            continued.

    Raises:
        UsageError: the folder has another study, or files and no study; or another process writes.
        DiskError: the folder can't be written.
    """
    make_folder(folder)
    with FolderLock(folder):
        path = folder / FILE_NAME
        text = json.dumps(record, indent=1, default=str) + "\n"
        if not path.exists():
            others = [each.name for each in folder.iterdir() if not each.name.startswith(".")]
            if others:
                raise UsageError(f"{folder} has {min(others)} and no study: choose another folder")
            publish(path, text.encode())
        elif (before := _read(path)) != json.loads(text):
            changed = [key for key in before if before[key] != json.loads(text).get(key)]
            raise UsageError(
                f"{folder} has a study with other {', '.join(changed) or 'settings'}: repeat its "
                "command, or choose another folder"
            )
        yield


def _read(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {}


def write_results(folder: Path, record: Mapping[str, Any]) -> Path:
    """Writes the results of a study as JSON; returns the path."""
    path = folder / RESULTS_FILE
    publish(path, (json.dumps(record, indent=1, default=str) + "\n").encode())
    return path
