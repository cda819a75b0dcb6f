"""Writes sets of synthetic universes as HDF5 files, with a manifest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from pydist.data.each_file import Progress
from pydist.data.file_image import RECIPE, file_image, h5py_arguments, recipe_hash, storage_of
from pydist.data.lock import FolderLock
from pydist.data.log1p import Log1pSums, log1p_statistics
from pydist.data.made import MadeFiles, checksum_of, present_set
from pydist.data.manifest import DataFile, Manifest
from pydist.data.publish import make_folder, require_room
from pydist.data.universes.options import PARAMETER_BOXES, TARGET_NAMES, UniverseOptions
from pydist.data.universes.simulate import UniverseParameters, draw_parameters, simulate
from pydist.errors import UsageError
from pydist.owner import remove_temporaries


def generate_universes(
    out_dir: str | Path, options: UniverseOptions, progress: Progress | None = None
) -> Manifest:
    """Makes a set of universes: HDF5 files and `dataset.json` in `out_dir`.

    Files are written atomically, and the manifest last. An interrupted run can be repeated: it
    keeps files that were made with the same options and are not damaged. Equal options give equal
    files, on any number of workers. One process at a time may write to a folder; a second one is
    refused.

    Args:
        out_dir: the folder, made if missing.
        options: of the set.
        progress: called after each universe, in the caller's thread.

    Returns:
        The manifest that was written.

    Raises:
        UsageError: the folder holds a data set made with other options, or more universes of it,
            and `overwrite` is off; or files of other origin; or another process writes there.
        DiskError: not enough space, or the folder can't be written.
    """
    root = Path(out_dir)
    make_folder(root)
    size = len(options.redshifts) * options.box**3 * np.dtype(options.dtype).itemsize
    require_room(root, options.count, size, packed=options.compression == "gzip")
    with FolderLock(root):
        recipe = recipe_hash(options.recipe())
        before = present_set(root, recipe, options.overwrite)
        names = [name for i in range(options.count) for name, *_ in _files(options, i)]
        # The recipe leaves out the count, so that a set can grow.
        if before is not None and not options.overwrite:
            others = {file.path for file in before.files} - set(names)
            if others:
                raise UsageError(
                    f"{root} holds {len(others)} files of more universes than "
                    f"count={options.count}; overwrite (--overwrite) to remove them"
                )
        files = MadeFiles(root, before, names)
        if before is not None and before.origin.get(RECIPE) != recipe:
            files.replace()
        remove_temporaries(root)
        made: list[_Made] = []
        with ThreadPoolExecutor(options.workers, "universes") as pool:
            jobs = [pool.submit(_make, files, options, recipe, i) for i in range(options.count)]
            try:
                for job in jobs:
                    made.append(job.result())
                    if progress:
                        progress(len(made), options.count, made[-1].what)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        manifest = _manifest(options, made)
        manifest.save(root)
        files.complete(manifest)
        return manifest


@dataclass(frozen=True)
class _Made:
    """Manifest entry that one universe adds, and its sums for the statistics per channel."""

    files: tuple[DataFile, ...]
    what: str
    logs: Log1pSums


def _make(made: MadeFiles, options: UniverseOptions, recipe: str, index: int) -> _Made:
    """Makes the files of one universe, unless valid ones exist."""
    split = "train" if index < options.count - options.validation_count else "val"
    kept = _read_again(made, options, recipe, index)
    counts, contents = (simulate(options, index), {}) if kept is None else kept
    parameters = draw_parameters(options, index)
    files = []
    for name, offsets, place in _files(options, index):
        part = counts[place]
        content: bytes | memoryview
        if kept is None:
            content = _image(options, recipe, parameters, part)
            made.publish(name, content)
        else:
            content = contents[name]
        means = [float(part[_window(options, o)].mean(dtype=np.float64)) for o in offsets]
        checksum = checksum_of(content)
        files.append(DataFile(name, split, len(content), checksum, offsets, tuple(means)))
    logs = Log1pSums.empty(len(counts))
    if split == "train":
        logs.add(counts)
    what = f"universe {index} {'made' if kept is None else 'kept'}"
    return _Made(tuple(files), what, logs)


def _files(
    options: UniverseOptions, index: int
) -> Iterator[tuple[str, tuple[tuple[int, int, int], ...], tuple[slice, ...]]]:
    """Yields the files of a universe: name, offsets of its samples, its part of [C, D, H, W]."""
    width, name = options.width, f"univ_{index:06d}"
    places = range(0, options.box, width)
    corners = tuple(itertools.product(places, places, places))
    if options.layout == "cosmoflow":
        yield f"{name}.hdf5", corners, (slice(None),)
        return
    for corner in corners:
        place = "_".join(str(each // width) for each in corner)
        yield f"{name}_{place}.hdf5", ((0, 0, 0),), _window(options, corner)


def _window(options: UniverseOptions, offset: tuple[int, int, int]) -> tuple[slice, ...]:
    """Returns the part of [C, D, H, W] that a sample at an offset has."""
    return (slice(None), *(slice(o, o + options.width) for o in offset))


def _image(
    options: UniverseOptions, recipe: str, parameters: UniverseParameters, counts: npt.NDArray[Any]
) -> memoryview:
    """Returns the bytes of the HDF5 file with `counts` [C, D, H, W]."""
    last = options.layout == "cosmoflow"
    storage = storage_of(options.storage, options.compression, channels_last=last)

    def fill(file: h5py.File) -> None:
        stored = np.moveaxis(counts, 0, -1) if last else counts
        file.create_dataset("full", data=stored, **h5py_arguments(stored.shape, storage))
        file["unitPar"] = parameters.unit
        file["physPar"] = parameters.physical
        file["namePar"] = np.array(TARGET_NAMES, dtype="S")
        file["redshifts"] = np.array(options.redshifts, dtype=np.float32)
        file.attrs["dataset_tag"] = np.bytes_("pydist")
        file.attrs["universe_tag"] = np.bytes_(f"{options.seed}-{parameters.index}")
        file.attrs["seed9"] = parameters.seed9
        file.attrs[RECIPE] = np.bytes_(recipe)

    return file_image(fill)


def _read_again(
    made: MadeFiles, options: UniverseOptions, recipe: str, index: int
) -> tuple[npt.NDArray[Any], dict[str, bytes]] | None:
    """Returns the counts and bytes of an earlier run's files, if all are valid, else `None`."""
    contents = {}
    shape = (len(options.redshifts), *(options.box,) * 3)
    counts = np.empty(shape, dtype=options.dtype)
    for name, _, place in _files(options, index):
        found = made.arrays(name, recipe, ("full",))
        if found is None:
            return None
        contents[name], (stored,) = found
        counts[place] = np.moveaxis(stored, -1, 0) if options.layout == "cosmoflow" else stored
    return counts, contents


def _manifest(options: UniverseOptions, made: list[_Made]) -> Manifest:
    mean, std = log1p_statistics(m.logs for m in made)
    last = options.layout == "cosmoflow"
    return Manifest(
        sample_shape=(len(options.redshifts), *(options.width,) * 3),
        axes="DHWC" if last else "CDHW",
        dtype=options.dtype,
        files=tuple(file for m in made for file in m.files),
        target_names=TARGET_NAMES,
        channel_names=tuple(f"z={z:g}" for z in options.redshifts),
        log1p_mean=mean,
        log1p_std=std,
        origin={
            "kind": "synthetic universes: 2LPT, not an N-body simulation",
            "parameter_box": {
                "names": TARGET_NAMES,
                "center_and_half_width": PARAMETER_BOXES[options.parameters],
                "choice": "this project's own, not that of the public set"
                if options.parameters == "wide"
                else "that of the first CosmoFlow runs (2018)",
            },
            "options": options.recipe(),
            RECIPE: recipe_hash(options.recipe()),
        },
    )
