"""Tests of training in stages: a run equals that of one rank, whatever its stages."""

from __future__ import annotations

import csv
import functools
import json
import math
import threading
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import h5py
import pytest
import torch

from pydist.cli.options import override
from pydist.comm import run_local
from pydist.data import UniverseOptions, generate_universes
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import DataError, PydistError, UsageError
from pydist.stages import Pipeline
from pydist.stages.schedule import SCHEDULES
from pydist.train import config_io, datasets, log
from pydist.train.config import (
    Config,
    DataConfig,
    MeshConfig,
    OutputConfig,
    SgdConfig,
    StageConfig,
    TrainConfig,
    UNet3dConfig,
)
from pydist.train.folder import TUNING_FILE
from pydist.train.metadata import load_trained
from pydist.train.ranks import check_ranks, check_settings
from pydist.train.run import Result
from support.training.runs import alone, change, events, in_stages, job, last_state, universe_run

DEEP = StageConfig(spatial=(2, 1, 1))
UNEVEN = (DEEP, StageConfig())
"""A stage of two ranks, and one of one."""
SLICED = (StageConfig(), StageConfig(channel=2))


@contextmanager
def in_double() -> Iterator[None]:
    """Lets networks and data have double precision."""
    dataset = functools.partial(datasets.ShardDataset, dtype=torch.double)
    torch.set_default_dtype(torch.double)
    try:
        with patch.object(datasets, "ShardDataset", dataset):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def double() -> Iterator[None]:
    with in_double():
        yield


def make_cosmoflow_run(universes: Path, folder: Path) -> Config:
    """Returns a run of CosmoFlow, with dropout and clipping: an epoch of two steps."""
    train = {"epochs": 1, "batch": 4, "clip_norm": 0.05}
    return change(universe_run(universes, folder), optimizer=vars(SgdConfig(lr=1e-2)), train=train)


@pytest.fixture
def cosmoflow_run(universes, tmp_path) -> Config:
    return make_cosmoflow_run(universes, tmp_path / "run")


@pytest.fixture(scope="module")
def whole_cosmoflow(universes, tmp_path_factory) -> tuple[Config, Result]:
    """Returns that run after it has trained on one rank in double precision, and its result."""
    config = make_cosmoflow_run(universes, tmp_path_factory.mktemp("whole") / "run")
    with in_double():
        return config, alone(config)


@pytest.fixture
def volume_run(volumes, tmp_path) -> Config:
    """Returns a run of the U-Net, which has batch norm: two epochs of two steps."""
    return Config(
        model=UNet3dConfig(features=4, levels=2),
        data=DataConfig(path=volumes, normalize="ct"),
        optimizer=SgdConfig(lr=1e-2),
        train=TrainConfig(epochs=2, batch=2, loss="dice_ce"),
        output=OutputConfig(folder=tmp_path / "run", plot=False),
    )


def curve(config) -> list[float]:
    return [event["loss"] for event in events(config, "step")]


def assert_same_runs(config, reference, bound: float = 1e-12) -> None:
    """Asserts that two runs have the same losses, parameters, buffers and momenta."""
    assert len(curve(config)) == len(curve(reference)) > 0
    assert curve(config) == pytest.approx(curve(reference), rel=bound, abs=bound)
    found, expected = last_state(config), last_state(reference)
    states = [found["model"], expected["model"]]
    states += [
        {f"{i}.{name}": x for i, entries in each["optimizer"]["state"].items()
         for name, x in entries.items() if isinstance(x, torch.Tensor)}
        for each in (found, expected)
    ]  # fmt: skip
    for mine, theirs in (states[:2], states[2:]):
        assert mine.keys() == theirs.keys()
        for name, x in theirs.items():
            error = float((mine[name].double() - x.double()).abs().max())
            assert error <= bound * max(1.0, float(x.abs().max())), name


def elsewhere(config, folder) -> Config:
    """Returns the run in another folder, without stages."""
    return change(config, output={"folder": folder}, mesh={"stages": None, "data": None})


@pytest.mark.parametrize(
    "mesh",
    [
        {"stages": 2, "data": 2, "micro_batches": 2},
        {"stages": UNEVEN, "micro_batches": 3, "schedule": "gpipe"},
        {"stages": 2, "micro_batches": 2, "recompute": True, "cuts": ("head",)},
        {"stages": 2, "micro_batches": 2, "order": (0, 1, 1, 0), "data": 2},
        {"stages": 2, "micro_batches": 3, "schedule": "gems"},
        {"stages": SLICED, "micro_batches": 2, "sharded_weights": True},
    ],
    ids=["groups", "uneven", "recompute", "forth and back", "gems", "weights in slices"],
)
def test_cosmoflow_in_stages_trains_as_on_one_rank(double, cosmoflow_run, whole_cosmoflow, mesh):
    """The second batch is short: two samples, which are fewer than some micro-batches need."""
    whole, expected = whole_cosmoflow
    staged = change(cosmoflow_run, mesh=mesh, optimizer={"sharded": "always"})
    results = in_stages(staged)
    assert_same_runs(staged, whole)
    for result in results:
        assert result.steps == 2
        assert result.loss == results[0].loss
        torch.testing.assert_close(result.validation.predicted, expected.validation.predicted)
        assert torch.equal(result.validation.predicted, results[0].validation.predicted)
    assert [event["samples"] for event in events(staged, "validation")] == [3]


@pytest.mark.parametrize(
    ("mesh", "weights"),
    [
        ({"stages": 2}, {}),
        ({"stages": 2, "data": 2}, {"class_weights": (0.2, 1.0, 3.0), "ignore_label": 2}),
        ({"stages": UNEVEN}, {"class_weights": (0.2, 1.0, 3.0), "loss": "cross_entropy"}),
    ],
    ids=["stages", "weighted groups", "weighted"],
)
def test_the_unet_in_stages_trains_as_on_one_rank(double, volume_run, tmp_path, mesh, weights):
    volume_run = change(volume_run, train=weights)
    whole = elsewhere(volume_run, tmp_path / "whole")
    expected = alone(whole)
    staged = change(volume_run, mesh=mesh)
    results = in_stages(staged)
    assert_same_runs(staged, whole)
    for result in results:
        assert result.validation.loss == pytest.approx(expected.validation.loss, rel=1e-12)
        torch.testing.assert_close(result.validation.dice, expected.validation.dice, equal_nan=True)


def test_micro_batches_see_their_own_statistics_on_any_stages(double, volume_run, tmp_path):
    """Batch norm sees the micro-batches in sequence, as one device would."""
    one = change(
        volume_run, mesh={"stages": 1, "micro_batches": 2}, output={"folder": tmp_path / "one"}
    )
    in_stages(one)
    staged = change(volume_run, mesh={"stages": UNEVEN, "micro_batches": 2})
    in_stages(staged)
    assert_same_runs(staged, one)


@pytest.mark.parametrize(
    ("name", "amp"), [("cosmoflow_run", "bf16"), ("volume_run", "bf16"), ("volume_run", "fp16")]
)
def test_mixed_precision_has_the_same_bits_in_stages(request, tmp_path, name, amp):
    """With a rank a stage, nothing is summed in another order; fp16 begins with overflows."""
    config = change(
        request.getfixturevalue(name), train={"amp": amp, "clip_norm": None},
        optimizer={"name": "adam"},
    )  # fmt: skip
    whole = elsewhere(config, tmp_path / "whole")
    alone(whole)
    staged = change(config, mesh={"stages": 2})
    in_stages(staged)
    assert curve(staged) == curve(whole)
    assert_same_runs(staged, whole, bound=1e-6)
    assert last_state(staged)["scaler"] == last_state(whole)["scaler"]
    precision = events(staged, "start")[0]["precision"]
    assert precision == f"{amp} (mixed)"


def test_a_run_goes_on_with_other_stages_and_without(double, volume_run, tmp_path):
    config = volume_run
    through = elsewhere(config, tmp_path / "through")
    alone(through)
    always = {"sharded": "always"}
    in_stages(change(config, train={"steps": 1}, mesh={"stages": UNEVEN}, optimizer=always))
    run_local(job, 2, change(config, train={"steps": 2}), 1, (2, 1, 1))
    sliced = {"stages": SLICED, "sharded_weights": True}
    in_stages(change(config, train={"steps": 3}, mesh=sliced, optimizer=always))
    alone(config)
    assert [event["step"] for event in events(config, "start")] == [0, 1, 2, 3]
    assert_same_runs(config, through)


def test_a_resumed_run_in_the_same_stages_keeps_every_bit(volume_run, tmp_path):
    config = change(
        volume_run, optimizer={"name": "adam"},
        mesh={"stages": 2, "cuts": ("up.0",), "micro_batches": 2},
    )  # fmt: skip
    through = change(config, output={"folder": tmp_path / "through"})
    in_stages(through)
    in_stages(change(config, train={"steps": 3}))
    in_stages(config)
    assert curve(config) == curve(through)
    assert_same_runs(config, through, bound=0.0)


def test_each_stage_keeps_its_choices_of_kernels(tuned, volume_run):
    mesh = {"stages": UNEVEN, "data": 2, "cuts": ("up.0",)}
    config = change(volume_run, mesh=mesh, train={"steps": 2})
    in_stages(change(config, train={"steps": 1}))
    first = json.loads((config.output.folder / TUNING_FILE).read_bytes())
    assert len(first) == 4  # two groups of two stages
    assert all(first)
    assert first[0].keys() != first[2].keys()
    in_stages(config)
    assert json.loads((config.output.folder / TUNING_FILE).read_bytes()) == first


def test_the_description_reaches_the_pipeline(monkeypatch, volume_run):
    made = []
    initial = Pipeline.__init__

    def noting(self, *args, **kwargs):
        initial(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Pipeline, "__init__", noting)
    cuts = {"stages": 2, "cuts": ("up.0",), "micro_batches": 2, "schedule": "gpipe"}
    in_stages(change(volume_run, mesh={**cuts, "recompute": True}, train={"steps": 1}))
    assert len(made) == 2
    for pipe in made:
        assert pipe.plan.starts[0].module.startswith("up.0")
        assert pipe._recomputes


def test_one_rank_writes_log_tables_and_picture(volume_run):
    pytest.importorskip("matplotlib")
    config = change(volume_run, mesh={"stages": UNEVEN}, output={"plot": True})
    heard = []
    results = in_stages(config, [heard.append])
    folder = config.output.folder
    with (folder / "dice.csv").open() as file:
        assert len(list(csv.reader(file))) == 4
    assert (folder / "result.png").stat().st_size > 10_000
    (start,) = events(config, "start")
    assert start["ranks"] == 3
    assert start["mesh"].startswith("3 ranks in 2 stages: ")
    assert [event["step"] for event in events(config, "step")] == [1, 2, 3, 4]
    assert [event["event"] for event in heard] == [
        event["event"] for event in log.read(folder / "log.jsonl")
    ]
    title, head, *rows = events(config, "notice")[0]["text"].splitlines()
    assert title.startswith("the stages")
    assert head.split() == "stage calls time memory receives begins with".split()
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert " call " in rows[1]
    metadata, weights = load_trained(folder)
    metadata.task().network(metadata.manifest).load_state_dict(weights)
    assert results[0].validation.samples == 3
    in_stages(config)
    assert events(config, "notice")[-1]["text"].startswith("nothing left to do: step 4 of 4")


def test_in_validation_no_stage_runs_far_ahead(tmp_path, monkeypatch):
    """While the last stage evaluates its first of eight batches, the first one computes three."""
    generate_ct(tmp_path / "data", CTOptions(count=9, shape=(8, 8, 8), validation=8 / 9))
    config = Config(
        model=UNet3dConfig(features=2, levels=1),
        data=DataConfig(path=tmp_path / "data", normalize="ct"),
        mesh=MeshConfig(stages=2),
        train=TrainConfig(epochs=1, batch=1),
        output=OutputConfig(folder=tmp_path / "run", plot=False),
    )
    done, three = [0, 0], threading.Event()
    evaluate = Pipeline.__call__

    def counted(self, *inputs):
        stage = self.stages.index
        if stage == 1 and done[1] == 0:
            assert three.wait(60)
        output = evaluate(self, *inputs)
        done[stage] += 1
        if stage == 1:
            assert done[0] - done[1] <= 3
        elif done[0] == 3:
            three.set()
        return output

    monkeypatch.setattr(Pipeline, "__call__", counted)
    result = in_stages(config)[0]
    assert done == [8, 8]
    assert result.validation.samples == 8


def test_an_error_on_one_rank_ends_all(volume_run):
    """Only the rank that writes hears events; the others wait for it then."""

    def fail(event):
        if event["event"] == "step" and event["step"] == 2:
            raise PydistError("a full pipe")

    with pytest.raises(PydistError, match="a full pipe"):
        in_stages(change(volume_run, mesh={"stages": UNEVEN}), [fail])
    assert [event["status"] for event in events(volume_run, "end")] == ["failed"]


def test_a_sample_with_nan_is_named(cosmoflow_run, tmp_path):
    folder = tmp_path / "damaged"
    options = UniverseOptions(count=2, width=32, box_width=32, validation=0.0, dtype="float32")
    manifest = generate_universes(folder, options)
    with h5py.File(folder / manifest.files[1].path, "r+") as file:
        file["full"][0, 1, 2, 3] = math.nan
    config = change(cosmoflow_run, data={"path": folder}, train={"batch": 2}, mesh={"stages": 2})
    with pytest.raises(DataError, match=r"nan at channel 0, voxel \(1, 2, 3\)"):
        in_stages(config)


@pytest.mark.parametrize(
    ("mesh", "train", "message"),
    [
        ({"data": 2}, {"batch": 5}, "the last batch of an epoch has 1 of 6 samples, fewer than"),
        ({"cuts": ("nowhere",)}, {}, "module 'nowhere' makes no call after the stage before"),
    ],
)
def test_stages_that_do_not_suit_the_data_or_the_network_are_refused(
    cosmoflow_run, mesh, train, message
):
    config = change(cosmoflow_run, mesh={"stages": 2, **mesh}, train=train)
    with pytest.raises(UsageError, match=message):
        in_stages(config)
    assert not events(config, "start")


def test_a_wrong_order_is_refused(cosmoflow_run):
    for given in ((0, 1, 2), (0, 0)):
        config = change(cosmoflow_run, mesh={"stages": 2, "order": given})
        with pytest.raises(UsageError, match=r"mesh\.order = .* each of 0 to 1 at least once"):
            check_settings(config)
        with pytest.raises(UsageError, match="each of 0 to 1 at least once"):
            in_stages(config)


def test_gems_on_other_meshes_is_refused(cosmoflow_run):
    for mesh in ({"stages": 2, "order": (0, 1, 1, 0)}, {"stages": UNEVEN}):
        config = change(cosmoflow_run, mesh={**mesh, "schedule": "gems"})
        with pytest.raises(UsageError, match=r"leave out mesh\.order"):
            check_settings(config)


def test_another_number_of_ranks_is_refused(cosmoflow_run):
    config = change(cosmoflow_run, mesh={"stages": UNEVEN, "data": 2})
    check_ranks(config, 6)
    groups = "for each of mesh.data = 2 sample groups"
    with pytest.raises(UsageError) as caught:
        check_ranks(config, 4)
    said = f"mesh.stages needs 2 + 1 ranks {groups}, and there are 4: possible are 6"
    assert str(caught.value) == said
    many = change(config, mesh={"data": None, "micro_batches": 2})
    check_ranks(many, 3)
    with pytest.raises(UsageError, match="possible are multiples of 3"):
        check_ranks(many, 4)
    with pytest.raises(UsageError, match=r"of train\.batch = 3 a sample group has 1 sample;"):
        check_ranks(change(many, train={"batch": 3}), 6)


def test_all_schedules_can_be_chosen():
    assert typing.get_args(typing.get_type_hints(MeshConfig)["schedule"]) == tuple(SCHEDULES)


def test_stages_can_be_given_on_the_command_line(cosmoflow_run):
    for config in (cosmoflow_run, change(cosmoflow_run, mesh={"stages": UNEVEN})):
        assert override(config, ["--mesh.stages", "3"], "test").mesh.stages == 3
        listed = override(config, ["--mesh.stages", "[{spatial = [2, 1, 1]}, {}]"], "test")
        assert listed.mesh.stages == UNEVEN
        assert override(config, ["--mesh.stages", "None"], "test").mesh.stages is None
        assert config_io.loads(config_io.dumps(config), "file") == config
