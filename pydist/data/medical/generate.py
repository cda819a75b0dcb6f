"""Writes sets of synthetic CT volumes, as HDF5 and as NIfTI."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.file_image import RECIPE, recipe_hash
from pydist.data.lock import FolderLock
from pydist.data.manifest import Manifest
from pydist.data.medical.collection import (
    LabeledVolume,
    Progress,
    Source,
    VolumeStorage,
    write_set,
)
from pydist.data.medical.ct import CLASS_NAMES, make_volume
from pydist.data.medical.nifti_header import MISSING_LIBRARY
from pydist.data.medical.nifti_writing import write_nifti
from pydist.data.medical.options import CTOptions
from pydist.data.publish import make_folder, publish, require_room
from pydist.errors import UsageError
from pydist.owner import remove_temporaries

_VOXEL = np.dtype(np.int16).itemsize + np.dtype(np.uint8).itemsize
"""Bytes of a voxel's value and label, as `make_volume` returns them."""


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
            NIfTI is requested and nibabel is not installed.
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
        VolumeStorage("int16", options.storage, options.compression),
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
    with FolderLock(root):
        for name in ("imagesTr", "labelsTr"):
            make_folder(root / name)
            remove_temporaries(root / name)
        for i in range(options.count):
            image, label = make_volume(options, i)
            name = f"ct_{i:04d}"
            _write(root / "imagesTr" / f"{name}_0000.nii.gz", image, options)
            _write(root / "labelsTr" / f"{name}.nii.gz", label, options)
            if progress:
                progress(i + 1, options.count, f"{name} written")
        record = {
            "channel_names": {"0": "CT"},
            "labels": {name: number for number, name in enumerate(CLASS_NAMES)},
            "numTraining": options.count,
            "file_ending": ".nii.gz",
        }
        publish(root / "dataset.json", (json.dumps(record, indent=1) + "\n").encode())


def _write(path: Path, values: npt.NDArray[Any], options: CTOptions) -> None:
    """Writes [D, H, W] as NIfTI, RAS with the center at 0 mm."""
    try:
        import nibabel as nib
    except ImportError:
        raise UsageError(MISSING_LIBRARY) from None
    spacing = np.array(options.spacing[::-1])
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = -spacing * (np.array(values.shape[::-1]) - 1) / 2
    header = nib.Nifti1Header()
    header.set_data_dtype(values.dtype)
    header.set_data_shape(values.shape[::-1])
    header.set_xyzt_units("mm")
    header.set_qform(affine, code="scanner")
    header.set_sform(affine, code="scanner")
    header["scl_slope"], header["scl_inter"] = 1, 0
    header["magic"] = b"n+1"
    header["vox_offset"] = 352
    write_nifti(path, values.transpose(2, 1, 0), header.binaryblock)


def _labeled(options: CTOptions, index: int) -> LabeledVolume:
    image, label = make_volume(options, index)
    return LabeledVolume(image[None], label)
