"""Private directories of jobs, and the removal of files that killed jobs have left.

A job has a directory in the temporary folder, named after the process that owns it. MPI libraries
keep shared memory and session folders of their own, which remain when an entire job is killed with
SIGKILL. So each rank lists those that it maps in the job's directory, and the next job removes the
directories of dead owners and the files listed there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydist import owner

_PREFIX = "pydist-"
_NAME = re.compile(r"pydist-([0-9a-f]{8}-[0-9a-z]+-[0-9a-z]+)-[^/]*")
_SHARED = Path("/dev/shm")
_LISTED = "mapped"
_SEGMENTS = ("sm_segment.", "vader_segment.", "mpich_shm_", "nccl-")
"""Prefixes of shared memory of MPI libraries and NCCL. Files with other names are the user's."""
_SESSIONS = ("ompi.", "prte.")
"""Prefixes of Open MPI's session folders."""
_TOPOLOGY = "hydra_hwloc_xmlfile_*"
"""Files in which MPICH's launcher describes the machine. Ranks read them as they start."""
_TOPOLOGY_AGE = 3600.0
"""Age in seconds after which a job's ranks no longer need the file."""


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Makes a directory for this user alone, with a path short enough for a socket's name.

    First removes the files that killed jobs of this user have left.
    """
    path = _make()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def list_mapped(directory: Path | None) -> Path | None:
    """Lists the shared memory and the MPI files that this process uses, for `remove_leftovers`.

    Args:
        directory: the job's; None makes one for this process, if there is anything to list.

    Returns:
        The directory that was made, which the caller removes when the process ends.
    """
    mapped = _mapped("self")
    if not mapped:
        return None
    made = None
    with contextlib.suppress(OSError):
        if directory is None:
            directory = made = _make()
        text = "".join(f"{path}\n" for path in sorted(mapped))
        (directory / f"{_LISTED}-{os.getpid()}").write_text(text, encoding="utf-8")
    return made


def remove_leftovers() -> None:
    """Removes files that dead jobs of this user have left, and none that a live process may use."""
    for folder in {_parent(), Path(tempfile.gettempdir()), _SHARED}:
        with contextlib.suppress(OSError):
            for path in sorted(folder.iterdir()):
                match = _NAME.fullmatch(path.name)
                if match is not None and owner.is_running(match[1]) is False and _is_mine(path):
                    _remove_listed(path)
                    with contextlib.suppress(OSError):
                        owner.remove(path)
    for path in Path("/tmp").glob(_TOPOLOGY):  # regardless of TMPDIR
        with contextlib.suppress(OSError):
            if _is_mine(path) and time.time() - path.lstat().st_mtime > _TOPOLOGY_AGE:
                path.unlink()


def _make() -> Path:
    remove_leftovers()
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{owner.tag()}-", dir=_parent()))


def _parent() -> Path:
    parent = tempfile.gettempdir()
    return Path(parent if len(parent) < 56 else "/tmp")


def _remove_listed(directory: Path) -> None:
    """Removes the files that a dead job's ranks have listed, unless a live process maps them."""
    listed: set[Path] = set()
    for file in directory.glob(f"{_LISTED}-*"):
        with contextlib.suppress(OSError, ValueError):
            listed |= {found for line in file.read_text().splitlines() if (found := _known(line))}
    listed = {path for path in listed if _is_mine(path)}
    if not listed:
        return
    used: set[Path] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            used |= _mapped(process.name)
    for path in listed - used:
        with contextlib.suppress(OSError):
            owner.remove(path)


def _mapped(process: str) -> set[Path]:
    """Returns shared memory and session folders that a process maps; empty without access."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
        places = (line.split(maxsplit=5)[5:] for line in lines)
        return {found for place in places if place and (found := _known(place[0]))}
    return set()


def _known(place: str) -> Path | None:
    """Returns the path to remove for a mapped file: the file, or its Open MPI session folder."""
    path = Path(place)
    if place.endswith(" (deleted)") or ".." in path.parts or not path.is_absolute():
        return None
    if path.parent == _SHARED:
        return path if path.name.startswith(_SEGMENTS) else None
    with contextlib.suppress(ValueError):
        first = path.relative_to(tempfile.gettempdir()).parts[0]
        if first.startswith(_SESSIONS):
            return Path(tempfile.gettempdir(), first)
    return None


def _is_mine(path: Path) -> bool:
    """Returns whether a path belongs to this user and is not a link."""
    with contextlib.suppress(OSError):
        return path.lstat().st_uid == os.geteuid() and not path.is_symlink()
    return False
