"""Writes small volumes with labels, of any shapes, a file each or several in one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import h5py
import numpy as np

from pydist.data import Manifest
from pydist.data.data_file import DataFile

CLASSES = ("background", "one", "two")


def labeled_volumes(
    root: Path,
    shapes: Sequence[tuple[str, tuple[int, int, int]]],
    bad: Collection[int] = (),
    parts: int = 1,
) -> Path:
    """Makes a data set in a new folder, and returns it.

    Args:
        root: the folder.
        shapes: split and shape (D, H, W) of each file.
        bad: numbers of files whose voxels are NaN.
        parts: number of samples into which each file is cut, along its depth.
    """
    root.mkdir(parents=True)
    numbers, files = np.random.default_rng(0), list[DataFile]()
    sizes = [(depth // parts, height, width) for _, (depth, height, width) in shapes]
    for i, (split, shape) in enumerate(shapes):
        label = numbers.integers(0, 3, shape).astype("uint8")
        image = (label + numbers.normal(0, 0.1, shape)).astype("float32")[None]
        if i in bad:
            image[...] = np.nan
        with h5py.File(root / f"{i}.h5", "w") as file:
            file["image"], file["label"] = image, label
        offsets = tuple((n * sizes[i][0], 0, 0) for n in range(parts))
        size = (root / f"{i}.h5").stat().st_size
        files.append(DataFile(f"{i}.h5", split, size, "", offsets, (0.0,) * parts, sizes[i]))
    most = np.max(sizes, axis=0).tolist()
    Manifest(
        (1, *most), "CDHW", "float32", files, "image", "", label="label",
        class_names=CLASSES,
    ).save(root)  # fmt: skip
    return root
