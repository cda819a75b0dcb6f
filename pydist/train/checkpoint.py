"""Writes checkpoints to disk: published atomically, verified by checksums, without code.

A checkpoint is a folder ``step-000120`` with

- ``NAME.safetensors`` for each part of the state (model, optimizer, ...): its tensors;
- ``state.json``: everything else, as `pydist.nested_state` writes it;
- ``manifest.json``: format version, step, and length and CRC-32C of every file.

It is written as ``.step-000120.tmp-...``, flushed to disk and renamed, so that a folder with the
final name is always complete, even if the job dies. Only then the link ``last`` is updated and old
checkpoints are removed. These functions are for one process; `pydist.train.state` has the
collective ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from pydist import nested_state, owner
from pydist._loader import native
from pydist.data.publish import flush_to_disk, reason_of, replace_folder
from pydist.errors import CheckpointError, DiskError
from pydist.parsing import parse_json

FORMAT = "pydist-checkpoint"
VERSION = 1
LAST = "last"

_STEP = re.compile(r"step-(\d{6,})")
_FILE = re.compile(r"[A-Za-z0-9_-]{1,64}\.(safetensors|json)")
_MANIFEST, _STATE = "manifest.json", "state.json"
_MANIFEST_LIMIT = 1 << 20
# The errors of reading a file whose content is not as written by `write`.
_NOT_AS_WRITTEN = (
    ValueError, TypeError, KeyError, AttributeError, RecursionError, SafetensorError,
)  # fmt: skip


def complete(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, oldest first; empty without a folder."""
    if not folder.is_dir():
        return []
    steps = {int(m[1]): p for p in folder.iterdir() if (m := _STEP.fullmatch(p.name))}
    return [steps[step] for step in sorted(steps)]


def is_checkpoint(folder: Path) -> bool:
    """Returns whether a folder is a checkpoint, or a link to one."""
    return all((folder / name).is_file() for name in (_MANIFEST, _STATE))


def is_named(folder: Path) -> bool:
    """Returns whether a path names a checkpoint, instead of a folder of checkpoints.

    A link does, unless it leads to an existing folder that is none itself, as on another disk.
    """
    target = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
    if any(_STEP.fullmatch(path.name) for path in (folder, target)):
        return True
    return folder.is_symlink() and (folder.name == LAST or not target.is_dir())


def write(folder: Path, step: int, parts: Mapping[str, object], keep: int = 2) -> Path:
    """Writes and publishes a checkpoint, then removes all but the latest `keep`.

    Args:
        folder: folder of the run's checkpoints; created if missing.
        step: training steps done. An existing checkpoint of the same step is replaced, unless it
            has the same content: a run that resumes from it and stops immediately has nothing to
            add.
        parts: state by name (letters, digits, ``_``, ``-``), for `nested_state.flatten_state`.
        keep: number of complete checkpoints to keep, at least 1.

    Returns:
        The checkpoint's folder.

    Raises:
        DiskError: the disk is full or fails; earlier checkpoints are unchanged.
        CheckpointError: a part holds a value that can't be stored.
    """
    files = _encode(parts)
    files[_MANIFEST] = _manifest_of(step, files)
    final = folder / f"step-{step:06d}"

    def fill(work: Path) -> None:
        for name, content in files.items():
            (work / name).write_bytes(content)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_published(final, files):
            replace_folder(final, fill)
        _point(folder / LAST, final.name)
        _remove_old(folder, keep)
    except OSError as error:
        size = sum(map(len, files.values())) / 1e6
        why = reason_of(error, folder)
        raise DiskError(f"can't write checkpoint {final} ({size:.1f} MB): {why}") from error
    return final


def read(path: Path) -> dict[str, Any]:
    """Reads a checkpoint and verifies every byte of it.

    Args:
        path: a checkpoint's folder.

    Returns:
        The parts, as passed to `write`, and "step".

    Raises:
        CheckpointError: it is missing, incomplete, damaged or of an unknown format. The message
            names the file, and the previous checkpoint if there is one.
        DiskError: a file can't be read, which may be intact.
    """
    try:
        manifest = _read_manifest(path)
        named = _STEP.fullmatch(path.name)
        if named is not None and int(named[1]) != manifest["step"]:
            raise ValueError(f"it is a copy of that of step {manifest['step']}")
        # Read once, not mapped: the verified bytes are used, and a shrinking file is no SIGBUS.
        files = {
            name: _verified(path / name, expected) for name, expected in manifest["files"].items()
        }
        skeletons = parse_json(files[_STATE])
        parts: dict[str, Any] = {
            part: nested_state.unflatten_state(
                skeleton, safetensors.torch.load(files[f"{part}.safetensors"])
            )
            for part, skeleton in skeletons.items()
        }
    except _NOT_AS_WRITTEN as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}{_way_out(path)}") from error
    except OSError as error:
        raise DiskError(f"can't read checkpoint {path}: {error}") from error
    return {**parts, "step": manifest["step"]}


def _encode(parts: Mapping[str, object]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    skeletons: dict[str, nested_state.Json] = {}
    for part, state in parts.items():
        tensors: dict[str, Tensor]
        skeletons[part], tensors = nested_state.flatten_state(state)
        files[f"{part}.safetensors"] = nested_state.encode(tensors)
    files[_STATE] = nested_state.dumps(skeletons)
    return files


def _manifest_of(step: int, files: Mapping[str, bytes]) -> bytes:
    sums = {
        name: {"bytes": len(data), "crc32c": f"{native.crc32c(data):08x}"}
        for name, data in files.items()
    }
    return _seal({"format": FORMAT, "version": VERSION, "step": step, "files": sums})


def _is_published(final: Path, files: Mapping[str, bytes]) -> bool:
    try:
        return all((final / name).read_bytes() == data for name, data in files.items())
    except FileNotFoundError:
        return False


def _seal(manifest: Mapping[str, object]) -> bytes:
    """Encodes the manifest with its own CRC-32C, so that checksums cover the entire checkpoint."""
    body = {key: value for key, value in manifest.items() if key != "crc32c"}
    crc = native.crc32c(json.dumps(body, indent=1).encode())
    return json.dumps({**body, "crc32c": f"{crc:08x}"}, indent=1).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        raise ValueError("manifest.json is missing" if path.is_dir() else "no such folder")
    with file.open("rb") as stream:
        raw = stream.read(_MANIFEST_LIMIT)
    try:
        manifest: dict[str, Any] = parse_json(raw)
    except ValueError as error:
        raise ValueError(f"manifest.json is not JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"manifest.json is not that of a {FORMAT}")
    if manifest["version"] != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {manifest['version']}, this pydist reads "
            f"version {VERSION}"
        )
    if raw != _seal(manifest):
        raise ValueError("manifest.json does not match its own checksum")
    for name in manifest["files"]:
        if not _FILE.fullmatch(name):
            raise ValueError(f"manifest.json names a file {name!r}")
    return manifest


def _verified(file: Path, expected: Mapping[str, Any]) -> bytes:
    """Returns the content of a file if it has the expected length and CRC-32C."""
    if not file.is_file() or file.is_symlink():
        raise ValueError(f"{file.name} is missing")
    size = file.stat().st_size
    if size == expected["bytes"]:
        data = file.read_bytes()
        size = len(data)
    if size != expected["bytes"]:
        raise ValueError(f"{file.name} has {size} bytes instead of {expected['bytes']}")
    crc = f"{native.crc32c(data):08x}"
    if crc != expected["crc32c"]:
        raise ValueError(f"{file.name} has CRC-32C {crc} instead of {expected['crc32c']}")
    return data


def _way_out(path: Path) -> str:
    siblings = complete(path.parent)
    earlier = siblings[: siblings.index(path)] if path in siblings else []
    if not earlier:
        return "; there is no earlier one"
    return f"; the previous one is {earlier[-1]}: delete {path} to resume from it"


def _point(link: Path, target: str) -> None:
    fresh = owner.temporary(link)
    try:
        fresh.symlink_to(target)
        fresh.replace(link)
    finally:
        fresh.unlink(missing_ok=True)
    flush_to_disk(link.parent)


def _remove_old(folder: Path, keep: int) -> None:
    for old in complete(folder)[:-keep]:
        # Renamed first: a crash must not leave an incomplete folder under a final name.
        doomed = owner.temporary(old)
        old.rename(doomed)
        shutil.rmtree(doomed)
