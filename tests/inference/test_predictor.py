"""Tests of full-volume prediction: N ranks equal one, and results use the scanner's grid."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open as open_weights
from safetensors.torch import load_file

from pydist.cli.main import main
from pydist.comm import LocalTransport, run_local
from pydist.data import ShardDataset
from pydist.data.medical.case import read_image
from pydist.data.medical.convert import convert_nifti
from pydist.data.medical.dicom import read_dicom
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.grid import VoxelGrid
from pydist.data.medical.options import CTOptions, GridOptions
from pydist.data.normalize import Normalizer
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.inference import Predictor, Sliding, export_weights
from pydist.inference.resident import Resident
from pydist.mesh import Mesh
from pydist.models import UNet3d
from pydist.train import checkpoint
from pydist.train.config import (
    AdamConfig,
    Config,
    DataConfig,
    OutputConfig,
    TrainConfig,
    UNet3dConfig,
)
from pydist.train.metadata import load_trained
from support.data.series import write_series
from support.training.runs import job

SHAPE = (20, 18, 26)
IMAGE = "nifti/imagesTr/ct_0000_0000.nii.gz"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Trains a network to find the liver; returns its folder, with volumes in "nifti"."""
    root = tmp_path_factory.mktemp("trained")
    generate_ct(root / "nifti", CTOptions(count=4, shape=SHAPE, noise=5.0, format="nifti"))
    convert_nifti(root / "nifti", root / "data")
    config = Config(
        model=UNet3dConfig(features=4, levels=2),
        data=DataConfig(path=root / "data", normalize="ct"),
        optimizer=AdamConfig(lr=1e-2, decay_epochs=20.0),
        train=TrainConfig(epochs=20, batch=1, validate_every=0),
        output=OutputConfig(folder=root / "run", plot=False),
    )
    run_local(job, 1, config)
    return root


@pytest.fixture(autouse=True)
def many_slabs(monkeypatch):
    """Reads and writes the small volumes in several slabs, as it does with large ones."""
    monkeypatch.setattr("pydist.inference.source._SLAB", 1500)


def predict(
    trained: Path, out: Path, spatial=(1, 1, 1), image=None, data=1, **options
) -> np.ndarray:
    """Predicts a volume, by default the first; returns labels [x, y, z]."""
    image = image or trained / IMAGE

    def body(world):
        mesh = Mesh(world, data, spatial)
        Predictor(trained / "run", mesh, **options).predict_file([image], out)

    run_local(body, data * math.prod(spatial), timeout=120)
    return np.asarray(nib.load(out).dataobj)


def dice(one: np.ndarray, other: np.ndarray) -> float:
    return 2 * (one & other).sum() / (one.sum() + other.sum())


def test_any_number_of_ranks_predicts_the_same(trained, tmp_path):
    expected = predict(trained, tmp_path / "one.nii.gz")
    truth = nib.load(trained / "nifti" / "labelsTr" / "ct_0000.nii.gz")
    assert dice(expected > 0, np.asarray(truth.dataobj) > 0) > 0.8
    for spatial in ((2, 1, 1), (1, 3, 1), (2, 2, 2)):
        found = predict(trained, tmp_path / "split.nii", spatial)
        np.testing.assert_array_equal(found, expected)
    header = nib.load(tmp_path / "split.nii").header
    assert header.get_data_dtype() == np.uint8
    for name in ("dim", "pixdim", "srow_x", "srow_y", "srow_z", "qform_code", "sform_code"):
        np.testing.assert_array_equal(header[name], truth.header[name])


def test_a_network_that_diverged_predicts_no_labels(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    last = (tmp_path / "run" / "ckpt" / "last").resolve()
    parts = checkpoint.read(last)
    next(iter(parts["model"].values())).fill_(math.nan)
    checkpoint.write(last.parent, parts.pop("step"), parts)
    with pytest.raises(DataError, match="the network's scores are NaN"):
        predict(tmp_path, tmp_path / "a.nii", (2, 1, 1), trained / IMAGE)
    assert not (tmp_path / "a.nii").exists()


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
def test_no_text_of_the_image_is_in_the_prediction(trained, tmp_path, kind):
    """Header fields, unused ones included, and an extension name a patient."""
    source = nib.load(trained / IMAGE)
    image = kind(np.asarray(source.dataobj), source.affine)
    text = ("descrip", "aux_file", "intent_name", "data_type", "db_name", "unused_str")
    for field in text:
        if field in image.header:
            image.header[field] = b"JaneDoe"
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"JaneDoe"))
    nib.save(image, tmp_path / "in.nii")
    assert (tmp_path / "in.nii").read_bytes().count(b"JaneDoe") >= 5
    predict(trained, tmp_path / "out.nii", image=tmp_path / "in.nii")
    assert b"JaneDoe" not in (tmp_path / "out.nii").read_bytes()
    np.testing.assert_array_equal(nib.load(tmp_path / "out.nii").affine, source.affine)


def test_it_is_what_the_plain_network_says(trained, tmp_path):
    """The plain network with the exported weights reads the training data."""
    network = export_weights(trained / "run", tmp_path / "m.safetensors")
    assert network == (
        "pydist.models.unet3d.UNet3d(in_channels=1, classes=3, features=4, levels=2)"
    )
    plain = UNet3d(in_channels=1, classes=3, features=4, levels=2).eval()
    plain.load_state_dict(load_file(tmp_path / "m.safetensors"))
    with open_weights(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata()["network"] == network
        assert file.metadata()["normalize"] == "ct"
        assert json.loads(file.metadata()["grid"])["multiple"] == 8
    volume = ShardDataset(trained / "data", normalize="ct").read_block(0)
    with torch.no_grad():
        labels = plain(volume[None]).argmax(1)[0].numpy()
    depth, height, width = SHAPE
    expected = labels[:depth, :height, :width].transpose(2, 1, 0)
    np.testing.assert_array_equal(predict(trained, tmp_path / "a.nii.gz", (2, 1, 1)), expected)


@pytest.mark.parametrize("sliding", [None, Sliding(8)])
def test_an_array_is_taken_as_it_is(trained, sliding):
    """Its extents are multiples of what the network needs, not of the training data's 8."""
    stored, image = (
        ShardDataset(trained / "data", normalize=kind).read_block(0)[:, :12, :12, :20]
        for kind in ("none", "ct")
    )
    about, weights = load_trained(trained / "run")
    plain = about.task().network(about.manifest).eval()
    plain.load_state_dict(weights)
    with torch.no_grad():
        expected = plain(image[None])[0]
    if sliding is not None:
        resident = Resident(trained / "run", Mesh(LocalTransport()), sliding)
        (expected,) = resident.predict([resident.prepared(stored)])

    def body(world):
        predictor = Predictor(trained / "run", Mesh(world, 1, (2, 1, 1)), sliding)
        return predictor.probabilities(stored if world.rank == 0 else None)

    found = run_local(body, 2, timeout=120)[0]
    torch.testing.assert_close(torch.from_numpy(found), expected.softmax(0), rtol=0, atol=1e-4)


def test_the_ranks_stay_up_between_volumes_of_any_shape_and_orientation(trained, tmp_path):
    """The ranks predict one volume as it is, flipped and cropped."""
    source = nib.load(trained / IMAGE)
    flipped = nib.Nifti1Image(
        np.asarray(source.dataobj)[::-1].transpose(2, 0, 1),
        source.affine @ nib.orientations.inv_ornt_aff([[1, -1], [2, 1], [0, 1]], SHAPE[::-1]),
    )
    np.testing.assert_array_equal(
        np.asarray(nib.as_closest_canonical(flipped).dataobj), np.asarray(source.dataobj)
    )
    nib.save(flipped, tmp_path / "flipped.nii.gz")
    nib.save(source.slicer[:, 2:, 4:], tmp_path / "cropped.nii.gz")
    nib.save(source, tmp_path / "whole.nii.gz")
    names = ("whole", "flipped", "cropped", "whole")

    def body(world):
        predictor = Predictor(trained / "run", Mesh(world, 1, (2, 1, 1)))
        for i, name in enumerate(names):
            predictor.predict_file([tmp_path / f"{name}.nii.gz"], tmp_path / f"{i}.nii.gz")

    run_local(body, 2, timeout=120)
    whole, turned, cropped, again = (nib.load(tmp_path / f"{i}.nii.gz") for i in range(4))
    np.testing.assert_array_equal(np.asarray(whole.dataobj), np.asarray(again.dataobj))
    np.testing.assert_allclose(turned.affine, flipped.affine)
    np.testing.assert_array_equal(
        np.asarray(nib.as_closest_canonical(turned).dataobj), np.asarray(whole.dataobj)
    )
    alone = predict(trained, tmp_path / "alone.nii", image=tmp_path / "cropped.nii.gz")
    assert alone.shape == (26, 16, 16)
    np.testing.assert_array_equal(np.asarray(cropped.dataobj), alone)


def test_sliding_windows_are_near_the_whole_volume(trained, tmp_path):
    expected = predict(trained, tmp_path / "whole.nii")
    found = predict(trained, tmp_path / "sliding.nii", (2, 1, 1), sliding=Sliding(16, 0.5))
    again = predict(trained, tmp_path / "again.nii", sliding=Sliding(16, 0.5))
    np.testing.assert_array_equal(found, again)
    dealt = predict(trained, tmp_path / "dealt.nii", data=3, sliding=Sliding(16, 0.5))
    np.testing.assert_array_equal(found, dealt)
    # A network trained for seconds depends on context beyond the window.
    assert 0.7 < dice(found > 0, expected > 0) <= 1


def checkpoint_on(folder: Path, trained: Path, **grid) -> Path:
    """Writes the checkpoint of the same network, as if trained on another grid."""
    parts = checkpoint.read(checkpoint.complete(trained / "run" / "ckpt")[-1])
    del parts["step"]
    manifest = json.loads(parts["about"]["manifest"])
    manifest["origin"]["grid"] |= grid
    parts["about"]["manifest"] = json.dumps(manifest)
    return checkpoint.write(folder, 1, parts)


def test_scores_are_resampled_to_the_image(trained, tmp_path):
    """The oracle is the plain network on the training's grid, with torch's interpolation."""
    spacing = (2.0, 1.2, 0.9)
    made = checkpoint_on(tmp_path / "ckpt", trained, spacing=spacing)
    source = nib.load(trained / IMAGE)
    turned = np.asarray(source.dataobj)[::-1].transpose(2, 0, 1)
    affine = source.affine @ nib.orientations.inv_ornt_aff([[1, -1], [2, 1], [0, 1]], SHAPE[::-1])
    nib.save(nib.Nifti1Image(turned, affine), tmp_path / "image.nii")

    options = GridOptions(spacing=spacing, multiple=8)  # as `convert_nifti` has padded
    image, first = read_image((tmp_path / "image.nii",), options)
    grid = VoxelGrid(first.block, options, "")
    assert grid.resampled != grid.oriented
    metadata, weights = load_trained(made)
    plain = metadata.task().network(metadata.manifest).eval()
    plain.load_state_dict(weights)
    stored = np.rint(image).astype(np.int16)
    values = torch.empty(stored.shape)
    Normalizer("ct", metadata.manifest, "float32")(stored, 0, 0.0, values.numpy())
    with torch.no_grad():
        scores = plain(values[None])
    inner = scores[(slice(None), slice(None), *map(slice, grid.resampled))]
    scores = F.interpolate(inner, size=grid.oriented, mode="trilinear")[0]
    clear = grid.in_file_order((scores.topk(2, 0).values.diff(dim=0)[0] < -1e-4).numpy())
    expected = grid.in_file_order(scores.argmax(0).numpy())
    probabilities = [grid.in_file_order(p) for p in scores.softmax(0).numpy()]

    for ranks in (1, 3):
        out, beside = tmp_path / f"{ranks}.nii.gz", tmp_path / f"{ranks}_p.nii.gz"

        def body(world, out=out, beside=beside):
            predictor = Predictor([made, made], Mesh(world, 1, (world.size, 1, 1)))
            predictor.predict_file([tmp_path / "image.nii"], out, beside)

        run_local(body, ranks, timeout=120)
        found, written = np.asarray(nib.load(out).dataobj), nib.load(beside)
        assert clear.mean() > 0.95
        assert (expected > 0).any()
        np.testing.assert_array_equal(found[clear], expected[clear])
        np.testing.assert_allclose(written.affine, affine)
        assert written.get_data_dtype() == np.float32
        found = np.moveaxis(np.asarray(written.dataobj), 3, 0)
        np.testing.assert_allclose(found, probabilities, atol=1e-4)


@pytest.fixture(scope="module")
def fold(trained, tmp_path_factory) -> Path:
    """Returns a run of the same network whose weights differ."""
    folder = tmp_path_factory.mktemp("fold")
    parts = checkpoint.read((trained / "run" / "ckpt" / "last").resolve())
    numbers = torch.Generator().manual_seed(0)
    for weight in filter(torch.is_floating_point, parts["model"].values()):
        weight.mul_(1 + 0.3 * torch.rand(weight.shape, generator=numbers))
    return checkpoint.write(folder / "ckpt", parts.pop("step"), parts)


@pytest.mark.parametrize("ranks", [(), ("-n", "2")])
def test_command_with_windows_folds_probabilities_and_truth(trained, fold, tmp_path, capfd, ranks):
    data, out = trained / "nifti", tmp_path / "out"
    options = [
        "--sliding", "16", "--overlap", "0.5", "--folds", str(fold), "--probabilities",
        "--truth", str(data / "labelsTr"), "--device", "cpu", *ranks,
    ]  # fmt: skip
    assert (
        main(["predict", str(trained / "run"), str(data / "imagesTr"), "-o", str(out), *options])
        == 0
    )
    said = "".join(capfd.readouterr())
    assert "liver" in said
    names = {f"ct_{n:04}{part}.nii.gz" for n in range(4) for part in ("", "_probabilities")}
    assert {path.name for path in out.iterdir()} == names

    def body(world):
        found = Predictor([trained / "run", fold], Mesh(world), Sliding(16, 0.5), "cpu")
        found.predict_file([trained / IMAGE], tmp_path / "a.nii", tmp_path / "p.nii")
        Predictor(trained / "run", Mesh(world), Sliding(16, 0.5), "cpu").predict_file(
            [trained / IMAGE], tmp_path / "b.nii", tmp_path / "q.nii"
        )

    run_local(body, 1)
    labels, likely, alone = (
        np.asarray(nib.load(tmp_path / name).dataobj) for name in ("a.nii", "p.nii", "q.nii")
    )
    np.testing.assert_array_equal(np.asarray(nib.load(out / "ct_0000.nii.gz").dataobj), labels)
    written = np.asarray(nib.load(out / "ct_0000_probabilities.nii.gz").dataobj)
    np.testing.assert_array_equal(written, likely)
    np.testing.assert_allclose(likely.sum(-1), 1, atol=1e-5)
    assert np.abs(likely - alone).max() > 0.01  # the other fold counts


@pytest.mark.parametrize("ranks", [(), ("-n", "2")])
def test_a_damaged_volume_is_left_out_if_asked_for(trained, tmp_path, capfd, ranks):
    images, out = tmp_path / "images", tmp_path / "out"
    shutil.copytree(trained / "nifti" / "imagesTr", images)
    damaged = images / "ct_0001_0000.nii.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    command = ["predict", str(trained / "run"), str(images), "-o", str(out), "--device", "cpu"]
    assert main([*command, *ranks, "--on-bad-sample", "skip"]) == 65
    said = capfd.readouterr()
    assert f"skipped    {damaged}: " in said.out
    assert said.err.count("1 of 4 volumes could not be predicted") == 1
    assert {path.name for path in out.iterdir()} == {f"ct_{n:04}.nii.gz" for n in (0, 2, 3)}


def test_an_error_of_one_rank_alone_is_never_skipped(trained, tmp_path, capfd, monkeypatch):
    """The other ranks would wait for it in the volume that it leaves."""

    def predict_file(*_: object) -> None:
        raise DataError("raised by the network, on some rank")

    monkeypatch.setattr(Predictor, "predict_file", predict_file)
    images, out = trained / "nifti" / "imagesTr", tmp_path / "out"
    command = ["predict", str(trained / "run"), str(images), "-o", str(out), "--device", "cpu"]
    assert main([*command, "--on-bad-sample", "skip"]) == 65
    said = capfd.readouterr()
    assert "raised by the network, on some rank" in said.err
    assert "skipped" not in said.out


@pytest.mark.parametrize("ranks", [(), ("-n", "2")])
def test_a_dicom_series_is_predicted_as_the_same_volume_in_nifti(trained, tmp_path, ranks):
    pytest.importorskip("pydicom")
    values = np.random.default_rng(1).integers(-200, 300, (20, 18, 26)).astype("int16")
    series = write_series(tmp_path / "series", values, spacing=(1.0, 1.5), step=2.0)
    affine = read_dicom(series).affine
    nib.save(nib.Nifti1Image(values.transpose(2, 1, 0), affine), tmp_path / "same.nii.gz")
    labels = []
    for image, name in ((series, "a.nii.gz"), (tmp_path / "same.nii.gz", "b.nii.gz")):
        command = ["predict", str(trained / "run"), str(image), "-o", str(tmp_path / name)]
        assert main([*command, "--device", "cpu", *ranks]) == 0
        labels.append(nib.load(tmp_path / name))
    np.testing.assert_allclose(labels[0].affine, labels[1].affine, atol=1e-4)
    found, expected = (np.asarray(each.dataobj) for each in labels)
    assert found.shape == (26, 18, 20)
    assert np.array_equal(found, expected)
    assert len(np.unique(found)) > 1


def test_networks_of_other_grids_are_not_averaged(trained, tmp_path):
    other = checkpoint_on(tmp_path / "ckpt", trained, spacing=(2.0, 2.0, 2.0))

    def body(world):
        with pytest.raises(CheckpointError, match=r"was trained with grid .*can't be averaged"):
            Predictor([trained / "run", other], Mesh(world))
        with pytest.raises(UsageError, match="no checkpoint was given"):
            Predictor([], Mesh(world))

    run_local(body, 1)


def test_errors_are_those_of_every_rank(trained, tmp_path):
    image = trained / "nifti" / "imagesTr" / "ct_0000_0000.nii.gz"
    cut = tmp_path / "cut.nii.gz"
    cut.write_bytes(image.read_bytes()[:-9])

    def body(world):
        predictor = Predictor(trained / "run", Mesh(world, 1, (2, 1, 1)))
        for images, output, error, message in (
            ([cut], "a.nii", DataError, "cut short"),
            ([image, image], "a.nii", DataError, r"the network accepts \[1, D, H, W\]"),
            ([image], "a.mha", UsageError, r"ends in \.nii"),
        ):
            with pytest.raises(error, match=message):
                predictor.predict_file(images, tmp_path / output)
        assert list(tmp_path.glob("a.*")) == []
        predictor.predict_file(str(image), tmp_path / "a.nii")  # the path of one file
        assert (tmp_path / "a.nii").is_file()

    run_local(body, 2, timeout=120)


def test_images_that_are_none_are_named(trained, tmp_path):
    made = torch.zeros(1, 16, 16, 16)
    wrong = {
        "NoneType is no array": (None, UsageError),
        "NaN at .*, which int16 does not have": (
            made.index_fill(1, torch.tensor([2]), math.nan),
            DataError,
        ),
        "values from 0.0 to inf do not fit int16": (
            made.index_fill(1, torch.tensor([2]), math.inf),
            DataError,
        ),
        r"torch.strided torch.complex64; real": (made * 1j, DataError),
        "torch.sparse_coo torch.float32; real": (made.to_sparse(), DataError),
        "of kind meta; real": (made.to("meta"), DataError),
        "the shape \\(16, 16, 16\\)": (made[0], DataError),
        "the shape \\(1, 0, 16, 16\\) has no voxels": (made[:, :0], DataError),
    }

    def body(world):
        predictor = Predictor(trained / "run", Mesh(world, 1, (2, 1, 1)))
        for message, (image, error) in wrong.items():
            with pytest.raises(error, match=message):
                predictor.predict(image if world.rank == 0 else None)
        found = predictor.predict(made.bfloat16() if world.rank == 0 else None)
        return predictor.predict(made.numpy() if world.rank == 0 else None), found

    plain, rounded = run_local(body, 2, timeout=120)[0]
    np.testing.assert_array_equal(plain, rounded)


def test_a_prediction_overwrites_no_image(trained, tmp_path):
    image = tmp_path / "image.nii.gz"
    shutil.copy(trained / "nifti" / "imagesTr" / "ct_0000_0000.nii.gz", image)
    (tmp_path / "link.nii.gz").symlink_to(image)
    before = image.read_bytes()

    def body(world):
        predictor = Predictor(trained / "run", Mesh(world, 1, (2, 1, 1)))
        for output in (image, tmp_path / "link.nii.gz"):
            with pytest.raises(UsageError, match="would overwrite what is read"):
                predictor.predict_file([image], output)
        with pytest.raises(UsageError, match="no image was given"):
            predictor.predict_file([], tmp_path / "labels.nii")

    run_local(body, 2, timeout=120)
    assert image.read_bytes() == before


def test_weights_are_exported_into_no_checkpoint(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run, symlinks=True)
    last = run / "ckpt" / "last"
    shutil.copytree(last, tmp_path / "kept elsewhere")
    for folder in (last, last.resolve(), tmp_path / "kept elsewhere"):
        before = (folder / "model.safetensors").read_bytes()
        for name in ("model.safetensors", "another.safetensors"):
            with pytest.raises(UsageError, match="its folder is a checkpoint"):
                export_weights(run, folder / name)
        assert (folder / "model.safetensors").read_bytes() == before
    export_weights(run, run / "weights.safetensors")


def test_checkpoints_and_windows_that_do_not_fit(trained, tmp_path):
    def body(world):
        mesh = Mesh(world)
        with pytest.raises(UsageError, match="a window of 18 voxels is not a multiple of 4"):
            Predictor(trained / "run", mesh, Sliding(18))
        with pytest.raises(CheckpointError, match="no checkpoint here"):
            Predictor(tmp_path, mesh)
        if not torch.cuda.is_available():
            with pytest.raises(UsageError, match=r'device is "cuda": .* finds no CUDA device'):
                Predictor(trained / "run", mesh, device="cuda")
        parts = checkpoint.read(checkpoint.complete(trained / "run" / "ckpt")[-1])
        del parts["step"], parts["model"]["last.weight"]
        with pytest.raises(CheckpointError, match=r"do not fit: .*last\.weight"):
            Predictor(checkpoint.write(tmp_path / "ckpt", 1, parts), mesh)

    run_local(body, 1)
    with pytest.raises(UsageError, match="overlap=1"):
        Sliding(16, 1.0)
    for wrong in (("8",), (8.5,), (8, "a")):
        with pytest.raises(UsageError, match="a whole number of voxels, and a part"):
            Sliding(*wrong)
    with pytest.raises(UsageError, match=r"ends in \.safetensors"):
        export_weights(trained / "run", tmp_path / "m.bin")
