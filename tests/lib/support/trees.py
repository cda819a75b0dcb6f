"""Trees of files for tests of packs: random ones, and what is on disk, for comparison."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeAlias

from hypothesis import strategies as st

Tree: TypeAlias = "dict[bytes, bytes | Tree]"
"""Folders and the contents of files, by name."""

Found: TypeAlias = "dict[str, tuple[str, int, int, bytes]]"
"""By path: kind, mode, time in nanoseconds, and content."""

_BYTES = st.integers(1, 255).filter(lambda byte: byte != ord("/"))
_WORDS = st.sampled_from(
    ["a", "B", "*", "?", "[x]", "~", " ", "日本", "é", "a.b", "-", "{x}", "a\\b"]
)
NAMES = st.one_of(
    _WORDS.map(os.fsencode),
    st.lists(_BYTES, min_size=1, max_size=12).map(bytes),
).filter(lambda name: name not in (b".", b".."))
CONTENTS = st.one_of(
    st.just(b""),
    st.binary(max_size=200),
    st.binary(min_size=1, max_size=4).map(lambda unit: unit * 300),
)


def trees(depth: int = 4) -> st.SearchStrategy[Tree]:
    """Draws trees of up to `depth` levels, with empty folders and empty files."""
    files: st.SearchStrategy[Tree] = st.dictionaries(NAMES, CONTENTS, max_size=4)
    if depth == 1:
        return files
    folders = st.dictionaries(NAMES, trees(depth - 1), max_size=2)
    return st.builds(lambda one, other: {**one, **other}, files, folders)


def make(tree: Tree, folder: Path, number: int = 0) -> int:
    """Writes a tree to disk, with various modes and times; returns the next `number`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tree.items():
        path = folder / os.fsdecode(name)
        if isinstance(content, dict):
            number = make(content, path, number)
        else:
            path.write_bytes(content)
            number += 1
            path.chmod((0o644, 0o600, 0o755, 0o444, 0o640)[number % 5])
            os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number * 10**9))
    number += 1
    folder.chmod((0o755, 0o700, 0o750)[number % 3])
    os.utime(folder, ns=(0, 1_500_000_000_987_654_321 + number))
    return number


def found(folder: Path) -> Found:
    """Reads all that is below a folder on disk, which has the path "."."""
    everything: Found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.stat()
        kind = "folder" if path.is_dir() else "file"
        content = path.read_bytes() if kind == "file" else b""
        mode = stat.S_IMODE(status.st_mode)
        everything[str(path.relative_to(folder))] = (kind, mode, status.st_mtime_ns, content)
    return everything


def size_of(path: str, content: bytes) -> tuple[str, int]:
    """Returns the length instead of the content; here, where spawned workers can import it."""
    return path, len(content)
