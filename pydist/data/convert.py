"""Copies data sets from one file format into another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.each_file import Progress, Workers, for_each
from pydist.data.file_image import RECIPE, recipe_hash
from pydist.data.formats import Storage, StoredFile
from pydist.data.index import fault_of
from pydist.data.journal import Journal
from pydist.data.lock import FolderLock
from pydist.data.made import MadeFiles, checksum_of_file, present_set
from pydist.data.manifest import DataFile, Manifest
from pydist.data.open_files import OpenedFile, OpenFiles, in_one_line
from pydist.data.options import ConvertOptions
from pydist.data.publish import make_folder, need_space, real_path
from pydist.data.regular import TrustedTree
from pydist.data.trust import FileTrust
from pydist.errors import DataError, DoesNotFit, PydistError, UsageError, one_line, out_of_memory
from pydist.owner import remove_temporaries
from pydist.registry import FORMATS


def convert_dataset(
    source: str | Path,
    folder: str | Path,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
    *,
    workers: Workers = 1,
    trust: FileTrust | None = None,
) -> Manifest:
    """Copies a data set: the arrays and texts of its samples, with splits and statistics.

    Each source file is compared with its checksum. Files are written atomically, and the manifest
    last; an interrupted run can be repeated and keeps what is complete. Arrays that the manifest
    does not name are not copied.

    Args:
        source: the folder of a data set, with `dataset.json`.
        folder: the new folder.
        options: format and storage.
        progress: called after each source file.
        workers: processes that copy, or an executor; see `for_each`. Each holds the arrays of one
            file.
        trust: how far the files of the source are trusted.

    Returns:
        The manifest that was written.

    Raises:
        DataError: a source file is missing, damaged, or not as expected; or a link in `folder`
            would lead a new file out of it.
        UsageError: the format has no such storage or can't be written; `folder` is the source, or
            holds another data set; or another process writes there.
        DiskError: not enough space, or the folder can't be written.
    """
    options = options or ConvertOptions()
    before, root = Path(source), Path(folder)
    manifest = Manifest.load(before)
    if manifest.dims < 3:
        raise UsageError(f"{before} has samples of {manifest.dims} dims; volumes can be converted")
    if real_path(before) == real_path(root):
        raise UsageError(f"{root}: it would overwrite what it is made from; choose another folder")
    writer: type[StoredFile] = FORMATS.get(options.format)
    cut = options.layout == "channel-first"
    storage = Storage(
        options.chunks or (),
        options.shards or (),
        options.compression,
        channels_last=manifest.axes == "DHWC" and not cut,
    )
    writer.check_storage(storage)
    recipe = recipe_hash([options.recipe(), manifest.digest])
    tasks = [
        _Task(
            before, root, replace(manifest, files=(entry,)), options.format, storage, cut, names,
            trust or FileTrust(),
        )
        for entry, names in zip(manifest.files, _names(manifest, options), strict=True)
    ]  # fmt: skip
    make_folder(root)
    if options.compression == "none":
        need_space(root, _missing_bytes(root, tasks))
    with FolderLock(root):
        remove_temporaries(root)
        present = present_set(root, recipe, options.overwrite)
        names = {name for task in tasks for name in task.names}
        files = MadeFiles(root, present, names)
        tree = TrustedTree(root)
        for name in names:
            tree.path(name)  # files are not written through links to elsewhere
        if (
            present
            and present.origin.get(RECIPE) != recipe
            and not names.isdisjoint(file.path for file in present.files)
        ):
            files.replace()
        made = _made(tasks, files.journal, present, recipe, progress, workers)
        converted = replace(
            manifest,
            files=tuple(file for files in made for file in files),
            axes="CDHW" if cut else manifest.axes,
            file_format=options.format,
            origin={**manifest.origin, "converted": options.recipe(), RECIPE: recipe},
        )
        converted.save(root)
        files.complete(converted)
    return converted


@dataclass(frozen=True)
class _Task:
    """A source file that is to be copied.

    Attributes:
        source: folder of the source.
        folder: folder of the copy.
        manifest: of the source, with this file alone.
        file_format: of the copy.
        storage: of the copy.
        cut: whether each sample becomes a file, channel first.
        names: of the files to write.
        trust: how far the source is trusted.
        before: their entries in the manifest, if an earlier run has written them.
    """

    source: Path
    folder: Path
    manifest: Manifest
    file_format: str
    storage: Storage
    cut: bool
    names: tuple[str, ...]
    trust: FileTrust
    before: tuple[DataFile, ...] = ()

    @property
    def entry(self) -> DataFile:
        """Path of the file that is copied."""
        return self.manifest.files[0]


def _copy(task: _Task) -> list[DataFile]:
    """Copies one file, unless its copies of an earlier run are intact."""
    if task.before and not any(fault_of(task.folder, file, FileTrust()) for file in task.before):
        return list(task.before)
    if (fault := fault_of(task.source, task.entry, task.trust)) is not None:
        raise DataError(fault)
    roots, untrusted = task.trust.allow_roots, task.trust.untrusted
    files = OpenFiles(task.source, task.manifest, roots, 1, None, untrusted, keeps_process=True)
    writer: type[StoredFile] = FORMATS.get(task.file_format)
    try:
        arrays, texts = files.read(task.entry, lambda opened: _content(task, opened))
        made = []
        for number, name in enumerate(task.names):
            path = task.folder / name
            content = _sample(task, arrays, number) if task.cut else arrays
            writer.write(path, content, texts, task.storage)
            size, checksum = checksum_of_file(path)
            made.append(_entry(task, number, name, size, checksum))
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, PydistError):
            raise
        where, line = task.source / task.entry.path, one_line(error)
        if out_of_memory(error):
            raise DoesNotFit(f"{where}: {line}") from error
        # HDF5 has a limit of 64 kB for an attribute, for example.
        raise DataError(f"{where}: can't be stored as {task.file_format}: {line}") from error
    finally:
        files.close()
    return made


def _content(task: _Task, opened: OpenedFile) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Reads the arrays that the manifest names, in this machine's byte order, and the texts."""
    file, manifest = opened.file, task.manifest
    wanted = {manifest.dataset: opened.samples}
    with in_one_line(type(file), file.path):
        texts = file.texts()
        if manifest.target and manifest.target_names:
            wanted[manifest.target] = file.dataset(manifest.target)
    if opened.label is not None:
        wanted[manifest.label] = opened.label
    found = {}
    for name, array in wanted.items():
        try:
            values = np.asarray(file.read(array, ()))
        except file.errors as error:
            raise DataError(f"{file.path}: {name!r} is damaged: {one_line(error)}") from error
        found[name] = values.astype(values.dtype.newbyteorder("="), copy=False)
    return found, texts


def _sample(
    task: _Task, arrays: dict[str, npt.NDArray[Any]], number: int
) -> dict[str, npt.NDArray[Any]]:
    """Cuts one sample out of a file's arrays, channel first."""
    manifest, entry = task.manifest, task.entry
    extents = entry.extents or manifest.sample_shape[1:]
    window = tuple(slice(o, o + n) for o, n in zip(entry.offsets[number], extents, strict=True))
    cut = dict(arrays)
    if manifest.label:
        cut[manifest.label] = np.ascontiguousarray(arrays[manifest.label][window])
    samples = arrays[manifest.dataset]
    last = manifest.axes == "DHWC"
    window = window if last else (slice(None), *window)
    samples = np.moveaxis(samples[window], -1, 0) if last else samples[window]
    cut[manifest.dataset] = np.ascontiguousarray(samples)
    return cut


def _entry(task: _Task, number: int, name: str, size: int, checksum: str) -> DataFile:
    entry = replace(task.entry, path=name, bytes=size, checksum=checksum)
    if not task.cut:
        return entry
    means = entry.means[number : number + 1]
    return replace(entry, offsets=((0, 0, 0),), means=means)


def _names(manifest: Manifest, options: ConvertOptions) -> list[tuple[str, ...]]:
    """Returns the names of the new files, for each source file."""
    suffix = FORMATS.get(options.format).suffix
    names = []
    for entry in manifest.files:
        path = PurePosixPath(entry.path)
        suffixes = (".hdf5", ".h5", ".zarr", ".tfrecord.gz", ".tfrecords", ".tfrecord")
        ending = next((each for each in suffixes if path.name.endswith(each)), "")
        stem = entry.path.removesuffix(ending)
        count = len(entry.offsets) if options.layout == "channel-first" else 1
        several = [f"{stem}_{n:0{len(str(count - 1))}}" for n in range(count)]
        names.append(tuple(f"{each}{suffix}" for each in (several if count > 1 else [stem])))
    often = Counter(name for each in names for name in each).most_common(1)
    if often and often[0][1] > 1:
        raise DataError(f"two files of the source would become {often[0][0]!r}")
    written = {name for each in names for name in each}
    for name in sorted(written):
        for outer in map(str, PurePosixPath(name).parents):
            if outer in written:  # to publish it would remove what is in it
                raise DataError(f"files of the source would become {outer!r} and, in it, {name!r}")
    return names


def _made(
    tasks: Sequence[_Task],
    journal: Journal,
    present: Manifest | None,
    recipe: str,
    progress: Progress | None,
    workers: Workers,
) -> list[list[DataFile]]:
    """Copies the files that an earlier run with the same recipe has not."""
    for folder in {(task.folder / name).parent for task in tasks for name in task.names}:
        remove_temporaries(folder)
    same = present is not None and present.origin.get(RECIPE) == recipe
    entries = {file.path: file for file in present.files} if present and same else {}
    known = []
    for task in tasks:
        before = [entries.get(n) or _of_journal(journal, recipe, task, n) for n in task.names]
        complete = [file for file in before if file is not None]
        known.append(replace(task, before=tuple(complete) if len(complete) == len(before) else ()))
    found: dict[int, list[DataFile]] = {}
    for number, made in for_each(_copy, known, workers):
        found[number] = made
        for file in made:
            journal.add(file.path, [recipe, file.bytes, file.checksum])
        if progress:
            progress(len(found), len(tasks), tasks[number].entry.path)
    return [found[number] for number in range(len(tasks))]


def _of_journal(journal: Journal, recipe: str, task: _Task, name: str) -> DataFile | None:
    try:
        made_by, size, checksum = journal.get(name)
    except (TypeError, ValueError):
        return None
    number = task.names.index(name)
    return _entry(task, number, name, size, checksum) if made_by == recipe else None


def _missing_bytes(root: Path, tasks: Sequence[_Task]) -> int:
    """Returns a lower bound of the bytes that are still to be written."""
    total = 0
    for task in tasks:
        manifest = task.manifest
        extents = task.entry.extents or manifest.sample_shape[1:]
        size = manifest.sample_shape[0] * np.dtype(manifest.dtype).itemsize
        voxels = int(np.prod([size, *extents], dtype=object))
        if not all((root / name).exists() for name in task.names):
            total += voxels * (len(task.names) if task.cut else 1)
    return total
