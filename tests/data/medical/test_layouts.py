"""Tests of folder layouts: nnU-Net, Decathlon, pairs of folders, and LiTS."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pydist.data import ShardDataset
from pydist.data.medical.convert import convert_nifti
from pydist.data.medical.layouts import find_cases, find_images
from pydist.errors import DataError, UsageError


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def describe(root: Path, **record) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    # Editors on Windows write a byte order mark.
    (root / "dataset.json").write_text(json.dumps(record), encoding="utf-8-sig")
    return root


NNUNET = {
    "channel_names": {"0": "CT", "1": "PET"},
    "labels": {"background": 0, "tumor": 2, "liver": 1},
    "file_ending": ".nii.gz",
}


def test_nnunet_with_two_channels(tmp_path):
    root = touch(describe(tmp_path, **NNUNET), "labelsTr/b.nii.gz", "labelsTr/a_1.nii.gz")
    touch(root / "imagesTr", "b_0001.nii.gz", "b_0000.nii.gz", "a_1_0000.nii.gz", "a_1_0001.nii.gz")
    touch(root / "imagesTr", "._b_0000.nii.gz")
    found = find_cases(root)
    assert [case.name for case in found.cases] == ["a_1", "b"]
    assert [p.name for p in found.cases[1].images] == ["b_0000.nii.gz", "b_0001.nii.gz"]
    assert found.class_names == ("background", "liver", "tumor")
    assert found.channel_names == ("CT", "PET")
    assert found.ignore_label is None
    describe(tmp_path, **{**NNUNET, "labels": {**NNUNET["labels"], "ignore": 3}})
    found = find_cases(root)
    assert found.class_names == ("background", "liver", "tumor")
    assert found.ignore_label == 3


def test_decathlon(tmp_path):
    pairs = [{"image": f"./imagesTr/{n}.nii.gz", "label": f"./labelsTr/{n}.nii.gz"} for n in "ab"]
    labels = {"0": "background", "1": "liver", "2": "cancer"}
    root = describe(tmp_path, modality={"0": "CT"}, labels=labels, training=pairs)
    touch(root, *(f"{f}Tr/{n}.nii.gz" for n in "ab" for f in ("images", "labels")))
    found = find_cases(root)
    assert [case.name for case in found.cases] == ["a", "b"]
    assert found.cases[0].label == root / "labelsTr" / "a.nii.gz"
    assert found.class_names == ("background", "liver", "cancer")


def test_lits_and_two_folders(tmp_path):
    root = touch(tmp_path / "lits", "volume-0.nii", "segmentation-0.nii", "volume-10.nii",
                 "segmentation-10.nii.gz")  # fmt: skip
    assert [(c.images[0].name, c.label.name) for c in find_cases(root).cases] == [
        ("volume-0.nii", "segmentation-0.nii"),
        ("volume-10.nii", "segmentation-10.nii.gz"),
    ]
    touch(tmp_path / "i", "a.nii.gz", "b_0000.nii.gz")
    touch(tmp_path / "l", "a.nii", "b.nii.gz", "c.nii.gz")
    found = find_cases(tmp_path / "i", tmp_path / "l")
    assert [c.label.name for c in found.cases] == ["a.nii", "b.nii.gz"]


def test_images_without_labels(tmp_path):
    touch(tmp_path, "a_0000.nii.gz", "a_0001.nii.gz", "b.nii")
    found = {name: [p.name for p in files] for name, files in find_images(tmp_path).items()}
    assert found == {"a": ["a_0000.nii.gz", "a_0001.nii.gz"], "b": ["b.nii"]}
    touch(tmp_path, "c_0001.nii.gz")
    with pytest.raises(DataError, match=r"c has the channels \[1\]"):
        find_images(tmp_path)
    touch(tmp_path, "b.nii.gz")
    with pytest.raises(DataError, match="two images of the name 'b'"):
        find_images(tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**NNUNET, "file_ending": ".nrrd"}, "file_ending '.nrrd'"),
        ({**NNUNET, "labels": {"background": 0, "whole": [1, 2]}}, "regions"),
        ({**NNUNET, "labels": {"background": 0, "ignore": 1, "liver": 2}}, "after all classes"),
        ({**NNUNET, "labels": {"background": 0, "liver": 2}}, "numbers from 0 on"),
        ({**NNUNET, "labels": {"background": 0, "liver": 1, "tumor": 1}}, "numbers from 0 on"),
        ({**NNUNET, "labels": {"background": 0, "liver": None}}, "a table of numbers and names"),
        ({**NNUNET, "labels": {"background": 0, "liver": {"a": 1}}}, "a table of numbers and"),
        ({**NNUNET, "labels": {"background": 0, "liver": float("inf")}}, "a table of numbers"),
        ({**NNUNET, "labels": [1]}, "a table is expected"),
        ({**NNUNET, "channel_names": {"x": "CT"}}, "a table of numbers and names"),
        (NNUNET, "a has 1 channels; .* names 2"),
        ({"modality": {"0": "CT"}, "labels": {"0": "b"}}, "no training cases"),
        (
            {"modality": {"0": "CT"}, "labels": {"0": "b"}, "training": ["a"]},
            "training has an entry 'a'",
        ),
        (
            {"modality": {"0": "CT"}, "labels": {"0": "b"}, "training": 3},
            "training is 3; a list is expected",
        ),
        (
            {"modality": {"0": "CT"}, "labels": {"0": "b"},
             "training": [{"image": "a\0.nii", "label": "y.nii"}]},
            r"training has an entry {'image': 'a\\x00.nii'",
        ),
        (
            {"modality": {"0": "CT"}, "labels": {"0": "b"},
             "training": [{"image": "../../x.nii", "label": "y.nii"}]},
            "leads out of the data set's folder",
        ),
        ([1], "not the description of a data set"),
    ],
)  # fmt: skip
def test_what_can_not_be_used_is_said(tmp_path, record, message):
    touch(tmp_path, "imagesTr/a_0000.nii.gz", "labelsTr/a.nii.gz")
    (tmp_path / "dataset.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=message) as caught:
        find_cases(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_folders_and_unclear_names(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        find_cases(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no files ending in \.nii or \.nii\.gz"):
        find_cases(tmp_path / "empty")
    touch(tmp_path / "mixed", "a.nii", "a_seg.nii")
    with pytest.raises(UsageError, match="give the labels' folder"):
        find_cases(tmp_path / "mixed")
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        find_cases(tmp_path)


def test_channels_in_files_and_in_one_file_give_the_same(tmp_path, write, scan):
    other = scan[0][::-1].copy()
    names = {"channel_names": {"0": "a", "1": "b"}, "labels": {"background": 0, "x": 1, "y": 2}}
    apart = describe(tmp_path / "apart", **names)
    for channel, voxels in enumerate((scan[0], other)):
        write(apart / "imagesTr" / f"c_000{channel}.nii.gz", voxels)
    write(apart / "labelsTr" / "c.nii.gz", scan[1])
    together = describe(
        tmp_path / "together",
        modality={"0": "a", "1": "b"},
        labels={"0": "background", "1": "x", "2": "y"},
        training=[{"image": "i/c.nii.gz", "label": "l/c.nii.gz"}],
    )
    write(together / "i" / "c.nii.gz", np.stack([scan[0], other], -1))
    write(together / "l" / "c.nii.gz", scan[1])
    for source in (apart, together):
        convert_nifti(source, tmp_path / f"{source.name}-out")
    ours, theirs = (
        ShardDataset(tmp_path / f"{s.name}-out", normalize="none") for s in (apart, together)
    )
    assert ours.sample_shape == (2, 8, 8, 16)
    for mine, yours in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_array_equal(mine, yours)
