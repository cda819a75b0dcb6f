"""Finds images and their labels in the folder layouts of nnU-Net, the Decathlon and LiTS.

nnU-Net: `dataset.json` with "channel_names", `imagesTr/CASE_0000.nii.gz` (one file per channel),
`labelsTr/CASE.nii.gz`. Medical Segmentation Decathlon: `dataset.json` with "modality" and a list
"training" of pairs, channels in one file. Else two folders whose files have equal names, or the
names of LiTS (`volume-7.nii`, `segmentation-7.nii`), which may also share one folder. There an
image or a label may be a folder instead, with the slices of a DICOM series.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydist.data.medical.dicom import is_series
from pydist.data.medical.nifti_header import is_nifti, stem
from pydist.errors import DataError, UsageError
from pydist.parsing import parse_json

_CHANNEL = re.compile(r"(.+)_(\d{4})")
_IGNORE = "ignore"
_IMAGE_PREFIX, _LABEL_PREFIX = "volume-", "segmentation-"


@dataclass(frozen=True)
class Case:
    """Files that belong to one patient.

    Attributes:
        name: unique in the data set.
        images: one file per channel, or one with all channels.
        label: the file with the class of each voxel.
    """

    name: str
    images: tuple[Path, ...]
    label: Path


@dataclass(frozen=True)
class Found:
    """Cases that a folder holds, by name, with the description in its `dataset.json`.

    Attributes:
        cases: at least one.
        class_names: in the order of the labels; empty if not known.
        channel_names: empty if not known.
        ignore_label: label of unlabeled voxels, as nnU-Net's class "ignore".
    """

    cases: tuple[Case, ...]
    class_names: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()
    ignore_label: int | None = None


def find_cases(source: str | Path, labels: str | Path | None = None) -> Found:
    """Finds the cases with labels in a folder.

    Args:
        source: a folder of nnU-Net or of the Medical Segmentation Decathlon; or one with images.
        labels: folder with the labels, if there is no `dataset.json`; by default `source`.

    Raises:
        DataError: no such folder, nothing in it, an image without a label, or a `dataset.json`
            that can't be used.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    described = (folder / "dataset.json").is_file()
    if labels is None and not described and (folder / "imagesTr").is_dir():
        raise DataError(
            f"{folder}: it has imagesTr and no dataset.json, which says what the labels are"
        )
    if labels is None and described:
        record = _read_json(folder / "dataset.json")
        if "channel_names" in record:
            return _nnunet(folder, record)
        return _decathlon(folder, record)
    return _pairs(folder, folder if labels is None else Path(labels))


def find_images(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Finds the images in a folder, without labels: the files of each image by its name.

    Files that end in _0000, _0001, ... are the channels of one image.

    Raises:
        DataError: no such folder, nothing in it, or a channel is missing.
    """
    files: dict[str, dict[int, Path]] = {}
    for path in _files(folder):
        match = _CHANNEL.fullmatch(stem(path))
        name, channel = (match[1], int(match[2])) if match else (stem(path), 0)
        if channel in files.setdefault(name, {}):
            raise DataError(f"{path}: there are two images of the name {name!r}")
        files[name][channel] = path
    for name, found in files.items():
        if sorted(found) != list(range(len(found))):
            raise DataError(f"{folder}: {name} has the channels {sorted(found)}")
    return {name: tuple(found[c] for c in sorted(found)) for name, found in files.items()}


def _nnunet(folder: Path, record: Mapping[str, Any]) -> Found:
    where = folder / "dataset.json"
    ending = record.get("file_ending", ".nii.gz")
    if ending not in (".nii.gz", ".nii"):
        raise DataError(f"{where}: file_ending {ending!r}; .nii and .nii.gz are read")
    channels = _by_number(where, "channel_names", record.get("channel_names"))
    classes = _classes(where, record.get("labels"), numbers_first=False)
    ignored = None
    if _IGNORE in classes:  # nnU-Net requires it to be last; it is not a class of the network
        if classes[-1] != _IGNORE:
            given = classes.index(_IGNORE)
            raise DataError(f'{where}: labels has "ignore" as {given}; it comes after all classes')
        ignored, classes = len(classes) - 1, classes[:-1]
    cases = []
    for name, images in find_images(folder / "imagesTr").items():
        if len(images) != len(channels):
            raise DataError(
                f"{folder / 'imagesTr'}: {name} has {len(images)} channels; {where} names "
                f"{len(channels)}"
            )
        cases.append(Case(name, images, folder / "labelsTr" / f"{name}{ending}"))
    found = _with_labels(cases)
    labels = {case.label.name for case in found}
    for path in _files(folder / "labelsTr"):
        if path.name not in labels:
            image = folder / "imagesTr" / f"{stem(path)}_0000{ending}"
            raise DataError(f"{path}: its image {image} is missing")
    return Found(found, classes, channels, ignored)


def _decathlon(folder: Path, record: Mapping[str, Any]) -> Found:
    where = folder / "dataset.json"
    channels = _by_number(where, "modality", record.get("modality"))
    classes = _classes(where, record.get("labels"), numbers_first=True)
    root = folder.resolve()
    cases = []
    entries = record.get("training") or []
    if not isinstance(entries, list):
        raise DataError(f"{where}: training is {entries!r}; a list is expected")
    for entry in entries:
        try:
            image, label = folder / entry["image"], folder / entry["label"]
            outside = [p for p in (image, label) if not p.resolve().is_relative_to(root)]
        except (TypeError, KeyError, ValueError, RuntimeError) as error:
            raise DataError(f"{where}: training has an entry {entry!r}") from error
        if outside:
            raise DataError(f"{where}: {outside[0]} leads out of the data set's folder")
        cases.append(Case(stem(image), (image,), label))
    if not cases:
        raise DataError(f"{where}: no training cases in it, and no channel_names as of nnU-Net")
    return Found(_with_labels(cases), classes, channels)


def _pairs(images: Path, labels: Path) -> Found:
    cases = []
    for path in _volumes(images):
        name = path.name if path.is_dir() else stem(path)
        if images == labels and not name.startswith(_IMAGE_PREFIX):
            if name.startswith(_LABEL_PREFIX):
                continue
            raise UsageError(
                f"{path}: images and labels in one folder are told apart by the names "
                f"{_IMAGE_PREFIX}X and {_LABEL_PREFIX}X; give the labels' folder otherwise"
            )
        names = [name]
        if name.startswith(_IMAGE_PREFIX):
            names.append(_LABEL_PREFIX + name.removeprefix(_IMAGE_PREFIX))
        if (channel := _CHANNEL.fullmatch(name)) is not None and channel[2] == "0000":
            names.append(channel[1])
        candidates = [labels / f"{n}{end}" for n in names for end in (".nii.gz", ".nii", "")]
        others = [c for c in candidates if c != path]
        label = next((c for c in others if c.is_file() or is_series(c)), others[0])
        cases.append(Case(name, (path,), label))
    return Found(_with_labels(cases))


def _volumes(folder: Path) -> list[Path]:
    """Returns the NIfTI files in a folder, and the folders in it with DICOM series."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    series = sorted(path for path in folder.iterdir() if is_series(path))
    found = [*_nifti_files(folder), *series]
    if not found:
        raise DataError(f"{folder}: no files ending in .nii or .nii.gz, and no DICOM series")
    return found


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    found = _nifti_files(folder)
    if not found:
        raise DataError(f"{folder}: no files ending in .nii or .nii.gz")
    return found


def _nifti_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if is_nifti(p) and p.is_file())


def _with_labels(cases: list[Case]) -> tuple[Case, ...]:
    seen: set[str] = set()
    for case in cases:
        if not case.label.exists():
            raise DataError(f"{case.images[0]}: its label {case.label} is missing")
        if case.name in seen:
            raise DataError(f"{case.images[0]}: there are two cases of the name {case.name!r}")
        seen.add(case.name)
    return tuple(cases)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        record = parse_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}: not the description of a data set")
    return record


def _by_number(where: Path, key: str, names: Any, *, numbers_first: bool = True) -> tuple[str, ...]:
    """Returns the names of {"0": name, "1": name, ...}, or of {name: 0, ...}, in order."""
    try:
        pairs = (each if numbers_first else each[::-1] for each in names.items())
        numbered = sorted((int(number), str(name)) for number, name in pairs)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        why = f"{where}: {key} is {names!r}; a table of numbers and names is expected"
        raise DataError(why) from error
    if [number for number, _ in numbered] != list(range(len(numbered))) or not numbered:
        raise DataError(f"{where}: {key} is {names!r}; numbers from 0 on are expected")
    return tuple(name for _, name in numbered)


def _classes(where: Path, names: Any, *, numbers_first: bool) -> tuple[str, ...]:
    """Returns class names; nnU-Net writes {name: number}, the Decathlon {number: name}."""
    if not isinstance(names, dict):
        raise DataError(f"{where}: labels is {names!r}; a table is expected")
    if not numbers_first and any(isinstance(number, list) for number in names.values()):
        raise DataError(f"{where}: labels has regions, classes that overlap; these are not read")
    return _by_number(where, "labels", names, numbers_first=numbers_first)
