"""Facts about a data set: from its manifest, and from a reading of all voxels."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.axes import label_file_order
from pydist.data.each_file import Progress, Workers, for_each
from pydist.data.index import fault_of, listed_often, require_targets
from pydist.data.indexed import slabs
from pydist.data.journal import Journal
from pydist.data.lock import lock_if_writable
from pydist.data.made import state_of
from pydist.data.manifest import DataFile, Manifest
from pydist.data.open_files import OpenedFile, OpenFiles, in_one_line
from pydist.data.trust import FileTrust
from pydist.errors import DataError, DiskError

RESULTS = ".info.json"
"""Journal beside the data with the results of deep readings, by file."""
_MOST_LABELS = 1000
"""Different labels of a file; with more they are no classes."""


@dataclass
class Facts:
    """What was found in the voxels of one file, or of several.

    Attributes:
        files: number of files that were read.
        low: least finite value per channel; None without one.
        high: largest finite value per channel; None without one.
        nan: values that are NaN.
        infinite: values that are infinite.
        labels: voxels by label.
        faults: one line for each file that is missing, damaged or not as expected.
    """

    files: int = 0
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)
    nan: int = 0
    infinite: int = 0
    labels: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Adds values, channel first."""
        self.low = self.low or [None] * len(values)
        self.high = self.high or [None] * len(values)
        for channel, each in enumerate(values):
            finite = each
            if each.dtype.kind == "f":
                self.nan += int(np.isnan(each).sum())
                self.infinite += int(np.isinf(each).sum())
                finite = each[np.isfinite(each)]
            if finite.size:
                low, high = finite.min().item(), finite.max().item()
                self.low[channel] = _of_both(min, self.low[channel], low)
                self.high[channel] = _of_both(max, self.high[channel], high)

    def add_labels(self, labels: npt.NDArray[Any]) -> None:
        """Adds labels of any shape.

        Raises:
            DataError: there are too many different ones.
        """
        found, counts = np.unique(labels, return_counts=True)
        total = Counter(self.labels)
        total.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        if len(total) > _MOST_LABELS:
            raise DataError(f"more than {_MOST_LABELS} different labels")
        self.labels = dict(sorted(total.items()))

    def merge(self, other: Facts) -> None:
        """Adds what was found in other files."""
        self.files += other.files
        self.nan += other.nan
        self.infinite += other.infinite
        self.faults += other.faults
        self.labels = dict(sorted((Counter(self.labels) + Counter(other.labels)).items()))
        if other.low:
            self.low = self.low or [None] * len(other.low)
            self.high = self.high or [None] * len(other.high)
            pairs = zip(self.low, other.low, strict=True), zip(self.high, other.high, strict=True)
            self.low = [_of_both(min, a, b) for a, b in pairs[0]]
            self.high = [_of_both(max, a, b) for a, b in pairs[1]]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Facts:
        """Returns the facts from the record that `asdict` has made, as JSON keeps it."""
        labels = {int(label): int(count) for label, count in record["labels"].items()}
        return cls(**{**record, "labels": labels})


def deep_facts(
    root: str | Path,
    progress: Progress | None = None,
    *,
    workers: Workers = 1,
    trust: FileTrust | None = None,
) -> dict[str, Facts]:
    """Reads all voxels of a data set, and compares all files with their checksums.

    Results are kept beside the data, in `RESULTS`: a repeated or interrupted call reads only files
    that it has not read, that have changed, or that had a fault. In a folder that can't be written
    nothing is kept.

    Args:
        root: the data set's folder.
        progress: called after each file.
        workers: processes that read, or an executor; see `for_each`.
        trust: how far the files are trusted.

    Returns:
        What was found, by split; files that can't be read are among the faults.

    Raises:
        DataError: the manifest is missing or damaged.
        UsageError: another process writes into the folder.
    """
    folder = Path(root)
    manifest, trust = Manifest.load(folder), trust or FileTrust()
    known = kept_facts(folder, trust)
    if known is not None and not any(facts.faults for facts in known.values()):
        return known  # without the lock, which others may hold for hours
    return _by_split(manifest, _found(folder, manifest, progress, workers, trust, keeps=True))


def deep_faults(
    root: str | Path,
    progress: Progress | None = None,
    *,
    workers: Workers = 1,
    trust: FileTrust | None = None,
) -> list[str]:
    """Reads all voxels of a data set, and compares all files with their checksums.

    Nothing is taken from earlier calls: a disk may have lost bits of a file that was not changed.

    Args:
        root: the data set's folder.
        progress: called after each file.
        workers: processes that read, or an executor; see `for_each`.
        trust: how far the files are trusted.

    Returns:
        One line for each file that is missing, damaged, not as expected or listed twice, or has
        NaN or infinity in its voxels or targets, which training refuses; empty if there is none.

    Raises:
        DataError: the manifest is missing or damaged.
        UsageError: another process writes into the folder.
    """
    folder = Path(root)
    manifest, trust = Manifest.load(folder), trust or FileTrust()
    faults = listed_often(folder, manifest)
    found = _found(folder, manifest, progress, workers, trust, keeps=False)
    for path in dict.fromkeys(entry.path for entry in manifest.files):
        facts = found[path]
        faults += facts.faults
        if facts.nan or facts.infinite:
            faults.append(f"{folder / path}: {facts.nan} NaN, {facts.infinite} infinite values")
    return faults


def _found(
    folder: Path,
    manifest: Manifest,
    progress: Progress | None,
    workers: Workers,
    trust: FileTrust,
    *,
    keeps: bool,
) -> dict[str, Facts]:
    """Returns the facts of each file; `keeps`: results, and uses those of earlier calls."""
    with lock_if_writable(folder):
        # Before the files are read: what was found in a file that changes meanwhile is not kept.
        states = _states(folder, manifest, trust) if keeps else {}
        found = _kept(folder, manifest, states) if keeps else {}
        # A fault may be of the options or of the machine, not of the file.
        found = {path: facts for path, facts in found.items() if not facts.faults}
        missing = [entry for entry in manifest.files if entry.path not in found]
        journal = Journal(folder / RESULTS) if keeps else None
        tasks = [(folder, replace(manifest, files=(entry,)), trust) for entry in missing]
        for number, facts in for_each(_read, tasks, workers):
            name = missing[number].path
            found[name] = facts
            if journal is not None:
                try:
                    journal.add(name, [states[name], asdict(facts)])
                except DiskError:  # a folder that can only be read
                    journal = None
            if progress:
                progress(len(found), len(manifest.files), name)
    return found


def kept_facts(root: str | Path, trust: FileTrust | None = None) -> dict[str, Facts] | None:
    """Returns what the last `deep_facts` has found; `None` if that is not complete or is old.

    Args:
        root: the data set's folder.
        trust: how far the files are trusted.
    """
    folder = Path(root)
    manifest = Manifest.load(folder)
    found = _kept(folder, manifest, _states(folder, manifest, trust or FileTrust()))
    return _by_split(manifest, found) if len(found) == len(manifest.files) else None


def outline(root: str | Path) -> dict[str, Any]:
    """Returns what the manifest says, as plain values.

    Raises:
        DataError: it is missing or damaged.
    """
    manifest = Manifest.load(Path(root))
    shapes = Counter(
        file.extents or manifest.sample_shape[1:] for file in manifest.files for _ in file.offsets
    )
    can = ["none", "log1p", "window"]
    can += ["mean"] if manifest.table.has_means else []
    can += ["standardize"] if manifest.log1p_std and min(manifest.log1p_std) > 0 else []
    can += ["ct"] if manifest.intensity else []
    return {
        "folder": str(root),
        "format": manifest.file_format,
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.files),
        "checksums": sum(bool(file.checksum) for file in manifest.files),
        "samples": manifest.splits,
        "channels": manifest.sample_shape[0],
        "shapes": {" × ".join(map(str, shape)): count for shape, count in sorted(shapes.items())},
        "dtype": manifest.dtype,
        "axes": manifest.axes,
        "arrays": [n for n in (manifest.dataset, manifest.target, manifest.label) if n],
        "targets": list(manifest.target_names),
        "classes": list(manifest.class_names),
        "channel_names": list(manifest.channel_names),
        "normalizations": can,
    }


def _read(task: tuple[Path, Manifest, FileTrust]) -> Facts:
    """Reads one file; in a worker process."""
    root, manifest, trust = task
    entry = manifest.files[0]
    facts = Facts(files=1)
    if (fault := fault_of(root, entry, trust)) is not None:
        facts.faults.append(fault)
        return facts
    files = OpenFiles(
        root, manifest, trust.allow_roots, 1, None, trust.untrusted, keeps_process=True
    )
    try:
        return files.read(entry, lambda opened: _facts(manifest, entry, opened))
    except DataError as error:
        facts.faults.append(str(error))
        return facts
    finally:
        files.close()


def _facts(manifest: Manifest, entry: DataFile, opened: OpenedFile) -> Facts:
    facts = Facts(files=1)
    file = opened.file
    extents = entry.extents or manifest.sample_shape[1:]
    with in_one_line(type(file), file.path):
        for offset in entry.offsets:
            for slab in slabs(file, opened.samples, manifest.axes, offset, extents):
                facts.add(slab)
            if opened.label is not None:
                window = tuple(slice(o, o + n) for o, n in zip(offset, extents, strict=True))
                window = label_file_order(manifest.axes, window)
                facts.add_labels(file.read(opened.label, window))
    require_targets(manifest, opened)
    return facts


def _states(root: Path, manifest: Manifest, trust: FileTrust) -> dict[str, list[Any] | None]:
    """Returns what the facts of each file depend on; `None` for a missing one."""
    return {entry.path: _state(root, manifest, entry, trust) for entry in manifest.files}


def _state(root: Path, manifest: Manifest, entry: DataFile, trust: FileTrust) -> list[Any] | None:
    try:
        state = state_of(root / entry.path, trust.allow_roots)
    except OSError:
        return None
    arrays = [manifest.dataset, manifest.target, manifest.label, manifest.axes, manifest.dtype]
    said = [*arrays, manifest.sample_shape, entry.checksum, entry.offsets, entry.extents]
    roots = sorted({os.path.realpath(each) for each in trust.allow_roots})
    return [*state, json.loads(json.dumps(said)), roots]


def _kept(
    root: Path, manifest: Manifest, states: Mapping[str, list[Any] | None]
) -> dict[str, Facts]:
    """Returns the facts of earlier runs about files that have not changed since."""
    journal = Journal(root / RESULTS)
    found = {}
    for entry in manifest.files:
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            state, record = journal.get(entry.path)
            if state is not None and state == states[entry.path]:
                found[entry.path] = Facts.of(record)
    return found


def _by_split(manifest: Manifest, found: Mapping[str, Facts]) -> dict[str, Facts]:
    total: dict[str, Facts] = {}
    for entry in manifest.files:
        total.setdefault(entry.split, Facts()).merge(found[entry.path])
    return total


def _of_both(choose: Any, a: float | None, b: float | None) -> float | None:
    known: Sequence[float] = [n for n in (a, b) if n is not None]
    return choose(known) if known else None
