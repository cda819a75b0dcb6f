"""Tests of samples of fewer dims: images and lines, from files to a trained network."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from pydist import Mesh, distribute_tensor, run_local
from pydist.cli.main import main
from pydist.comm import LocalTransport
from pydist.data import AugmentOptions, Loader, Manifest, ShardDataset
from pydist.data.index import index_folder
from pydist.data.options import IndexOptions
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.inference import Predictor
from pydist.inference.loaded import load_network
from pydist.inference.resident import Resident
from pydist.layout import layout_for_sample
from pydist.train import config_io, log
from pydist.train.datasets import shape_in_training
from pydist.train.tasks import task_of
from support.training.runs import change, job

EXAMPLES = Path(__file__).parents[2] / "examples"
NETWORK = "pydist.models:UNet2d"


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "images"
    before, sys.argv = sys.argv, ["images.py", str(folder), "--count", "10", "--width", "32"]
    try:
        runpy.run_path(str(EXAMPLES / "images.py"), run_name="__main__")
    finally:
        sys.argv = before
    return folder


def config_of(images: Path, folder: Path, **tables):
    config = config_io.load(EXAMPLES / "unet2d.toml")
    model = replace(config.model, args={"features": 4, "levels": 2}, multiple=4)
    config = replace(config, model=model)
    config = change(config, data={"path": images}, output={"folder": folder, "plot": False})
    return change(config, **{"train": {"epochs": 1}, **tables})


def figures(folder: Path) -> list[float]:
    events = list(log.read(folder / "log.jsonl"))
    return [e["loss"] for e in events if e["event"] in ("step", "validation")]


def test_axes_have_the_names_of_the_dims():
    def body(world):
        mesh = Mesh(world, 1, (1, 2, 2))
        image = layout_for_sample(mesh, (1, 3, 8, 6))
        assert [s and s.axes for s in image.splits] == [None, None, ("height",), ("width",)]
        line = layout_for_sample(mesh, (1, 3, 8))
        assert [s and s.axes for s in line.splits] == [None, None, ("width",)]
        assert distribute_tensor(torch.zeros(1, 3, 8, 6), mesh).to_local().shape == (1, 3, 4, 3)

    run_local(body, 4)


def test_a_crop_of_an_image_has_a_depth_of_one(images, tmp_path):
    def shape(*crop: int) -> tuple[int, ...]:
        config = config_of(images, tmp_path, data={"augment": AugmentOptions(crop=crop)})
        return shape_in_training(config, task_of(config), Manifest.load(images))

    assert shape(1, 16, 8) == (1, 1, 16, 8)
    with pytest.raises(UsageError, match="network accepts multiples of 4"):
        shape(1, 16, 10)


def test_a_loader_gives_images_by_blocks(images):
    whole = ShardDataset(images, "val")
    stored, labels = zip(*(whole[i] for i in range(2)), strict=True)
    assert stored[0].shape == (1, 1, 32, 32)
    assert (whole.dims, whole.sample_shape) == (2, (1, 1, 32, 32))

    def body(world):
        mesh = Mesh(world, 1, (1, 2, 2))
        with Loader(ShardDataset(images, "val"), mesh, 2, training=False) as loader:
            batch = next(loader.batches(0))
        assert batch.inputs.shape == (2, 1, 32, 32)
        assert batch.inputs.to_local().shape == (2, 1, 16, 16)
        assert batch.targets.to_local().shape == (2, 16, 16)
        assert torch.equal(batch.inputs.full_tensor(), torch.stack(stored)[:, :, 0])
        assert torch.equal(batch.targets.full_tensor(), torch.stack(labels)[:, 0])
        with pytest.raises(UsageError, match=r"2 dims are cut along height and width; .* depth"):
            Loader(ShardDataset(images, "val"), Mesh(world, 1, (4, 1, 1)), 2)

    run_local(body, 4)


def test_the_example_trains_split_as_on_one_rank(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    split = config_of(images, tmp_path / "split")
    run_local(job, 2, split, 1, (1, 2, 1))
    whole = config_of(images, tmp_path / "whole", output={"folder": tmp_path / "whole"})
    job(LocalTransport(), change(whole, mesh={"spatial": (1, 1, 1)}))
    assert len(figures(tmp_path / "split")) == 3
    assert figures(tmp_path / "split") == pytest.approx(figures(tmp_path / "whole"), rel=1e-4)
    with pytest.raises(CheckpointError, match="trained on samples of 2 dims"):
        Predictor(tmp_path / "split", run_local(Mesh, 1)[0], factory=NETWORK)
    check_service(images, tmp_path / "split")


def check_service(images: Path, run: Path) -> None:
    """Checks that a trained network on ranks computes for images what it computes alone."""
    image = ShardDataset(images, "val")[0][0].numpy()[:, 0]

    def served(world):
        resident = Resident(run, Mesh(world, 1, (1, world.size, 1)), factory=NETWORK)
        if world.rank:
            resident.follow()
            return None
        for wrong in (image[None], image[:, 1:]):
            with pytest.raises(DataError, match=r"accepts \[1, H, W\]|multiples of 4"):
                resident.prepared(wrong)
        (found,) = resident.predict([resident.prepared(image)])
        resident.end()
        return found

    loaded = load_network(run, NETWORK)
    with torch.no_grad():
        expected = loaded.network(torch.from_numpy(image)[None])[0]
    for ranks in (1, 2):
        torch.testing.assert_close(run_local(served, ranks, timeout=60)[0], expected)


def test_the_command_trains_and_draws_images(images, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    options = ["--data.path", str(images), "--mesh.spatial", "1", "1", "1", "--train.epochs", "1"]
    options += ["--model.args.features", "4", "--output.folder", "run"]
    assert main(["train", str(EXAMPLES / "unet2d.toml"), *options]) == 0
    for name in ("progress.png", "samples/epoch-0001.png", "result.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")
    assert main(["status", "run"]) == 0
    assert "run done" in capsys.readouterr().out
    assert main(["data", "info", str(images), "--deep"]) == 0
    assert "CHW" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "axes"), [((8, 9, 2), "HWC"), ((3, 7, 5), "CHW"), ((2, 9), "CW")]
)
def test_existing_files_are_indexed(tmp_path, shape, axes):
    numbers = np.random.default_rng(0)
    stored = numbers.random((2, *shape), dtype=np.float32)
    for i, each in enumerate(stored):
        with h5py.File(tmp_path / f"{i}.hdf5", "w") as file:
            file["full"], file["unitPar"] = each, each.mean(keepdims=True).ravel()
    index_folder(tmp_path, IndexOptions(validation=0.0)).save(tmp_path)
    data = ShardDataset(tmp_path)
    assert data.manifest.axes == axes
    expected = stored[0] if axes[0] == "C" else np.moveaxis(stored[0], -1, 0)
    np.testing.assert_array_equal(data.read_block(0).squeeze().numpy(), expected)
    dims = {1: nn.Conv1d, 2: nn.Conv2d}[data.dims]
    with Loader(data, run_local(Mesh, 1)[0], 2) as loader:
        inputs = next(iter(loader)).inputs.full_tensor()
    assert dims(data.sample_shape[0], 1, 3)(inputs).shape[:2] == (2, 1)


def test_manifests_of_images_have_flat_shapes(images):
    text = Manifest.load(images).dumps().replace('"CHW"', '"CW"')
    with pytest.raises(DataError, match=r"sample_shape \(1, 1, 32, 32\) with axes 'CW'"):
        Manifest.loads(text, "dataset.json")
