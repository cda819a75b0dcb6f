"""Writes sets of synthetic CT volumes, as HDF5 and as NIfTI."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.each_file import Progress
from pydist.data.file_image import RECIPE, recipe_hash, storage_of
from pydist.data.lock import FolderLock
from pydist.data.manifest import FILE_NAME, Manifest
from pydist.data.medical.collection import LabeledVolume, Source, write_set
from pydist.data.medical.ct import CLASS_NAMES, make_volume
from pydist.data.medical.nifti_header import new_header
from pydist.data.medical.nifti_writing import write_nifti
from pydist.data.medical.options import CTOptions
from pydist.data.publish import make_folder, publish, require_room
from pydist.errors import UsageError
from pydist.owner import remove, remove_temporaries
from pydist.parsing import parse_json

_VOXEL = np.dtype(np.int16).itemsize + np.dtype(np.uint8).itemsize
"""Bytes of a voxel's value and label, as `make_volume` returns them."""
_NIFTI_FOLDERS = ("imagesTr", "labelsTr")
_DESCRIPTION = {
    "channel_names": {"0": "CT"},
    "labels": {name: number for number, name in enumerate(CLASS_NAMES)},
    "file_ending": ".nii.gz",
}
"""What every `dataset.json` of `write_nifti_set` has."""
_NIFTI_NAME = re.compile(r"ct_[0-9]{4,}(_0000)?\.nii\.gz")
"""Names that `write_nifti_set` gives to images and labels."""


def generate_ct(
    out_dir: str | Path, options: CTOptions, progress: Progress | None = None
) -> Manifest | None:
    """Makes a set of CT volumes with labels.

    Args:
        out_dir: the folder, made if missing.
        options: of the set.
        progress: called after each volume.

    Returns:
        The manifest of the HDF5 files, if there are any.

    Raises:
        UsageError: the folder holds a data set made with other options, and `overwrite` is off; or
            NIfTI is requested, and the folder holds files of other origin, or nibabel is not
            installed.
        DiskError: not enough space, or the folder can't be written.
    """
    root = Path(out_dir)
    make_folder(root)
    packed = options.compression == "gzip" or options.format == "nifti"
    require_room(root, options.count, math.prod(options.shape) * _VOXEL, packed=packed)
    if options.format != "hdf5":
        write_nifti_set(root / "nifti" if options.format == "both" else root, options, progress)
    if options.format == "nifti":
        return None
    recipe = options.recipe()
    first_validation = options.count - round(options.count * options.validation)
    sources = [
        Source(
            f"ct_{i:04d}",
            "train" if i < first_validation else "val",
            recipe_hash([recipe, i]),
            partial(_labeled, options, i),
        )
        for i in range(options.count)
    ]
    return write_set(
        root,
        sources,
        "int16",
        storage_of(options.storage, options.compression),
        class_names=CLASS_NAMES,
        channel_names=("CT",),
        origin={
            "kind": "synthetic CT: ellipsoids with tumors",
            "options": recipe,
            RECIPE: recipe_hash([recipe, options.count, options.validation]),
        },
        overwrite=options.overwrite,
        progress=progress,
    )


def write_nifti_set(root: Path, options: CTOptions, progress: Progress | None = None) -> None:
    """Writes the volumes in nnU-Net's folders; see `generate_ct`."""
    make_folder(root)
    recipe = recipe_hash([options.recipe(), options.count])
    record = {**_DESCRIPTION, "numTraining": options.count, RECIPE: recipe}
    with FolderLock(root):
        _make_way(root, options, recipe)
        for name in _NIFTI_FOLDERS:
            make_folder(root / name)
            remove_temporaries(root / name)
        for i in range(options.count):
            image, label = make_volume(options, i)
            image_path, label_path = _nifti_paths(root, i)
            _write(image_path, image, options)
            _write(label_path, label, options)
            if progress:
                progress(i + 1, options.count, f"ct_{i:04d} written")
        publish(root / FILE_NAME, (json.dumps(record, indent=1) + "\n").encode())


def _nifti_paths(root: Path, index: int) -> tuple[Path, Path]:
    """Returns the paths of one volume's image and label."""
    images, labels = _NIFTI_FOLDERS
    name = f"ct_{index:04d}"
    return root / images / f"{name}_0000.nii.gz", root / labels / f"{name}.nii.gz"


def _make_way(root: Path, options: CTOptions, recipe: str) -> None:
    """Removes a set that was made with other options, if `overwrite` is on.

    Readers of nnU-Net's folders take every file in them, so no other file may stay.

    Raises:
        UsageError: there is such a set and `overwrite` is off, or there are files that
            `write_nifti_set` does not write.
    """
    description = root / FILE_NAME
    made = _recipe_of(description) if description.exists() else recipe
    written = {path for i in range(options.count) for path in _nifti_paths(root, i)}
    present = (path for name in _NIFTI_FOLDERS for path in (root / name).glob("[!.]*"))
    others = sorted(path for path in present if path not in written)
    foreign = [path for path in others if not _NIFTI_NAME.fullmatch(path.name)]
    if made is None or foreign:
        found = description if made is None else foreign[0]
        raise UsageError(f"{found} is no file of synthetic CT as NIfTI; choose another folder")
    if (made != recipe or others) and not options.overwrite:
        raise UsageError(
            f"{root} holds volumes that were made with other options; choose another folder, or "
            "overwrite to replace them"
        )
    if made != recipe:  # an interrupted run leaves no description of files of two sets
        description.unlink(missing_ok=True)
    for path in others:
        remove(path)


def _recipe_of(description: Path) -> str | None:
    """Returns the recipe in a `dataset.json` of `write_nifti_set`; None for another file."""
    try:
        record = parse_json(description.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    recipe = record.get(RECIPE) if isinstance(record, dict) else None
    return recipe if isinstance(recipe, str) else None


def _write(path: Path, values: npt.NDArray[Any], options: CTOptions) -> None:
    """Writes [D, H, W] as NIfTI, RAS with the center at 0 mm."""
    spacing = np.array(options.spacing[::-1])
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = -spacing * (np.array(values.shape[::-1]) - 1) / 2
    voxels = values.transpose(2, 1, 0)
    write_nifti(path, voxels, new_header(voxels.shape, voxels.dtype, affine).binaryblock)


def _labeled(options: CTOptions, index: int) -> LabeledVolume:
    image, label = make_volume(options, index)
    return LabeledVolume(image[None], label)
