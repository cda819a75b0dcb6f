"""Tests of registries: entries of other packages are found by name, without edits in pydist."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest

from pydist import runtime
from pydist.comm import run_local
from pydist.data import Manifest
from pydist.data.manifest import DataFile
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import UsageError
from pydist.registry import JOINS, TRANSPORTS, Registry, transport_names
from pydist.train import log
from support.jobs.children import run_python
from support.transports.checks import Check
from support.transports.contract import CHECKS

TRANSPORT = """
from pydist.comm.transports.routed import RoutedTransport

class Counting(RoutedTransport):
    name, calls = "counting", 0

    def __init__(self, host):
        self.host, self.rank, self.size = host, host.rank, host.size

    @classmethod
    def over(cls, host, local_rank):
        return cls(host)

    def _of(self, tensors):
        Counting.calls += 1
        return self.host

    def _subgroup(self, members):
        return Counting(self.host._subgroup(members))

    def _barrier(self):
        self.host._barrier()

    def progress(self):
        self.host.progress()

    def abort(self, reason, exit_code):
        self.host.abort(reason, exit_code)

    def close(self):
        self.host.close()
"""

SCRIPT = """
import torch
import pydist
from my_transports import Counting

mesh = pydist.init(spatial=(2, 1, 1), transport="counting")
torch.manual_seed(0)
conv, x = torch.nn.Conv3d(1, 2, 3, padding=1).double(), torch.randn(1, 1, 6, 4, 4).double()
expected = conv(x).detach()
y = pydist.parallelize(conv, mesh)(pydist.distribute_tensor(x, mesh))
assert (y.full_tensor() - expected).abs().max() < 1e-14
assert Counting.calls > 0
if mesh.rank == 0:
    print(mesh)
"""


TABLES = """
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydist.train.config import Count, Fraction, LayerwiseConfig, ModelConfig, OptimizerConfig

@dataclass(frozen=True)
class FlatConfig(ModelConfig):
    losses: ClassVar[tuple[str, ...]] = ("dice_ce", "cross_entropy")
    name: Literal["flat"] = "flat"
    task: ClassVar[str] = "my_networks:FlatSegmentation"
    width: Count = 4

@dataclass(frozen=True)
class AdriftConfig(FlatConfig):
    name: Literal["adrift"] = "adrift"
    task: ClassVar[str] = "my_networks:Nowhere"

@dataclass(frozen=True)
class RmspropConfig(OptimizerConfig):
    name: Literal["rmsprop"] = "rmsprop"
    alpha: Fraction = 0.99

    def optimizer(self, parameters):
        from torch.optim import RMSprop
        return RMSprop(parameters, self.lr, self.alpha)

@dataclass(frozen=True)
class SignedConfig(OptimizerConfig):
    name: Literal["signed"] = "signed"

    def optimizer(self, parameters):
        from my_optimizers import Signed
        return Signed(parameters, {"lr": self.lr})

@dataclass(frozen=True)
class NormedConfig(LayerwiseConfig):
    name: Literal["normed"] = "normed"

    def optimizer(self, parameters):
        from my_optimizers import Normed
        return Normed(parameters, {"lr": self.lr}, None)
"""

OPTIMIZERS = """
import torch
from pydist.optim.layerwise import LayerwiseOptimizer

class Signed(torch.optim.Optimizer):
    "Moves each element by the sign of its gradients' average."
    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    mean = state.setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * mean.sign())

class Normed(LayerwiseOptimizer):
    "Moves each parameter by a part of its norm, along its gradient."

    def _directions(self, group, parameters):
        return [p.grad for p in parameters]

    def _ratio(self, group, weights, lengths):
        return weights / lengths

    def _move(self, group, parameters, directions, ratios):
        for i, (p, direction) in enumerate(zip(parameters, directions)):
            p.sub_(group["lr"] * (1 if ratios is None else ratios[i]) * direction)
"""

NETWORKS = """
from torch import nn
from pydist.train.tasks.segmentation import Segmentation

class Flat(nn.Sequential):
    def __init__(self, channels, classes, width):
        super().__init__(nn.Conv3d(channels, width, 3, padding=1), nn.ReLU(),
                         nn.Conv3d(width, classes, 1))

class FlatSegmentation(Segmentation):
    network_type = Flat

    def arguments(self, channels, classes):
        return {"channels": channels, "classes": classes, "width": self.config.width}
"""

FORMATS = """
import numpy
from pydist.data.formats import StoredFile

class NumpyFolder(StoredFile):
    "A folder with a .npy file for each array."

    def dataset(self, name):
        return numpy.load(self.path / f"{name}.npy", mmap_mode="r")
"""

ENTRY_POINTS = """
[pydist.transports]
counting = my_transports:Counting
broken = my_transports:Missing
nccl = my_transports:Counting

[pydist.models]
flat = my_tables:FlatConfig
adrift = my_tables:AdriftConfig
lost = my_missing:Config

[pydist.optimizers]
rmsprop = my_tables:RmspropConfig
signed = my_tables:SignedConfig
normed = my_tables:NormedConfig

[pydist.formats]
npy = my_formats:NumpyFolder
torn = my_torn:Format
"""

COMMANDS = """
import sys
from pydist.cli.main import main
for line in open("commands"):
    if code := main(line.split()):
        sys.exit(code)
"""
"""A program that runs several commands on the ranks of one job."""

CONFIG = """
[model]
name = "flat"
width = 3
[data]
path = "data"
[optimizer]
name = "rmsprop"
lr = 0.01
alpha = 0.9
[mesh]
spatial = [2, 1, 1]
[train]
epochs = 2
batch = 1
[output]
plot = false
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with an installed package; some of its entry points can't be imported."""
    root = tmp_path_factory.mktemp("package")
    (root / "my_transports.py").write_text(TRANSPORT)
    (root / "my_tables.py").write_text(TABLES)
    (root / "my_networks.py").write_text(NETWORKS)
    (root / "my_optimizers.py").write_text(OPTIMIZERS)
    (root / "my_formats.py").write_text(FORMATS)
    (root / "my_torn.py").write_text("class Format(:\n")
    about = root / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return root


def run(package: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a pydist command with the package installed."""
    variables = {"OMP_NUM_THREADS": "1", "PYDIST_TUNE": "0"}
    command = "-m", "pydist", *arguments
    return run_python(*command, folder=folder, path=[package], seconds=240, **variables)


def test_a_transport_of_another_package_trains(package, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run(package, tmp_path, "run", "-n", "2", "script.py")
    assert ended.returncode == 0, ended.stderr
    assert "depth 2, rank 0 of 2, counting" in ended.stdout


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_runs_on_a_transport_of_another_package(check: Check, package, monkeypatch):
    monkeypatch.syspath_prepend(package)
    transport = importlib.import_module("my_transports").Counting
    run_local(lambda world: check(transport.over(world, 0)), 2)


def make_numbers(root: Path) -> Manifest:
    """Makes a data set of two training samples and one for validation, in the package's format."""
    generator, files = np.random.default_rng(0), []
    for i, split in enumerate(["train", "train", "val"]):
        folder = root / f"{i}"
        folder.mkdir(parents=True)
        np.save(folder / "ct.npy", generator.normal(size=(1, 8, 8, 8)).astype("float32"))
        np.save(folder / "classes.npy", generator.integers(0, 3, (8, 8, 8)).astype("uint8"))
        files.append(DataFile(f"{i}", split, 0, "", ((0, 0, 0),)))
    manifest = Manifest(
        (1, 8, 8, 8), "CDHW", "float32", tuple(files), dataset="ct", label="classes",
        class_names=("nothing", "one", "two"), file_format="npy",
    )  # fmt: skip
    manifest.save(root)
    return manifest


@pytest.fixture(scope="module")
def trained(package, tmp_path_factory) -> tuple[Path, str]:
    """Runs commands in the processes of one job; returns their folder, and what they printed.

    They train on CT volumes and predict one, then train from the package's format and from HDF5.
    """
    folder = tmp_path_factory.mktemp("trained")
    generate_ct(folder / "data", CTOptions(count=4, shape=(8, 8, 8), format="both"))
    scan = next(folder.rglob("imagesTr/*.nii.gz"))
    manifest, as_hdf5 = make_numbers(folder / "numbers"), folder / "same"
    as_hdf5.mkdir()
    files = []
    for file in manifest.files:
        with h5py.File(as_hdf5 / f"{file.path}.hdf5", "w") as copy:
            for name in ("ct", "classes"):
                copy[name] = np.load(folder / "numbers" / file.path / f"{name}.npy")
        files.append(dataclasses.replace(file, path=f"{file.path}.hdf5"))
    dataclasses.replace(manifest, files=tuple(files), file_format="hdf5").save(as_hdf5)
    train = "train flat.toml --data.path {0} --output.folder of-{0}"
    commands = [train.format("data"), f"predict of-data {scan} -o labels.nii.gz"]
    commands += [train.format("numbers"), train.format("same")]
    commands += [
        f"train signed.toml --data.path data --optimizer.name {name} --optimizer.sharded {sharded} "
        f"--output.folder {name}-{sharded}"
        for name in ("signed", "normed") for sharded in ("always", "never")
    ]  # fmt: skip
    (folder / "commands").write_text("\n".join(commands))
    (folder / "commands.py").write_text(COMMANDS)
    (folder / "flat.toml").write_text(CONFIG)
    (folder / "signed.toml").write_text(CONFIG.replace("alpha = 0.9\n", ""))
    ended = run(package, folder, "run", "-n", "2", "commands.py")
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stdout


def test_a_network_and_an_optimizer_of_another_package_train_and_predict(package, trained):
    folder, shown = trained
    assert "name=flat" in shown
    assert "name=rmsprop" in shown
    text = (folder / "of-data" / "config.toml").read_text()
    assert "alpha = 0.9" in text
    assert "width = 3" in text
    last = (folder / "of-data" / "log.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["status"] == "done"
    assert "next       pydist predict of-data case.nii.gz" in shown
    assert (folder / "labels.nii.gz").exists()
    ended = run(package, folder, "export", "of-data", "weights.safetensors")
    assert "my_networks.Flat(channels=1, classes=3, width=3)" in ended.stdout, ended.stderr


@pytest.mark.parametrize("name", ["signed", "normed"])
def test_optimizers_of_another_package_step_parts_as_they_step_all(trained, name):
    parts, whole = (
        list(log.losses(trained[0] / f"{name}-{sharded}" / "log.jsonl").values())
        for sharded in ("always", "never")
    )
    assert len(parts) == 6
    assert len(set(parts)) == 6
    assert parts == pytest.approx(whole, rel=1e-5)


def test_a_file_format_of_another_package_is_trained_from_as_hdf5_is(trained):
    of_numpy, of_hdf5 = (
        list(log.losses(trained[0] / folder / "log.jsonl").values())
        for folder in ("of-numbers", "of-same")
    )
    assert len(of_numpy) == 4
    assert of_numpy == of_hdf5


@pytest.mark.parametrize(
    ("file_format", "code", "said"),
    [
        ("npy", 65, r"numbers/1: FileNotFoundError: .*ct\.npy"),
        ("zip", 2, "format 'zip' is none of hdf5, zarr, numpy, tfrecord, npy, torn"),
        ("torn", 2, r"format 'torn' \(my_torn:Format\): invalid syntax"),
    ],
)
def test_damage_in_a_file_format_of_another_package_is_one_line(
    package, tmp_path, file_format, code, said
):
    manifest = make_numbers(tmp_path / "numbers")
    dataclasses.replace(manifest, file_format=file_format).save(tmp_path / "numbers")
    (tmp_path / "numbers" / "1" / "ct.npy").unlink()
    (tmp_path / "flat.toml").write_text(CONFIG)
    path = ["--data.path", "numbers", "--mesh.spatial", "1", "1", "1"]
    ended = run(package, tmp_path, "train", "flat.toml", *path)
    assert ended.returncode == code
    assert re.search(said, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--train.loss mse", "possible with model.name = 'flat' are auto, dice_ce, cross_entropy"),
        ("--model.name lost", "model 'lost' (my_missing:Config): No module named 'my_missing'"),
        ("--model.name none", "possible are cosmoflow, unet3d, factory, adrift, flat, lost"),
        (
            "--model.name adrift --mesh.spatial 1 1 1",
            "model 'adrift' (my_networks:Nowhere): module",
        ),
        (
            "--optimizer.name=none",
            "--optimizer.name none: possible are adam, sgd, lars, lamb, normed, rmsprop, signed",
        ),
        (
            "--optimizer.name normed --train.gradients dgc",
            'optimizer.name = "normed": its norms need whole gradients',
        ),
        ("--optimizer.beta 1", "Unrecognized options: --optimizer.beta, 1"),
        ("--model.width 0", "model.width = 0: input should be greater than or equal to 1"),
    ],
)
def test_what_does_not_fit_a_network_of_another_package_is_named(package, tmp_path, options, said):
    (tmp_path / "flat.toml").write_text(CONFIG)
    ended = run(package, tmp_path, "train", "flat.toml", *options.split())
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_names_of_packages_come_behind_and_do_not_replace(package, monkeypatch):
    monkeypatch.syspath_prepend(package)
    registry = Registry("transport", {"nccl": "pydist.registry:TRANSPORTS"})
    assert registry.names == ("nccl", "broken", "counting")
    assert registry.get("nccl") is TRANSPORTS
    assert registry.get("counting").name == "counting"
    with pytest.raises(UsageError, match=r"'broken' \(my_transports:Missing\): .*Missing"):
        registry.get("broken")
    with pytest.raises(UsageError, match="'ncl' is none of nccl, broken, counting"):
        registry.get("ncl")


def test_own_transports_are_what_they_are_called():
    for name in TRANSPORTS.names:
        if name != "cuda-mpi":  # its module needs an MPI
            assert TRANSPORTS.get(name).name == name
    assert transport_names() == (*runtime._JOINS, *TRANSPORTS.names)
    assert tuple(runtime._JOINS) == JOINS
