"""Makes manifests for existing files, such as the public CosmoFlow set, and checks files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from pydist.data.data_file import kind_of
from pydist.data.each_file import Progress, Workers, for_each
from pydist.data.formats import StoredFile
from pydist.data.indexed import FileTask, Indexed, check_target, index_file
from pydist.data.journal import Journal
from pydist.data.lock import FolderLock, lock_if_writable
from pydist.data.log1p import log1p_statistics
from pydist.data.made import checksum_of_file
from pydist.data.manifest import FILE_NAME, DataFile, Manifest
from pydist.data.open_files import OpenedFile, OpenFiles, in_one_line
from pydist.data.options import IndexOptions
from pydist.data.trust import FileTrust
from pydist.errors import DataError, UsageError
from pydist.owner import remove_temporaries
from pydist.registry import FORMATS

_ORIGIN = "indexed files"
_JOURNAL = ".indexed.jsonl"
_DEEPEST = 100
"""Folders below that of a data set, within each other."""
_MOST_LOOKED_AT = 10_000
"""Entries of a linked folder among which there may be no file of data."""
_SPLITS = {"train": "train", "val": "val", "validation": "val", "test": "test"}
"""Splits by the name of a folder."""


def index_folder(
    root: str | Path,
    options: IndexOptions | None = None,
    progress: Progress | None = None,
    *,
    workers: Workers = 1,
    journal: Path | None = None,
    trust: FileTrust | None = None,
) -> Manifest:
    """Describes the files below `root` in a manifest, which `Manifest.save` can write.

    All files must have the same type and number of channels, and all samples the same shape.

    Args:
        root: the folder.
        options: what a sample is, and what is computed.
        progress: called after each file.
        workers: processes that read files, or an executor; see `for_each`.
        journal: a file that keeps the results until all are there: a repeated call goes on from it.
        trust: how far the files are trusted.

    Raises:
        DataError: there are no files, or one of them does not fit, is damaged, or is a symbolic
            link out of the folder.
        UsageError: an option is out of range.
    """
    options = options or IndexOptions()
    if not 0 <= options.validation < 1 or (options.width is not None and options.width < 1):
        raise UsageError(
            f"validation={options.validation}, width={options.width}: a fraction in [0, 1) and at "
            "least one voxel"
        )
    if len(options.class_names) == 1 or len(set(options.class_names)) < len(options.class_names):
        names = ", ".join(options.class_names)
        raise UsageError(f"class_names={names}: at least two, and each name once")
    folder = Path(root)
    trust = trust or FileTrust()
    file_format, paths = _files(folder, options.format, trust)
    tasks = [
        FileTask(
            folder, path, file_format, split, options.width, options.dataset, options.target,
            options.statistics, options.checksums, len(options.class_names), trust,
        )
        for path, split in zip(paths, _splits(folder, paths, options.validation), strict=True)
    ]  # fmt: skip
    found = _indexed(tasks, None if journal is None else Journal(journal), progress, workers)
    kind = found[0].kind
    for each in found:
        if each.kind != kind:
            first = folder / found[0].file.path
            raise DataError(
                f"{folder / each.file.path} holds {each.kind}, but {first} holds {kind}"
            )
    mean, std = log1p_statistics(each.logs for each in found)
    return Manifest(
        sample_shape=kind.sample_shape,
        axes=kind.axes,
        dtype=kind.dtype,
        files=tuple(each.file for each in found),
        dataset=options.dataset,
        target=options.target,
        target_names=kind.target_names,
        class_names=options.class_names,
        log1p_mean=mean,
        log1p_std=std,
        origin={
            "kind": _ORIGIN,
            "options": {**asdict(options), "class_names": list(options.class_names)},
        },
        file_format=file_format,
    )


def index_dataset(
    root: str | Path,
    options: IndexOptions | None = None,
    progress: Progress | None = None,
    *,
    workers: Workers = 1,
    overwrite: bool = False,
    trust: FileTrust | None = None,
) -> Manifest:
    """Makes a data set of the files below `root`, in place: writes `dataset.json` beside them.

    An interrupted run can be repeated, and reads only the files that it has not read or that have
    changed.

    Args:
        root: the folder.
        options: see `index_folder`.
        progress: see `index_folder`.
        workers: see `index_folder`.
        overwrite: replace a manifest that was made in another way.
        trust: see `index_folder`.

    Raises:
        DataError: see `index_folder`.
        UsageError: see `index_folder`; or another process writes there, or the manifest was made in
            another way.
        DiskError: the folder can't be written.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    with FolderLock(folder):
        remove_temporaries(folder)
        if (folder / FILE_NAME).exists() and not overwrite:
            kind = Manifest.load(folder).origin.get("kind")
            if kind != _ORIGIN:
                raise UsageError(
                    f"{folder} is a data set already ({kind}); --overwrite (overwrite=True) "
                    "replaces its manifest"
                )
        journal = folder / _JOURNAL
        manifest = index_folder(
            folder, options, progress, workers=workers, journal=journal, trust=trust
        )
        manifest.save(folder)
        Journal(journal).remove()
    return manifest


def verify_dataset(
    root: str | Path,
    progress: Progress | None = None,
    *,
    workers: int = 1,
    trust: FileTrust | None = None,
) -> list[str]:
    """Reads every file of a data set and compares size and checksum with the manifest.

    Contiguous HDF5 has no checksums of its own: without this, a flipped bit goes unnoticed. Files
    that are folders and have no checksum in the manifest are not compared. Then each file is
    opened as for training: its arrays must fit the manifest, and its target must be finite.

    Args:
        root: the folder.
        progress: called after each file.
        workers: threads that read files.
        trust: how far the files are trusted.

    Returns:
        One line for each file that is missing, differs, has NaN or infinity in its target, is
        listed twice, or is a symbolic link out of the folder; empty if there is none.

    Raises:
        DataError: the manifest itself is missing or damaged.
        UsageError: it names a format that is not installed; or another process writes there.
    """
    folder = Path(root)
    manifest = Manifest.load(folder)
    trust = trust or FileTrust()
    files = OpenFiles(folder, manifest, trust.allow_roots, 1, None, trust.untrusted)
    if workers < 1:
        raise UsageError(f"workers={workers}: at least 1")
    faults = listed_often(folder, manifest)
    with lock_if_writable(folder), ThreadPoolExecutor(workers, "verify") as pool:
        try:
            found = pool.map(lambda entry: _unfit(files, entry, trust), manifest.files)
            for done, (entry, fault) in enumerate(zip(manifest.files, found, strict=True), 1):
                faults += [] if fault is None else [fault]
                if progress:
                    progress(done, len(manifest.files), entry.path)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            files.close()
    return faults


def listed_often(folder: Path, manifest: Manifest) -> list[str]:
    """Returns one line for each file that a manifest lists more than once."""
    often = Counter(entry.path for entry in manifest.files)
    return [f"{folder / path}: listed {n} times" for path, n in often.items() if n > 1]


def fault_of(folder: Path, entry: DataFile, trust: FileTrust) -> str | None:
    """Compares a file with its entry in the manifest; returns one line if it differs."""
    kind = kind_of(entry.checksum)
    try:
        path = trust.path(folder, entry.path)
        if path.is_dir() and not kind:
            return None
        size, checksum = checksum_of_file(path, kind or "crc32c", trust.allow_roots)
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"{folder / entry.path}: {error.strerror}"
    if size != entry.bytes:
        return f"{path}: {size} bytes, the manifest says {entry.bytes}"
    if kind and checksum != entry.checksum:
        return f"{path}: checksum {checksum}, the manifest says {entry.checksum}"
    return None


def require_targets(manifest: Manifest, opened: OpenedFile) -> None:
    """Raises `DataError` unless a file has the manifest's targets, and these are finite."""
    if not (manifest.target and manifest.target_names):
        return
    file = opened.file
    with in_one_line(type(file), file.path):
        target = file.read(file.dataset(manifest.target), ())
    if target.shape != (len(manifest.target_names),):
        raise DataError(f"{file.path}: {manifest.target!r} has the shape {target.shape}")
    check_target(file.path, manifest.target, target)


def _unfit(files: OpenFiles, entry: DataFile, trust: FileTrust) -> str | None:
    """Returns one line about a file that differs from its entry, or can't be trained on."""
    if (fault := fault_of(files.root, entry, trust)) is not None:
        return fault
    try:
        files.read(entry, lambda opened: require_targets(files.manifest, opened))
    except DataError as error:
        return str(error)
    return None


def _files(folder: Path, file_format: str, trust: FileTrust) -> tuple[str, list[Path]]:
    """Returns a format, and its files below a folder in the order of their names."""
    names = FORMATS.names if file_format == "auto" else (file_format,)
    kinds: dict[str, type[StoredFile]] = {name: FORMATS.get(name) for name in names}
    found: dict[str, list[Path]] = {}
    links: set[Path] = set()
    for name, path, is_linked in _below(folder, kinds, trust):
        found.setdefault(name, []).append(path)
        if is_linked:
            links.add(path)
    if not found:
        raise DataError(f"{folder}: no files of the format {', '.join(names)} below it")
    if len(found) > 1:
        counts = ", ".join(f"{len(found[name])} of {name}" for name in names if name in found)
        raise UsageError(f"{folder} has files of several formats: {counts}; choose one: --format")
    ((name, paths),) = found.items()
    _refuse_second_names(paths, links)
    return name, paths


def _refuse_second_names(paths: Sequence[Path], links: Set[Path]) -> None:
    """Raises `DataError` for a link that leads to another sample's file.

    One file under two names could be in the training and the validation data.
    """
    if not links:
        return
    known = {os.path.realpath(path): path for path in paths if path not in links}
    for link in sorted(links):
        other = known.setdefault(os.path.realpath(link), link)
        if other is not link:
            raise DataError(f"{link} is a link to the same file as {other}: remove one of them")


def _below(
    folder: Path, kinds: Mapping[str, type[StoredFile]], trust: FileTrust
) -> Iterator[tuple[str, Path, bool]]:
    """Yields the files of some formats below a folder: format, path, and whether by a link."""
    entered = {os.path.realpath(folder): folder}

    def walk(inside: Path, depth: int, is_linked: bool) -> Iterator[tuple[str, Path, bool]]:
        if depth > _DEEPEST:
            raise DataError(f"{inside}: below more than {_DEEPEST} folders of the data set")
        for path in _sorted(inside):
            name, is_folder = _kind_of(path, kinds)
            is_link = path.is_symlink()
            if is_link and (name is not None or is_folder):
                if name is None and _is_beside_data(path, kinds):
                    continue
                trust.path(folder, path.relative_to(folder).as_posix())
            if name is not None:
                yield name, path, is_linked or is_link
            elif is_folder:
                if is_link and (other := entered.setdefault(os.path.realpath(path), path)) != path:
                    raise DataError(f"{path} is a link to the same folder as {other}: remove it")
                yield from walk(path, depth + 1, is_linked or is_link)

    return walk(folder, 0, False)


def _is_beside_data(link: Path, kinds: Mapping[str, type[StoredFile]]) -> bool:
    """Returns whether a link leads back to a folder above it, or to one without files of data."""
    target = Path(os.path.realpath(link))
    if Path(os.path.realpath(link.parent)).is_relative_to(target):
        return True
    walked = os.walk(target)
    entries = (Path(inside, each) for inside, *names in walked for each in chain(*names))
    try:
        for number, each in enumerate(entries):
            if number == _MOST_LOOKED_AT or any(kind.is_one(each) for kind in kinds.values()):
                return False
    except OSError:
        return False
    return True


def _sorted(folder: Path) -> list[Path]:
    """Returns the visible entries of a folder in the order of their names."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error


def _kind_of(path: Path, kinds: Mapping[str, type[StoredFile]]) -> tuple[str | None, bool]:
    """Returns the format of a file, if it has one of them, and whether it is a folder."""
    try:
        if path.is_symlink() and not path.exists():
            raise DataError(f"{path} is a link to {path.readlink()}, which is not there")
        name = next((name for name, kind in kinds.items() if kind.is_one(path)), None)
        return name, path.is_dir()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _indexed(
    tasks: Sequence[FileTask], journal: Journal | None, progress: Progress | None, workers: Workers
) -> list[Indexed]:
    """Describes files, except those whose results the journal has."""
    found: dict[int, Indexed] = {}
    for number, task in enumerate(tasks):
        kept = None if journal is None else journal.get(task.name)
        try:
            if kept is not None and kept["recipe"] == task.recipe:
                found[number] = Indexed.of(kept["found"])
        except (LookupError, TypeError, ValueError):
            continue
    missing = [number for number in range(len(tasks)) if number not in found]
    recipes = {number: tasks[number].recipe for number in missing}  # before they are read
    for position, result in for_each(index_file, [tasks[n] for n in missing], workers):
        number = missing[position]
        found[number] = result
        if journal is not None:
            journal.add(tasks[number].name, {"recipe": recipes[number], "found": asdict(result)})
        if progress:
            progress(len(found), len(tasks), tasks[number].path.name)
    return [found[number] for number in range(len(tasks))]


def _splits(root: Path, paths: list[Path], validation: float) -> list[str]:
    """Returns the split of each file: that of its folder, else the last files are "val"."""
    splits = []
    first = len(paths) - round(len(paths) * validation)
    for i, path in enumerate(paths):
        folders = path.relative_to(root).parts[:-1]
        named = [_SPLITS[f.lower()] for f in folders if f.lower() in _SPLITS]
        splits.append(named[-1] if named else "train" if i < first else "val")
    return splits
