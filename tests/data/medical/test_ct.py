"""Tests of synthetic CT: its metadata are true, and a seed determines the volume."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from pydist.data import ConvertOptions, ShardDataset, convert_dataset
from pydist.data.index import verify_dataset
from pydist.data.medical.convert import convert_nifti
from pydist.data.medical.ct import CLASS_NAMES, LEVELS, make_volume
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import UsageError
from support.data.damage import interrupt_at_the_end


def test_levels_and_noise_are_those_asked_for():
    options = CTOptions(shape=(48, 40, 56), noise=20)
    images, labels = zip(*(make_volume(options, i) for i in range(4)), strict=True)
    image, label = np.stack(images), np.stack(labels)
    assert image.dtype == np.int16
    assert label.dtype == np.uint8
    clean = np.stack([make_volume(CTOptions(shape=options.shape, noise=0), i)[0] for i in range(4)])
    for value, level in enumerate(LEVELS):
        inside = (label == value) & (clean == level)
        assert inside.sum() > 100
        assert image[inside].mean() == pytest.approx(level, abs=3)
        assert image[inside].std() == pytest.approx(20, rel=0.15)
    shares = np.bincount(label.ravel(), minlength=3) / label.size
    assert 0.03 < shares[1] < 0.3
    assert 0.0002 < shares[2] < 0.05


def test_a_seed_means_one_anatomy_on_every_grid():
    small, large = (make_volume(CTOptions(shape=(n,) * 3), 5)[1] for n in (24, 48))
    again = make_volume(CTOptions(shape=(24,) * 3), 5)[1]
    np.testing.assert_array_equal(small, again)
    corners = large[::2, ::2, ::2]
    assert 2 * ((small > 0) & (corners > 0)).sum() / ((small > 0).sum() + (corners > 0).sum()) > 0.9
    others = [make_volume(CTOptions(shape=(24,) * 3, seed=s), i)[1] for s, i in ((1, 5), (0, 6))]
    assert all((other != small).mean() > 0.01 for other in others)


def test_up_to_ten_tumors_and_sometimes_none():
    options = CTOptions(shape=(24,) * 3, noise=0)
    tumors = [(make_volume(options, i)[1] == 2).sum() for i in range(30)]
    assert 0 in tumors
    assert max(tumors) > 50


def test_files_of_an_interrupted_conversion_are_made_again(tmp_path):
    """Its journal has the same name and other entries."""
    options = CTOptions(count=2, shape=(8, 8, 8))
    generate_ct(tmp_path / "source", options)
    chunked = ConvertOptions("hdf5", chunks=(8, 8, 8))
    with pytest.raises(KeyboardInterrupt):
        convert_dataset(tmp_path / "source", tmp_path / "out", chunked, interrupt_at_the_end)
    generate_ct(tmp_path / "out", options)
    for name in ("ct_0000.hdf5", "ct_0001.hdf5", "dataset.json"):
        whole, again = ((tmp_path / folder / name).read_bytes() for folder in ("source", "out"))
        assert whole == again


def test_hdf5_and_nifti_hold_the_same_volumes(tmp_path):
    options = CTOptions(count=3, shape=(16, 8, 24), format="both", validation=1 / 3)
    manifest = generate_ct(tmp_path / "a", options)
    assert manifest is not None
    assert manifest.splits == {"train": 2, "val": 1}
    assert manifest.class_names == CLASS_NAMES
    assert verify_dataset(tmp_path / "a") == []
    converted = convert_nifti(tmp_path / "a" / "nifti", tmp_path / "b")
    assert converted.class_names == CLASS_NAMES
    assert converted.intensity[0].mean == pytest.approx(manifest.intensity[0].mean, rel=0.1)
    for split in ("train", "val"):
        ours, theirs = (ShardDataset(tmp_path / n, split, normalize="none") for n in "ab")
        for i in range(len(ours)):
            for mine, yours in zip(ours[i], theirs[i], strict=True):
                np.testing.assert_array_equal(mine, yours)
    image, label = make_volume(options, 0)
    found = ShardDataset(tmp_path / "a", normalize="none")[0]
    np.testing.assert_array_equal(found[0][0], image)
    np.testing.assert_array_equal(found[1], label)


def test_nifti_alone_and_a_set_made_otherwise(tmp_path):
    assert generate_ct(tmp_path, CTOptions(count=1, shape=(8,) * 3, format="nifti")) is None
    assert (tmp_path / "imagesTr" / "ct_0000_0000.nii.gz").exists()
    generate_ct(tmp_path / "h", CTOptions(count=1, shape=(8,) * 3))
    with pytest.raises(UsageError, match="made of other files or with other options"):
        generate_ct(tmp_path / "h", CTOptions(count=1, shape=(8,) * 3, seed=1))


def test_nifti_of_other_options_replaces_a_set_with_overwrite_alone(tmp_path):
    three = CTOptions(count=3, shape=(8,) * 3, format="nifti")
    generate_ct(tmp_path, three)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    one = dataclasses.replace(three, count=1, seed=1)
    with pytest.raises(UsageError, match="made with other options"):
        generate_ct(tmp_path, one)
    (tmp_path / "dataset.json").rename(tmp_path / "kept")  # as an interrupted run leaves it
    with pytest.raises(UsageError, match="made with other options"):
        generate_ct(tmp_path, one)
    (tmp_path / "kept").rename(tmp_path / "dataset.json")
    generate_ct(tmp_path, three)
    assert {path: path.read_bytes() for path in before} == before
    generate_ct(tmp_path, dataclasses.replace(one, overwrite=True))
    names = sorted(path.name for path in tmp_path.rglob("*.nii.gz"))
    assert names == ["ct_0000.nii.gz", "ct_0000_0000.nii.gz"]
    assert json.loads((tmp_path / "dataset.json").read_text())["numTraining"] == 1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["dataset.json", "imagesTr/spleen_2_0000.nii.gz", "labelsTr/spleen_2.nii.gz"]
)
def test_nifti_replaces_no_files_of_other_origin(tmp_path, name, overwrite):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"modality": {"0": "CT"}}')
    options = CTOptions(count=1, shape=(8,) * 3, format="nifti", overwrite=overwrite)
    with pytest.raises(UsageError, match=f"{name} is no file of synthetic CT"):
        generate_ct(tmp_path, options)
    assert path.read_text() == '{"modality": {"0": "CT"}}'
    assert len([path for path in tmp_path.rglob("*.*") if path.is_file()]) == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_nifti_alone_replaces_no_manifest(tmp_path, overwrite):
    generate_ct(tmp_path, CTOptions(count=1, shape=(8,) * 3))
    before = (tmp_path / "dataset.json").read_bytes()
    with pytest.raises(UsageError, match="is no file of synthetic CT as NIfTI"):
        generate_ct(
            tmp_path, CTOptions(count=1, shape=(8,) * 3, format="nifti", overwrite=overwrite)
        )
    assert (tmp_path / "dataset.json").read_bytes() == before


@pytest.mark.parametrize(
    "wrong",
    [{"count": 0}, {"seed": -1}, {"shape": (8, 8, 7)}, {"spacing": (1.0, 0.0, 1.0)},
     {"noise": -1.0}, {"validation": 1.0}, {"compression": "gzip"}],
)  # fmt: skip
def test_wrong_options(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        CTOptions(**wrong)
