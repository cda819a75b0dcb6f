"""Tests of training any network from a configuration: its factory, its task, and the way back."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pydist import Mesh, distribute_tensor, run_local
from pydist.check.factory import load_factory
from pydist.cli.main import main
from pydist.data import Manifest, ShardDataset, UniverseOptions, generate_universes
from pydist.data.loader import Batch
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import DataError, DoesNotFit, UsageError
from pydist.inference import Predictor
from pydist.inference.export import export_weights
from pydist.train import config_io
from pydist.train.config import Config
from pydist.train.losses import SegmentationLoss
from pydist.train.metadata import load_trained
from pydist.train.tasks import task_of
from pydist.train.tasks.factory import arguments_of, outputs_of
from support.training.runs import alone, change, events, in_stages, job, last_state

EXAMPLES = Path(__file__).parents[2] / "examples"

NETS = """
import torch
from torch import nn
from pydist.train.tasks.factory import AnyRegression

class Deep(nn.Module):
    def __init__(self, in_channels, classes, width):
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(in_channels, width, 3, padding=1), nn.ReLU())
        self.down = nn.Sequential(nn.Conv3d(width, width, 3, 2, 1), nn.ReLU())
        self.up = nn.ConvTranspose3d(width, width, 2, 2)
        self.fine, self.coarse = nn.Conv3d(width, classes, 1), nn.Conv3d(width, classes, 1)

    def forward(self, x):
        x = self.first(x)
        y = self.down(x)
        return [self.fine(x + self.up(y)), self.coarse(y)]

def deep(in_channels, classes, width=4):
    return Deep(in_channels, classes, width)

def values(in_channels, outputs):
    return nn.Sequential(nn.Conv3d(in_channels, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1),
                         nn.Flatten(), nn.Linear(4, outputs))

class Absolute(AnyRegression):
    def criterion(self, batches):
        return lambda output, targets: (output - targets).abs().mean()

class Uncalled(AnyRegression):
    def loss(self, output, targets):
        return (output - targets).abs().mean()

class Plain: ...

class Partial:
    def __init__(self, model, train): ...

def too_large(in_channels, outputs):
    return nn.Sequential(
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(in_channels, 1 << 44),
        nn.Linear(1 << 44, outputs),
    )

class Failing(nn.Module):
    def __init__(self):
        raise RuntimeError("no such luck")

number = 3
"""


@pytest.fixture(scope="module")
def volumes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("volumes")
    generate_ct(folder, CTOptions(count=4, shape=(16, 16, 16), validation=0.5))
    return folder


@pytest.fixture
def nets(tmp_path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


def run_of(text: str, volumes: Path, folder: Path, **tables: Any) -> Config:
    """Returns a short run of a configuration, on volumes and without a figure."""
    config = config_io.loads(text, "test.toml")
    config = change(config, data={"path": volumes}, output={"folder": folder, "plot": False})
    return change(config, train={"epochs": 1, "batch": 2, "steps": 1}, **tables)


def curve(config: Config) -> list[float]:
    return [event["loss"] for event in events(config, "step", "validation")]


SMALL = {
    "monai_unet": {"channels": [4, 8, 16], "strides": [2, 2], "num_res_units": 1},
    "monai_dynunet": {
        "filters": [4, 8, 8], "kernel_size": [3, 3, 3], "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2], "deep_supr_num": 1,
    },
    "monai_segresnet": {
        "init_filters": 4, "blocks_down": [1, 1], "blocks_up": [1],
        "norm": ["GROUP", {"num_groups": 2}],
    },
    "nnunet": {"features": [4, 8, 16], "blocks": [1, 1, 1]},
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_the_examples_train_split_as_on_one_rank(volumes, tmp_path, name, monkeypatch):
    pytest.importorskip("dynamic_network_architectures" if name == "nnunet" else "monai")
    monkeypatch.chdir(EXAMPLES.parent)
    text = (EXAMPLES / f"{name}.toml").read_text()
    split = run_of(text, volumes, tmp_path / "split")
    split = replace(split, model=replace(split.model, args={**split.model.args, **SMALL[name]}))
    whole = change(split, output={"folder": tmp_path / "whole"}, mesh={"spatial": (1, 1, 1)})
    run_local(job, 2, split, 1, (2, 1, 1))
    alone(whole)
    assert curve(split) == pytest.approx(curve(whole), rel=1e-4)
    assert len(curve(split)) == 2


def test_deep_supervision_weighs_the_outputs(volumes, tmp_path, nets):
    text = f'model = {{factory = "{nets}:deep", args = {{width = 6}}, multiple = 2}}'
    config = run_of(text, volumes, tmp_path / "run")
    task = task_of(config)
    task.check(ShardDataset(volumes))
    torch.manual_seed(0)
    model = task.network(Manifest.load(volumes))
    assert model.first[0].out_channels == 6
    x, labels = torch.randn(2, 1, 16, 16, 16), torch.randint(3, (2, 16, 16, 16))
    fine, coarse = model(x)
    of_one = SegmentationLoss("cross_entropy")
    expected = (of_one(fine, labels) + 0.5 * of_one(coarse, labels[:, ::2, ::2, ::2])) / 1.5
    inputs = distribute_tensor(x, run_local(Mesh, 1)[0])
    batch = Batch(inputs, labels, torch.ones(2), (0, 1), 2, 0, 2, 1.0, 0, 0, 2)
    found = task.criterion([batch])((fine, coarse), labels)
    torch.testing.assert_close(found, expected)
    run_local(job, 2, config, 1, (2, 1, 1))
    staged = change(config, output={"folder": tmp_path / "stages"}, mesh={"stages": 2})
    in_stages(staged)
    assert curve(staged) == pytest.approx(curve(config), rel=1e-4)


def values_data(folder: Path, classes: int = 0) -> Path:
    """Makes a data set with a value of each sample, or with its class: whether it is bright."""
    import h5py

    from pydist.data.index import index_folder
    from pydist.data.options import IndexOptions

    folder.mkdir()
    numbers = np.random.default_rng(0)
    for i in range(6):
        bright = i % 2
        sample = numbers.normal(2.0 * bright, 0.1, (1, 8, 8, 8)).astype("float32")
        with h5py.File(folder / f"{i}.hdf5", "w") as file:
            file["full"] = sample
            file["unitPar"] = np.array([bright if classes else sample.mean()], "float32")
            file["namePar"] = np.array([b"value"])
    manifest = index_folder(folder, IndexOptions(validation=1 / 3))
    names = ("dark", "bright", "white")[:classes]
    replace(manifest, class_names=names).save(folder)
    return folder


@pytest.mark.parametrize(
    ("factory", "task", "classes", "figure"),
    [
        ("values", "regression", 0, "mae"),
        ("values", "classification", 3, "accuracy"),
        ("values", "{nets}:Absolute", 0, "mae"),
    ],
    ids=["regression", "classification", "own task"],
)
def test_tasks(tmp_path, nets, factory, task, classes, figure):
    data = values_data(tmp_path / "data", classes)
    text = (
        f'model = {{factory = "{nets}:{factory}", task = "{task.format(nets=nets)}"}}\n'
        "optimizer = {lr = 0.01}"
    )
    config = change(run_of(text, data, tmp_path / "run"), train={"epochs": 20, "steps": None})
    run_local(job, 2, config, 1, (2, 1, 1))
    *_, last = events(config, "validation")
    whole = change(config, output={"folder": tmp_path / "whole"}, train={"accumulate": 2})
    alone(whole)
    assert curve(config) == pytest.approx(curve(whole), rel=1e-3, abs=1e-6)
    assert last[figure] == 1 if classes else last[figure] < 0.5
    assert last_state(config)["model"]["4.bias"].shape == (classes or 1,)
    assert len((tmp_path / "run/predictions.csv").read_text().splitlines()) == 3


LISTED = """
class Listed(nn.Sequential):
    def forward(self, x):
        return [super().forward(x)]

def listed(in_channels, outputs):
    return Listed(*values(in_channels, outputs))
"""


def test_values_in_a_list_are_validated_as_they_are_trained(tmp_path, nets):
    nets.write_text(NETS + LISTED)
    data = values_data(tmp_path / "data")
    runs = [
        run_of(f'model = {{factory = "{nets}:{name}", task = "regression"}}', data, tmp_path / name)
        for name in ("values", "listed")
    ]
    for run in runs:
        alone(run)
    assert curve(runs[1]) == curve(runs[0])
    assert len(events(runs[1], "validation")) == 1


def test_a_checkpoint_runs_its_factory_only_if_it_is_named(
    volumes, tmp_path, nets, capsys, monkeypatch
):
    """A checkpoint may be a stranger's, and a factory is any code."""
    config = run_of(f'model = {{factory = "{nets}:deep", multiple = 2}}', volumes, tmp_path / "run")
    alone(config)
    about, _ = load_trained(tmp_path / "run")
    with pytest.raises(UsageError, match=r"made by .*nets\.py:deep, code that the check"):
        about.task()
    mesh = run_local(Mesh, 1)[0]
    with pytest.raises(UsageError, match="if you trust it"):
        Predictor(tmp_path / "run", mesh)
    predictor = Predictor(tmp_path / "run", mesh, factory=f"{nets}:deep")
    labels = predictor.predict(np.zeros((1, 16, 16, 16), "int16"))
    assert labels.shape == (16, 16, 16)
    with pytest.raises(UsageError, match="if you trust it"):
        export_weights(tmp_path / "run", tmp_path / "w.safetensors")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "w.safetensors"),
                 "--factory", f"{nets}:deep"]) == 0  # fmt: skip
    assert f"load_factory('{nets}:deep')(in_channels=1, classes=3)" in capsys.readouterr().out
    moved = tmp_path / "elsewhere" / "nets.py"
    moved.parent.mkdir()
    nets.rename(moved)
    monkeypatch.chdir(moved.parent)
    monkeypatch.syspath_prepend(moved.parent)
    for given in ("nets.py:deep", f"{moved}:deep", "nets:deep"):
        assert about.task(given).expression(about.manifest).endswith("(in_channels=1, classes=3)")
    for given in ({"factory": "other.py:deep"}, {"factory": "nets.py:values"},
                  {"factory": "nets.py:deep", "task": "nets.py:Absolute"}):  # fmt: skip
        with pytest.raises(UsageError, match="if you trust it"):
            about.task(**given)
    nets = moved
    own = change(config, model={"name": "factory", "factory": f"{nets}:values",
                                "task": f"{nets}:Absolute"})  # fmt: skip
    other = replace(about, config=own)
    for given in ({}, {"factory": f"{nets}:values"}, {"task": f"{nets}:Absolute"}):
        with pytest.raises(UsageError, match=r"--factory .*values --task .*Absolute"):
            other.task(**given)
    assert other.task(f"{nets}:values", f"{nets}:Absolute").described


def test_options_of_a_factory_are_refused_for_a_network_of_pydist(volumes, tmp_path):
    config = run_of(
        'model = {name = "unet3d", features = 2, levels = 1}', volumes, tmp_path / "run"
    )
    alone(config)
    for option, given in (("--factory", "nets.py:make"), ("--task", "segmentation")):
        with pytest.raises(UsageError, match=f"{option} {given}: the checkpoint has pydist's own"):
            load_trained(tmp_path / "run")[0].task(**{option.strip("-"): given})


@pytest.mark.parametrize(
    "train",
    [
        {"class_weights": (1.0, 2.0, 3.0)},
        {"class_weights": (1.0, 2.0, 3.0), "ignore_label": 0, "loss": "dice_ce"},
    ],
    ids=["weights", "and an ignored label"],
)
def test_deep_supervision_with_weighted_voxels(volumes, tmp_path, nets, train):
    text = f'model = {{factory = "{nets}:deep", multiple = 2}}'
    whole = change(run_of(text, volumes, tmp_path / "whole"), train=train)
    alone(whole)
    accumulated = change(whole, output={"folder": tmp_path / "passes"}, train={"accumulate": 2})
    alone(accumulated)
    staged = change(whole, output={"folder": tmp_path / "stages"},
                    mesh={"stages": 2, "data": 2, "micro_batches": 1})  # fmt: skip
    in_stages(staged)
    for other in (accumulated, staged):
        assert curve(other) == pytest.approx(curve(whole), rel=1e-5)


@pytest.mark.parametrize(
    ("factory", "task", "complaint"),
    [
        ("few", "segmentation", "returns [2, 2, 16, 16, 16], and the task segmentation"),
        ("named", "segmentation", "returns dict, and the task segmentation of this data set"),
        ("flat", "regression", "returns [2, 5], and the task regression"),
        ("deep", "regression", "the task regression of this data set expects [N, 1]"),
        ("flat", "classification", "returns [2, 5], and the task classification"),
    ],
)
def test_outputs_that_a_task_can_not_use_are_one_line(
    volumes, tmp_path, nets, factory, task, complaint
):
    nets.write_text(nets.read_text() + OTHERS)
    classes = 3 if task == "classification" else 0
    data = volumes if task == "segmentation" else values_data(tmp_path / "data", classes)
    text = f'model = {{factory = "{nets}:{factory}", task = "{task}"}}'
    with pytest.raises(UsageError) as caught:
        alone(run_of(text, data, tmp_path / "run"))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


OTHERS = """
def few(in_channels):
    return nn.Conv3d(in_channels, 2, 1)

class Named(nn.Conv3d):
    def forward(self, x):
        return {"scores": super().forward(x)}

def named(in_channels):
    return Named(in_channels, 3, 1)

def flat(in_channels):
    return nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(in_channels, 5))
"""


@pytest.mark.parametrize("bad", [0, 3])
def test_a_class_out_of_range_is_bad_data(tmp_path, nets, bad):
    """In any of a step's passes."""
    data = values_data(tmp_path / "data", 3)
    replace(Manifest.load(data), class_names=("a", "b")).save(data)
    import h5py

    with h5py.File(data / f"{bad}.hdf5", "r+") as file:
        file["unitPar"][...] = 7
    text = f'model = {{factory = "{nets}:values", task = "classification"}}'
    train = {"batch": 4, "accumulate": 4}
    with pytest.raises(DataError, match="a sample's class is 7; there are 2"):
        alone(change(run_of(text, data, tmp_path / "run"), train=train))


def test_a_file_with_dataclasses_is_imported_once(tmp_path, capsys):
    path = tmp_path / "with_dataclass.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from torch import nn\nprint('imported')\n@dataclass\nclass Options:\n    width: int = 3\n"
        "def make(in_channels): return nn.Conv3d(in_channels, Options().width, 1)\n"
    )
    for _ in range(2):
        assert load_factory(f"{path}:make")(in_channels=1).out_channels == 3
    assert capsys.readouterr().out.count("imported") == 1
    path.write_text("broken = 1 / 0\n")
    for _ in range(2):
        with pytest.raises(UsageError, match="ZeroDivisionError"):
            load_factory(f"{path}:make")


def test_several_outputs_in_one_tensor_are_several():
    """As MONAI's DynUNet returns them with deep supervision."""
    stacked = torch.randn(2, 3, 4, 5, 5, 5)
    assert [x.shape for x in outputs_of(stacked)] == [(2, 4, 5, 5, 5)] * 3
    assert outputs_of({"scores": stacked}) == []


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ('factory = "nets"', "model.factory = 'nets': expected FILE.py:NAME or MODULE:NAME"),
        ('name = "factory"', "model.factory = {'name': 'factory'}: field required"),
        ('factory = "a:b", task = "denoising"', "model.task = 'denoising': possible are segm"),
        ('factory = "a:b", width = 3', "model.width is not a setting"),
        ('factory = "{nets}:nothing"', "nets.py has no 'nothing'; it has: "),
        ('factory = "nowhere.py:make"', "nowhere.py: no such file"),
        ('factory = "{nets}:number"', "number is no function: 3"),
        ('factory = "{nets}:deep", args = {{widht = 3}}', "(in_channels=1, classes=3, widht=3)"),
        ('factory = "{nets}:Failing"', "no such luck"),
        ('factory = "{nets}:deep", task = "regression"', 'choose model.task = "segmentation"'),
        ('factory = "{nets}:deep", task = "classification"', "classification needs one value for"),
        ('factory = "{nets}:deep", task = "{nets}:Nowhere"', "has no 'Nowhere'"),
        ('factory = "{nets}:deep", multiple = 5', "the network needs multiples of 5"),
        ('factory = "{nets}:values", task = "{nets}:Uncalled"', "Uncalled.loss: nothing calls it"),
        (
            'factory = "{nets}:values", task = "{nets}:Plain"',
            "made with the tables model and",
        ),
        ('factory = "{nets}:values", task = "{nets}:Partial"', "needs multiple, check, network"),
    ],
)
def test_mistakes_are_one_line(volumes, tmp_path, nets, model, complaint):
    text = f"model = {{{model.format(nets=nets)}}}"
    with pytest.raises(UsageError) as caught:
        alone(run_of(text, volumes, tmp_path / "run"))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_network_without_memory_is_told_apart(tmp_path, nets):
    data = values_data(tmp_path / "data", 3)
    text = f'model = {{factory = "{nets}:too_large", task = "regression"}}'
    with pytest.raises(DoesNotFit, match=r"no memory for the network that .*nets\.py:too_large"):
        alone(run_of(text, data, tmp_path / "run"))


def test_the_loss_is_one_of_the_task():
    text = 'model = {{factory = "a:b", task = "{}"}}\ntrain = {{loss = "{}"}}'
    assert config_io.loads(text.format("segmentation", "dice"), "t").train.loss == "dice"
    assert config_io.loads(text.format("mine:Task", "whatever"), "t").train.loss == "whatever"
    for task, loss in (("regression", "dice"), ("classification", "mse")):
        with pytest.raises(UsageError, match=f"with model.task = '{task}' are auto"):
            config_io.loads(text.format(task, loss), "t")


def test_arguments_of_the_data_set_are_filled_in():
    def config(**arguments: Any) -> Any:
        made = config_io.loads('model = {factory = "torch.nn:Conv3d"}', "t").model
        return replace(made, args=arguments)

    assert arguments_of(config(kernel_size=3), 2, 5) == {
        "in_channels": 2, "out_channels": 5, "kernel_size": 3
    }  # fmt: skip
    assert arguments_of(config(kernel_size=1, out_channels=7, in_channels=1), 2, 5) == {
        "in_channels": 1, "out_channels": 7, "kernel_size": 1
    }  # fmt: skip


def test_a_configuration_of_a_factory_is_written_and_read_again(tmp_path):
    text = (
        '[model]\nfactory = "monai.networks.nets:UNet"\n[model.args]\nchannels = [4, 8]\n'
        'strides = [2]\nnorm = ["group", {num_groups = 2}]\ndropout = 0.5\nbias = false\n'
    )
    config = config_io.loads(text, "t")
    assert config_io.loads(config_io.dumps(config), "t") == config
    spaced = replace(config, model=replace(config.model, args={"a b": {"c.d": [True, 1.5]}}))
    assert config_io.loads(config_io.dumps(spaced), "t") == spaced
    assert config.model.args["norm"] == ["group", {"num_groups": 2}]


def test_empty_tables_and_infinite_numbers_are_arguments():
    given = "act = {}\nnorm = {a = {}, b = [{}, inf]}\nlow = -inf\nodd = nan\n"
    config = config_io.loads(f'[model]\nfactory = "n:m"\n[model.args]\n{given}', "t")
    args = config.model.args
    assert (args["act"], args["norm"], args["low"]) == ({}, {"a": {}, "b": [{}, inf]}, -inf)
    again = config_io.loads(config_io.dumps(config), "t").model.args
    assert str(again) == str(args)  # NaN differs from itself
    again = config_io.from_tables(config_io.to_dict(config), "t").model.args
    assert str(again) == str(args)


@pytest.mark.parametrize("value", ["2020-01-01", "[10:00:00]", "{a = 2020-01-01T10:00:00}"])
def test_dates_are_no_arguments(value):
    with pytest.raises(UsageError, match=r"t: model.args.when.* = .*: texts, numbers, booleans, "):
        config_io.loads(f'[model]\nfactory = "n:m"\n[model.args]\nwhen = {value}\n', "t")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "the task's criterion returned NoneType: a tensor with one number is needed"),
        ("(output - targets).square().mean(1)", r"returned a tensor of \(2,\): a tensor with one"),
        ("(output - targets).detach().mean()", "returned a loss without a gradient: it is deta"),
    ],
)
def test_a_criterion_that_returns_no_loss_is_named(tmp_path, nets, returned, message):
    data = tmp_path / "universes"
    generate_universes(data, UniverseOptions(count=4, width=8, box_width=8))
    nets.write_text(
        f"{NETS}\nclass Wrong(AnyRegression):\n    def criterion(self, batches):\n"
        f"        return lambda output, targets: {returned}\n"
    )
    text = f'[model]\nfactory = "{nets}:values"\ntask = "{nets}:Wrong"\n'
    with pytest.raises(UsageError, match=message):
        alone(run_of(text, data, tmp_path / "run"))
