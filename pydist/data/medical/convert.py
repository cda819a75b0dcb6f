"""Converts NIfTI files and DICOM series to HDF5 files that ranks can read by blocks.

A compressed NIfTI file can't be read by blocks, so each is converted once. The HDF5 files are
contiguous by default, depth first: a depth block is one run of bytes, and reading a block reads
only its bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from pydist.data.each_file import Progress
from pydist.data.file_image import RECIPE, recipe_hash, storage_of
from pydist.data.made import state_of
from pydist.data.manifest import Manifest
from pydist.data.medical.case import convert_case, read_part
from pydist.data.medical.collection import Source, unlike, write_set
from pydist.data.medical.dicom import outline_of_dicom
from pydist.data.medical.layouts import Case, find_cases
from pydist.data.medical.nifti import Outline, outline_of, within_int16
from pydist.data.medical.options import NiftiOptions
from pydist.errors import DataError, UsageError

_ORIGIN = "NIfTI files"


def convert_nifti(
    source: str | Path,
    out_dir: str | Path,
    options: NiftiOptions | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Makes a data set of the NIfTI files, or DICOM series, in a folder.

    Args:
        source: the folder; see `find_cases`.
        out_dir: the folder for HDF5 files and `dataset.json`.
        options: of the conversion.
        progress: called after each case.

    Returns:
        The manifest that was written.

    Raises:
        DataError: a file is missing, damaged or contradicts another.
        UsageError: nibabel or pydicom is not installed, or `out_dir` holds another data set.
        DiskError: not enough space, or the folder can't be written.
    """
    options = options or NiftiOptions()
    found = find_cases(source, options.labels)
    if options.ignore_label is None:
        options = replace(options, ignore_label=found.ignore_label)
    elif options.ignore_label < len(found.class_names):
        name = found.class_names[options.ignore_label]
        raise UsageError(f"ignore_label={options.ignore_label}: that label is the class {name!r}")
    outlines = {case.name: _outlines(case) for case in found.cases}
    if options.on_bad_case == "stop":
        _require_one_number_of_channels(outlines)
    dtype: str = options.dtype
    if dtype == "auto":
        fits = all(_fits_int16(case, outlines[case.name]) for case in found.cases)
        dtype = "int16" if fits else "float32"
    first_validation = len(found.cases) - round(len(found.cases) * options.validation)
    recipes = [_recipe(options, dtype, case) for case in found.cases]
    sources = [
        Source(
            case.name,
            "train" if i < first_validation else "val",
            recipes[i],
            partial(convert_case, case, options.grid, keep_header=options.keep_header),
            options.ignore_label,
        )
        for i, case in enumerate(found.cases)
    ]
    return write_set(
        Path(out_dir),
        sources,
        dtype,
        storage_of(options.storage, options.compression),
        class_names=found.class_names,
        channel_names=found.channel_names,
        origin={
            "kind": _ORIGIN,
            "grid": asdict(options.grid),
            "options": options.recipe(),
            RECIPE: recipe_hash(recipes),
        },
        overwrite=options.overwrite,
        skip_bad=options.on_bad_case == "skip",
        progress=progress,
    )


def _outlines(case: Case) -> list[Outline]:
    """Reads the headers of a case's images; an empty list if one can't be read (reported later)."""
    try:
        return [
            outline_of_dicom(path) if path.is_dir() else outline_of(path) for path in case.images
        ]
    except DataError:
        return []


def _fits_int16(case: Case, outlines: Sequence[Outline]) -> bool:
    """Returns whether int16 has all values of a case's images.

    Only those that the header leaves in doubt are read. A damaged file is reported later.
    """
    if not all(each.integers for each in outlines):
        return False
    with contextlib.suppress(DataError):
        for path, each in zip(case.images, outlines, strict=False):
            if not each.narrow:
                values = read_part(path).values()
                if not within_int16((values.min(), values.max()), 1, 0):
                    return False
    return True


def _require_one_number_of_channels(outlines: Mapping[str, Sequence[Outline]]) -> None:
    """Raises `DataError` if cases differ in their number of channels, before any is converted."""
    counts = {name: sum(each.channels for each in told) for name, told in outlines.items() if told}
    first = next(iter(counts), "")
    for name, count in counts.items():
        if count != counts[first]:
            raise DataError(unlike(name, count, first, counts[first]))


def _recipe(options: NiftiOptions, dtype: str, case: Case) -> str:
    """Returns a hash of the options and of the files by name, size and modification time."""
    files = []
    for path in (*case.images, case.label):
        status = path.stat()
        folder = path.is_dir()
        known = state_of(path) if folder else [status.st_size, status.st_mtime_ns]
        files.append([path.name, *known])
    return recipe_hash([options.recipe(), dtype, files])
