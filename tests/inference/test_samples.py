"""Tests of predictions for NumPy files and data sets: those of one device, mistakes in a line."""

from __future__ import annotations

import csv
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open as open_weights

from pydist.cli.main import main
from pydist.comm import run_local
from pydist.data import Manifest, ShardDataset, UniverseOptions, generate_universes
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import DataError, UsageError
from pydist.inference import export_weights
from pydist.inference.loaded import load_network
from pydist.inference.resident import Resident
from pydist.inference.samples import DatasetSamples, NumpySamples, predict_samples
from pydist.mesh import Mesh
from pydist.train.config import (
    Config,
    DataConfig,
    FactoryConfig,
    OutputConfig,
    TrainConfig,
    UNet3dConfig,
)
from pydist.train.tasks.factory import first_of
from support.training.runs import job

FACTORY = "pydist.models.pooled:PooledCosmoFlow"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Makes data sets "universes", "classes" and "ct", and for each a run of one step."""
    root = tmp_path_factory.mktemp("samples")
    for name in ("universes", "classes"):
        generate_universes(root / name, UniverseOptions(5, 8, 8, validation=0.6))
    _as_classes(root / "classes")
    generate_ct(root / "ct", CTOptions(count=3, shape=(16, 24, 16), validation=0.6))
    arguments = {"features": 2, "levels": 2}
    own = FactoryConfig(factory=FACTORY, args=arguments, task="regression")
    models = {
        "universes": own,
        "classes": replace(own, args={**arguments, "outputs": 3}, task="classification"),
        "ct": UNet3dConfig(features=2, levels=1),
    }
    for name, model in models.items():
        config = Config(
            model=model,
            data=DataConfig(root / name, "ct" if name == "ct" else "log1p"),
            train=TrainConfig(epochs=1, batch=1, steps=1),
            output=OutputConfig(root / f"run-{name}", plot=False),
        )
        run_local(job, 1, config)
    return root


def _as_classes(folder: Path) -> None:
    """Gives each universe a class instead of its parameters."""
    import h5py

    for i, path in enumerate(sorted(folder.glob("*.hdf5"))):
        with h5py.File(path, "r+") as file:
            del file["unitPar"]
            file["unitPar"] = np.array([i % 3], np.float32)
    manifest = Manifest.load(folder)
    files = tuple(replace(file, checksum="") for file in manifest.files)
    classes = ("void", "wall", "halo")
    replace(manifest, files=files, target_names=("class",), class_names=classes).save(folder)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def factory_of(name: str) -> str:
    return "" if name == "ct" else FACTORY


def expected(root: Path, name: str) -> torch.Tensor:
    """Returns the outputs for the validation set, by the network alone."""
    loaded = load_network(root / f"run-{name}", factory_of(name))
    data = ShardDataset(root / name, "val", normalize="ct" if name == "ct" else "log1p")
    with torch.no_grad():
        return loaded.network(torch.stack([data.read_block(i) for i in range(len(data))]))


def predict(
    root: Path, name: str, samples, output: Path, ranks: int = 1, spatial=(1, 1, 1), on_bad=None
):
    def body(world):
        mesh = Mesh(world, None, spatial)
        resident = Resident(root / f"run-{name}", mesh, factory=factory_of(name))
        if world.rank:
            resident.follow()
            return
        try:
            predict_samples(resident, samples(), output, on_bad=on_bad)
        finally:
            resident.end()

    run_local(body, ranks, timeout=60)


@pytest.mark.parametrize(
    ("ranks", "spatial"), [(1, (1, 1, 1)), (2, (1, 1, 1)), (2, (2, 1, 1)), (4, (1, 1, 2))]
)
def test_values_of_samples_are_those_of_the_network_alone(root, tmp_path, ranks, spatial):
    data = ShardDataset(root / "universes", "val")
    output = tmp_path / "found.csv"
    predict(root, "universes", lambda: DatasetSamples(data), output, ranks, spatial)
    rows, wanted = rows_of(output), expected(root, "universes")
    assert [row["sample"] for row in rows] == ["0", "1", "2"]
    for i, row in enumerate(rows):
        names = data.manifest.target_names
        found = torch.tensor([float(row[f"predicted {name}"]) for name in names])
        torch.testing.assert_close(found, wanted[i], rtol=1e-5, atol=1e-6)
        assert [float(row[f"true {name}"]) for name in names] == data.target(i).tolist()


def test_classes_of_samples_have_probabilities(root, tmp_path):
    data = ShardDataset(root / "classes", "val")
    predict(root, "classes", lambda: DatasetSamples(data), tmp_path / "found.csv", 2)
    rows, wanted = rows_of(tmp_path / "found.csv"), expected(root, "classes").softmax(1)
    names = data.manifest.class_names
    for i, row in enumerate(rows):
        found = torch.tensor([float(row[f"probability {name}"]) for name in names])
        torch.testing.assert_close(found, wanted[i], rtol=1e-5, atol=1e-6)
        assert row["class"] == names[int(wanted[i].argmax())]
        assert float(row["true class"]) == data.target(i).item()


def test_exported_metadata_normalize_the_inputs(root, tmp_path):
    config = Config(
        model=FactoryConfig(factory=FACTORY, args={"features": 2, "levels": 2}, task="regression"),
        data=DataConfig(root / "universes", "standardize"),
        train=TrainConfig(epochs=1, batch=1, steps=1),
        output=OutputConfig(tmp_path / "run", plot=False),
    )
    run_local(job, 1, config)
    export_weights(tmp_path / "run", tmp_path / "m.safetensors", factory=FACTORY)
    with open_weights(tmp_path / "m.safetensors", "pt") as file:
        told = file.metadata()
    assert told["normalize"] == "standardize"
    mean, std = (
        np.reshape(json.loads(told[f"log1p_{name}"]), (4, 1, 1, 1)) for name in ("mean", "std")
    )
    stored = ShardDataset(root / "universes", "val", normalize="none").read_block(0)
    expected = ShardDataset(root / "universes", "val", normalize="standardize").read_block(0)
    assert json.loads(told["sample_shape"]) == list(stored.shape)
    assert json.loads(told["dtype"]) == Manifest.load(root / "universes").dtype
    np.testing.assert_allclose((np.log1p(stored.numpy()) - mean) / std, expected, atol=1e-5)


def test_numpy_files_are_predicted_as_a_command(root, tmp_path, capsys):
    """One file, or a folder, in any byte order and memory order."""
    data = ShardDataset(root / "universes", "val")
    arrays = [data.read_block(i).numpy().astype(">i2") for i in range(len(data))]
    arrays[1] = np.asfortranarray(arrays[1])
    for i, array in enumerate(arrays):
        np.save(tmp_path / f"u{i}.npy", array)
    run, own = str(root / "run-universes"), ["--factory", FACTORY, "--device", "cpu"]
    one, all_of_them = tmp_path / "one.csv", tmp_path / "all.csv"
    assert main(["predict", run, str(tmp_path / "u1.npy"), "-o", str(one), *own]) == 0
    assert main(["predict", run, str(tmp_path), "-o", str(all_of_them), *own]) == 0
    rows, wanted = rows_of(all_of_them), expected(root, "universes")
    assert [row["sample"] for row in rows] == ["u0", "u1", "u2"]
    assert rows_of(one) == rows[1:2]
    found = [[float(row[name]) for name in row if name != "sample"] for row in rows]
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-5, atol=1e-6)
    assert f"predicted  {all_of_them}" in capsys.readouterr().out


def test_labels_of_voxels_are_files(root, tmp_path):
    output = tmp_path / "labels"
    arguments = ["predict", str(root / "run-ct"), str(root / "ct"), "-o", str(output)]
    assert main([*arguments, "--split", "val", "--device", "cpu"]) == 0
    wanted = expected(root, "ct").argmax(1)
    assert sorted(path.name for path in output.iterdir()) == ["0.npy", "1.npy"]
    for i in range(2):
        found = np.load(output / f"{i}.npy")
        assert found.dtype == np.uint8
        assert np.array_equal(found, wanted[i])


@pytest.mark.parametrize(
    ("run", "samples", "more", "message"),
    [
        ("universes", "universes", "-o {0}/out", "a .csv file is needed"),
        ("ct", "ct", "-o {0}/out.csv", "a folder is needed"),
        ("ct", "arrays", "-o {1}/arrays", "stored among the samples"),
        ("universes", "arrays/ct.npy", "-o {0}/out.csv", "ct.npy: the shape (1, 16, 24, 16)"),
        ("universes", "arrays/bad.npy", "-o {0}/out.csv", "bad.npy: damaged, or not NumPy's"),
        ("universes", "arrays/objects.npy", "-o {0}/out.csv", "objects.npy: damaged, or not"),
        ("universes", "arrays/nan.npy", "-o {0}/out.csv", "nan.npy: NaN at ("),
        ("universes", "arrays/minus.npy", "-o {0}/out.csv", "not finite after normalization"),
        ("universes", "arrays/pipe.npy", "-o {0}/out.csv", "pipe.npy: not a regular file"),
        ("universes", "mixed", "-o {0}/out.csv", "one after the other"),
        ("ct", "links", "-o {1}/arrays", "would overwrite"),
        ("universes", "universes", "-o {0}/out.csv --split test", "has no split 'test'"),
        ("universes", "universes", "-o {0}/out.csv --truth {1}", "--truth is for volumes"),
        ("universes", "universes", "-o {0}/no/out.csv", "no: no such folder"),
        ("universes", "universes", "-o {0}/out.csv --sliding 8", "no classes of voxels"),
        ("universes", "universes", "-o {0}/out.csv -n 2 --spatial 3 1 1", "multiples of 3"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    root, tmp_path, capfd, run, samples, more, message
):
    arrays = root / "arrays"
    if not arrays.exists():
        arrays.mkdir()
        np.save(arrays / "ct.npy", np.zeros((1, 16, 24, 16), np.int16))
        np.save(arrays / "nan.npy", np.full((4, 8, 8, 8), np.nan, np.float32))
        np.save(arrays / "objects.npy", np.array([{}]), allow_pickle=True)
        np.save(arrays / "minus.npy", np.full((4, 8, 8, 8), -1, np.int16))
        (arrays / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00")
        os.mkfifo(arrays / "pipe.npy")
        for name in ("mixed", "links"):
            (root / name).mkdir()
        (root / "links" / "ct.npy").symlink_to(arrays / "ct.npy")
        for name in ("a.npy", "b.nii"):
            (root / "mixed" / name).touch()
    arguments = ["predict", f"{root}/run-{run}", f"{root}/{samples}"]
    arguments += ["--factory", FACTORY] if factory_of(run) else []
    assert main([*arguments, *more.format(tmp_path, root).split()]) in (2, 65, 74)
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_two_files_of_one_name_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"two files have the name a\.npy"):
        NumpySamples([tmp_path / "x" / "a.npy", tmp_path / "y" / "a.npy"])


def test_other_files_among_samples_are_refused(root, tmp_path, capfd):
    given = [str(tmp_path / "a.npy"), str(root / "ct/dataset.json")]
    np.save(given[0], np.zeros((4, 8, 8, 8), np.int16))
    assert main(["predict", str(root / "run-universes"), *given, "-o", "x.csv"]) == 2
    assert "dataset.json: not a .npy file" in capfd.readouterr().err
    assert main(["predict", str(root / "run-universes"), given[1], "-o", "x.csv"]) == 2
    assert "dataset.json: not NIfTI files (.nii, .nii.gz) or " in capfd.readouterr().err
    (tmp_path / "a.nii").touch()
    assert main(["predict", "run", str(tmp_path / "a.nii"), "-o", "x.csv"]) == 2
    assert "tables are for .npy files and data sets, not for NIfTI" in capfd.readouterr().err


@pytest.mark.parametrize(("ranks", "spatial"), [(1, (1, 1, 1)), (2, (1, 1, 1)), (2, (2, 1, 1))])
def test_bad_samples_are_left_out_if_asked_for(root, tmp_path, ranks, spatial):
    """Also the first one, after which the table has its heading, and all of a round."""
    good = np.ones((4, 8, 8, 8), np.int16)
    arrays = {"a": -good, "b": good, "c": -good, "d": good[:3], "e": 2 * good}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    paths = [tmp_path / f"{name}.npy" for name in arrays]
    skipped: list[str] = []

    def on_bad(error: DataError) -> None:
        skipped.append(str(error))

    predict(root, "universes", lambda: NumpySamples(paths), tmp_path / "o", ranks, spatial, on_bad)
    assert [row["sample"] for row in rows_of(tmp_path / "o")] == ["b", "e"]
    assert [Path(text.split(":")[0]).stem for text in skipped] == ["a", "c", "d"]


def test_the_command_leaves_bad_samples_out_and_ends_with_an_error(root, tmp_path, capfd):
    for name, factor in (("a", 1), ("b", -1)):
        np.save(tmp_path / f"{name}.npy", np.full((4, 8, 8, 8), factor, np.int16))
    output = tmp_path / "found.csv"
    command = ["predict", str(root / "run-universes"), str(tmp_path), "-o", str(output)]
    command += ["--factory", FACTORY, "--device", "cpu"]
    assert main(command) == 65
    assert not output.exists()
    assert main([*command, "--on-bad-sample", "skip"]) == 65
    assert [row["sample"] for row in rows_of(output)] == ["a"]
    said = capfd.readouterr()
    assert f"skipped    {tmp_path}/b.npy: " in said.out
    assert "samples that could not be predicted: 1" in said.err


@pytest.mark.parametrize("name", ["universes", "classes"])
def test_a_sample_whose_true_value_is_nan_is_left_out_if_asked_for(root, tmp_path, capfd, name):
    import h5py

    data = tmp_path / "data"
    shutil.copytree(root / name, data)
    bad = next(file.path for file in Manifest.load(data).files if file.split == "val")
    with h5py.File(data / bad, "r+") as file:
        file["unitPar"][0] = np.nan
    output = tmp_path / "found.csv"
    command = ["predict", str(root / f"run-{name}"), str(data), "-o", str(output)]
    command += ["--factory", FACTORY, "--device", "cpu"]
    assert main(command) == 65
    assert not output.exists()
    assert main([*command, "--on-bad-sample", "skip"]) == 65
    assert [row["sample"] for row in rows_of(output)] == ["1", "2"]
    said = capfd.readouterr()
    assert f"skipped    {data / bad}: " in said.out
    assert "samples that could not be predicted: 1" in said.err


def test_a_prediction_without_memory_says_what_takes_less(root, tmp_path, monkeypatch, capfd):
    def allocate(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1024 bytes")

    monkeypatch.setattr(Resident, "predict", allocate)
    np.save(tmp_path / "a.npy", np.ones((4, 8, 8, 8), np.int16))
    command = ["predict", str(root / "run-universes"), str(tmp_path / "a.npy"), "-o"]
    assert main([*command, str(tmp_path / "a.csv"), "--factory", FACTORY, "--device", "cpu"]) == 66
    said = capfd.readouterr().err
    assert "you tried 1024 bytes; each rank holds less of a volume if more divide it" in said
    assert said.count("\n") == 1


def test_nan_of_a_network_is_an_error(root, tmp_path):
    def body(world):
        resident = Resident(root / "run-universes", Mesh(world, None, (1, 1, 1)), factory=FACTORY)
        with torch.no_grad():
            next(resident.loaded.network.parameters()).fill_(float("nan"))
        samples = DatasetSamples(ShardDataset(root / "universes", "val"))
        predict_samples(resident, samples, tmp_path / "found.csv")

    with pytest.raises(DataError, match=r"sample 0 of the split 'val' of .*output is not finite"):
        run_local(body, 1)
    assert not list(tmp_path.iterdir())


OWN = """
import torch
from torch import nn
from pydist.train.tasks.factory import AnyRegression

class Net(nn.Module):
    def __init__(self, outputs, form):
        super().__init__()
        self.form, first = form, nn.Conv3d(4, 3, 3, padding=1)
        self.first = torch.nn.utils.weight_norm(first) if form == "weight norm" else first
        self.last = nn.Conv3d(3, outputs, 1)

    def forward(self, x):
        y = self.last(self.first(x)).mean((2, 3, 4), keepdim=True)
        if self.form == "map":
            return y
        y = y.flatten(1)
        if self.form == "scalar":
            return y[:, 0]
        return {"values": y} if self.form == "dict" else y

def make(outputs=2, form="plain", in_channels=4):
    return Net(outputs, form)

class Own(AnyRegression):  # predicts other values than the data set has
    def criterion(self, batches):
        def loss(output, targets):
            y = next(iter(output.values())) if isinstance(output, dict) else output
            return y.double().pow(2).mean()
        return loss

    def measure(self, output, batch):
        return torch.zeros(len(batch.targets), 2, 1, dtype=torch.float64)

    def write_results(self, folder, data, validation):
        pass

class OwnClasses(Own):
    predicts_classes = True
"""


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("data", "task", "form", "columns"),
    [
        ("classes", "regression", "plain", ["true class", "predicted class"]),
        ("universes", "Own", "scalar", ["predicted 0"]),
        ("universes", "Own", "map", ["predicted 0", "predicted 1"]),
        ("universes", "Own", "weight norm", ["predicted 0", "predicted 1"]),
        ("classes", "OwnClasses", "plain", ["class", "probability 0", "probability 3"]),
        ("universes", "Own", "dict", None),
    ],
)
def test_outputs_of_own_networks(root, tmp_path, data, task, form, columns):
    nets = tmp_path / "nets.py"
    nets.write_text(OWN)
    outputs = {"regression": 1, "OwnClasses": 4}.get(task, 2)
    own = task if task == "regression" else f"{nets}:{task}"
    config = Config(
        model=FactoryConfig(
            factory=f"{nets}:make", args={"outputs": outputs, "form": form}, task=own
        ),
        data=DataConfig(root / data, "log1p"),
        train=TrainConfig(epochs=1, batch=1, steps=1, validate_every=0),
        output=OutputConfig(tmp_path / "run", plot=False),
    )
    run_local(job, 1, config)

    def body(world):
        names = {} if task == "regression" else {"task": own}
        mesh = Mesh(world, None, (1, 1, 1))
        resident = Resident(tmp_path / "run", mesh, factory=f"{nets}:make", **names)
        samples = DatasetSamples(ShardDataset(root / data, "val"))
        predict_samples(resident, samples, tmp_path / "found.csv")
        return resident.loaded.kind

    if columns is None:
        with pytest.raises(UsageError, match="the network returns dict; a tensor is needed"):
            run_local(body, 1)
        assert not (tmp_path / "found.csv").exists()
        return
    (kind,) = run_local(body, 1)
    named = "" if task == "regression" else own
    network = load_network(tmp_path / "run", f"{nets}:make", named).network
    assert kind == ("classification" if task == "OwnClasses" else "regression")
    rows = rows_of(tmp_path / "found.csv")
    assert set(columns) <= set(rows[0])
    read = ShardDataset(root / data, "val", normalize="log1p")
    with torch.no_grad():
        for i, row in enumerate(rows):
            y = network(read.read_block(i)[None]).flatten()
            y = y.softmax(0) if kind == "classification" else y
            found = [float(value) for name, value in row.items() if name.startswith("pr")]
            torch.testing.assert_close(torch.tensor(found), y, rtol=1e-5, atol=1e-6)


def test_an_error_while_all_compute_is_the_one_that_is_told(root, monkeypatch):
    """Its rank sends no order, which the others would take for an answer."""

    def fails(self, item, shape):
        raise ValueError("as it was")

    def body(world):
        resident = Resident(root / "run-universes", Mesh(world, None, (1, 1, 1)), factory=FACTORY)
        if world.rank:
            resident.follow()
            return
        image = resident.prepared(np.zeros((4, 8, 8, 8), np.int16))
        monkeypatch.setattr(Resident, "_output", fails)
        try:
            resident.predict([image])
        finally:
            resident.end()

    with pytest.raises(ValueError, match="as it was"):
        run_local(body, 2, timeout=60)


def test_the_first_of_several_outputs_in_one_tensor_predicts():
    for dims in (1, 2, 3):
        scores = torch.randn(2, 3, 4, *[5] * dims)  # [N, outputs, classes, ...]
        assert torch.equal(first_of(scores, dims), scores[:, 0])
        assert torch.equal(first_of(scores[:, 0], dims), scores[:, 0])


def test_the_predictor_of_volumes_names_the_other_way(root, tmp_path, capfd):
    image = tmp_path / "x.nii.gz"
    image.touch()
    arguments = ["predict", str(root / "run-universes"), str(image), "-o", "y.nii.gz"]
    assert main([*arguments, "--factory", FACTORY]) == 73
    assert "predicts no classes of voxels: give samples as .npy files" in capfd.readouterr().err
