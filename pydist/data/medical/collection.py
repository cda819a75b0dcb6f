"""Writes sets of volumes with labels as HDF5 files, with a manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from pydist.data.each_file import Progress
from pydist.data.file_image import RECIPE, file_image, h5py_arguments
from pydist.data.formats import Storage
from pydist.data.lock import FolderLock
from pydist.data.made import MadeFiles, checksum_of, present_set
from pydist.data.manifest import DataFile, Intensity, Manifest
from pydist.data.publish import make_folder
from pydist.errors import DataError
from pydist.owner import remove_temporaries

VOLUME, LABEL = "volume", "segmentation"
"""Names of the arrays in a file, as in LBANN's reader of LiTS."""

_SUFFIX = ".hdf5"

_FOREGROUND_SAMPLES = 10_000
"""Labeled voxels per volume in the statistics, as in nnU-Net (which draws them)."""


@dataclass(frozen=True)
class LabeledVolume:
    """Image and label volume that one file of a set holds.

    Attributes:
        image: [C, D, H, W].
        label: [D, H, W], unsigned integers.
        attributes: texts that are stored as attributes of the file.
    """

    image: npt.NDArray[Any]
    label: npt.NDArray[Any]
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Name, split and content that one file of a set gets.

    Attributes:
        name: of the file, without suffix.
        split: "train", "val", or another name.
        recipe: hash of everything that determines its content.
        make: makes the content.
        ignore_label: label of unlabeled voxels; it is not a class.
    """

    name: str
    split: str
    recipe: str
    make: Callable[[], LabeledVolume]
    ignore_label: int | None = None


def write_set(
    root: Path,
    sources: Sequence[Source],
    dtype: str,
    storage: Storage,
    *,
    class_names: Sequence[str],
    channel_names: Sequence[str],
    origin: Mapping[str, Any],
    overwrite: bool = False,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Makes a set of volumes: HDF5 files and `dataset.json` in `root`.

    Files are written atomically, and the manifest last. An interrupted run can be repeated: it
    keeps files that were made from the same sources and are not damaged.

    Args:
        root: the folder, made if missing.
        sources: the files to write.
        dtype: of the images, "int16" or "float32".
        storage: how arrays are stored; see `storage_of`.
        class_names: in the order of the labels; if empty, made up from the highest label.
        channel_names: of the images.
        origin: for the manifest; its `RECIPE` identifies the data set.
        overwrite: replace a data set made from other sources.
        skip_bad: leave out volumes that can't be used, and name them in the manifest's `origin`.
        progress: called after each volume.

    Raises:
        UsageError: the folder holds a data set made from other sources, and `overwrite` is off;
            or files of other origin; or another process writes there.
        DataError: a volume can't be used.
        DiskError: not enough space, or the folder can't be written.
    """
    make_folder(root)
    with FolderLock(root):
        before = present_set(root, origin[RECIPE], overwrite)
        files = MadeFiles(root, before, (f"{source.name}{_SUFFIX}" for source in sources))
        if before is not None and before.origin.get(RECIPE) != origin[RECIPE]:
            files.replace()
        remove_temporaries(root)
        made: list[_Made] = []
        rejected: dict[str, str] = {}
        for done, source in enumerate(sources, 1):
            try:
                like = made[0] if made else None
                made.append(_write(files, source, dtype, storage, len(class_names), like))
            except DataError as error:
                if not skip_bad:
                    raise
                rejected[source.name] = str(error)
            if progress:
                what = f"{source.name} {'rejected' if source.name in rejected else 'written'}"
                progress(done, len(sources), what)
        if not made:
            first = next(iter(rejected.values()))
            raise DataError(f"none of {len(sources)} volumes can be used: {first}")
        told = {**origin, "rejected": rejected}
        manifest = _manifest(made, dtype, class_names, channel_names, told)
        manifest.save(root)
        files.complete(manifest)
        return manifest


@dataclass(frozen=True)
class _Made:
    """Entry that one volume adds to the manifest, and the values that it adds to the statistics."""

    file: DataFile
    channels: int
    highest_label: int
    foreground: npt.NDArray[Any]
    """[C, n]: values of labeled voxels."""


def _write(
    files: MadeFiles,
    source: Source,
    dtype: str,
    storage: Storage,
    classes: int,
    like: _Made | None,
) -> _Made:
    """Makes one file, which must have as many channels as `like`."""
    name = f"{source.name}{_SUFFIX}"
    kept = files.arrays(name, source.recipe, (VOLUME, LABEL))
    volume = source.make() if kept is None else LabeledVolume(*kept[1])
    if like is not None and len(volume.image) != like.channels:
        other = like.file.path.removesuffix(_SUFFIX)
        raise DataError(unlike(source.name, len(volume.image), other, like.channels))
    image = as_stored(volume.image, dtype, name, ": use float32")
    label = volume.label.astype(_label_type(volume.label), copy=False)
    labeled = label if source.ignore_label is None else label[label != source.ignore_label]
    highest = int(labeled.max(initial=0))
    if classes and highest >= classes:
        raise DataError(f"{source.name}: labels go up to {highest}; there are {classes} classes")

    def fill(file: h5py.File) -> None:
        for dataset, array in ((VOLUME, image), (LABEL, label)):
            file.create_dataset(dataset, data=array, **h5py_arguments(array.shape, storage))
        for attribute, text in {**volume.attributes, RECIPE: source.recipe}.items():
            file.attrs[attribute] = np.bytes_(text)

    content: bytes | memoryview
    if kept is None:
        content = file_image(fill)
        files.publish(name, content)
    else:
        content = kept[0]
    depth, height, width = image.shape[1:]
    entry = DataFile(
        name,
        source.split,
        len(content),
        checksum_of(content),
        ((0, 0, 0),),
        (float(image.mean(dtype=np.float64)),),
        (depth, height, width),
    )
    return _Made(entry, image.shape[0], highest, _foreground(image, label, source.ignore_label))


def unlike(name: str, channels: int, other: str, its: int) -> str:
    """Returns the message that two volumes can't be in one set."""
    return f"{name} has {channels} channels, {other} {its}: a data set has one number of them"


def as_stored(image: npt.NDArray[Any], dtype: str, name: str, advice: str = "") -> npt.NDArray[Any]:
    """Converts an image to a set's type; rounded for a type of integers.

    Args:
        image: real numbers, any shape with elements.
        dtype: of the set, real as well.
        name: names the volume in errors.
        advice: end of the error message.

    Raises:
        DataError: values do not fit; the message begins with `name` and ends with `advice`.
    """
    if image.dtype == dtype:
        return image
    if np.dtype(dtype).kind in "iu":
        if image.dtype.kind == "f":
            image = np.rint(image)
        possible, (low, high) = np.iinfo(dtype), (image.min().item(), image.max().item())
        if math.isnan(low):
            where = tuple(np.argwhere(np.isnan(image))[0].tolist())
            raise DataError(f"{name}: NaN at {where}, which {dtype} does not have{advice}")
        if not (low >= possible.min and high <= possible.max):
            raise DataError(f"{name}: values from {low} to {high} do not fit {dtype}{advice}")
    return image.astype(dtype)


def _label_type(label: npt.NDArray[Any]) -> str:
    return next(t for t in ("uint8", "uint16", "uint32") if int(label.max()) <= np.iinfo(t).max)


def _foreground(
    image: npt.NDArray[Any], label: npt.NDArray[Any], ignored: int | None
) -> npt.NDArray[Any]:
    """Returns values of labeled voxels, evenly picked, [C, n]."""
    found = np.flatnonzero(label if ignored is None else (label != 0) & (label != ignored))
    picks = np.linspace(0, len(found) - 1, min(len(found), _FOREGROUND_SAMPLES)).astype(np.intp)
    return image.reshape(image.shape[0], -1)[:, found[picks]]


def _manifest(
    made: Sequence[_Made],
    dtype: str,
    class_names: Sequence[str],
    channel_names: Sequence[str],
    origin: Mapping[str, Any],
) -> Manifest:
    extents = [each.file.extents or (0, 0, 0) for each in made]
    depth, height, width = (max(n) for n in zip(*extents, strict=True))
    highest = max(each.highest_label for each in made)
    return Manifest(
        sample_shape=(made[0].channels, depth, height, width),
        axes="CDHW",
        dtype=dtype,
        files=tuple(each.file for each in made),
        dataset=VOLUME,
        target="",
        label=LABEL,
        class_names=tuple(class_names)
        or ("background", *(f"class {i}" for i in range(1, highest + 1))),
        channel_names=tuple(channel_names),
        intensity=_intensity([each.foreground for each in made if each.file.split == "train"]),
        origin=dict(origin),
    )


def _intensity(foreground: Sequence[npt.NDArray[Any]]) -> tuple[Intensity, ...]:
    if not any(values.size for values in foreground):
        return ()
    values = np.concatenate(foreground, axis=1).astype(np.float64)
    lower, upper = np.percentile(values, (0.5, 99.5), axis=1)
    found = zip(lower, upper, values.mean(1), values.std(1), strict=True)
    return tuple(Intensity(*map(float, channel)) for channel in found)
