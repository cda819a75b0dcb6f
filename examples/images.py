"""Makes a data set of 2-D images with labels from NumPy arrays, for `examples/unet2d.toml`.

    python examples/images.py images --count 40
    pydist train examples/unet2d.toml -n 2

Each file has an image "image" [C, H, W] and the class of each pixel "label" [H, W]: here noisy
disks (1) and squares (2) on a background (0). Any arrays will do, also of volumes [C, D, H, W] with
axes "CDHW" and labels [D, H, W].
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

from pydist.data.manifest import DataFile, Manifest

CLASSES = ("background", "disk", "square")


def sample(numbers: np.random.Generator, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns an image [1, H, W] float32 and its labels [H, W] uint8."""
    label = np.zeros((width, width), np.uint8)
    rows, columns = np.mgrid[:width, :width]
    for _ in range(4):
        row, column = numbers.integers(0, width, 2)
        radius = numbers.integers(width // 16, width // 6)
        if numbers.random() < 0.5:
            label[(rows - row) ** 2 + (columns - column) ** 2 < radius**2] = 1
        else:
            label[np.maximum(abs(rows - row), abs(columns - column)) < radius] = 2
    image = (label > 0) + numbers.normal(0, 0.3, label.shape)
    return image[None].astype(np.float32), label


def main() -> None:
    """Writes the files and the manifest `dataset.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    numbers, files = np.random.default_rng(0), []
    for i in range(options.count):
        image, label = sample(numbers, options.width)
        path = options.folder / f"{i:04}.hdf5"
        with h5py.File(path, "w") as file:
            file["image"], file["label"] = image, label
        split = "val" if i % 5 == 0 else "train"
        offsets, means = ((0, 0, 0),), (float(image.mean()),)
        files.append(DataFile(path.name, split, path.stat().st_size, "", offsets, means))
    Manifest(
        sample_shape=(1, 1, options.width, options.width),  # (C, D, H, W)
        axes="CHW",
        dtype="float32",
        files=files,
        dataset="image",
        target="",
        label="label",
        class_names=CLASSES,
    ).save(options.folder)
    print(f"{options.count} images in {options.folder}; next: pydist train examples/unet2d.toml")


if __name__ == "__main__":
    main()
