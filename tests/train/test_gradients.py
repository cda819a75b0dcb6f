"""Tests of training with forms of gradient reduction: results, bytes, resumption, refusals."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch

from pydist.comm import LocalTransport, run_local
from pydist.data.batch_sizes import BatchSizes
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.data.sampler import MeshSampler
from pydist.errors import CheckpointError, UsageError
from pydist.train import config_io
from pydist.train.config import (
    BatchScheduleConfig,
    Config,
    DataConfig,
    OutputConfig,
    SgdConfig,
    TrainConfig,
    UNet3dConfig,
)
from pydist.train.config.gradients import (
    DgcConfig,
    PostLocalConfig,
    PowerSgdConfig,
    TorusConfig,
    settings,
)
from support.training.forms import on_hosts
from support.training.runs import (
    assert_same_bits,
    change,
    curve,
    events,
    in_stages,
    job,
    last_state,
)

POWER = PowerSgdConfig(rank=2, start=1)
SPARSE = DgcConfig(density=0.05, warmup_epochs=1.0)
LOCAL = PostLocalConfig(every=3, start_epochs=0.5)
CLIPS = DgcConfig(density=0.1, momentum=0.0, masking=False, clip_norm=0.5)
STATEFUL = [POWER, SPARSE, CLIPS, LOCAL]
UNINTERRUPTED = {"checkpoint": {"every": 3}, "optimizer": {"sharded": "never"}}
EXACT = [TorusConfig(), TorusConfig(row=2), "hierarchical"]


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Makes eight training and three validation volumes."""
    folder = tmp_path_factory.mktemp("volumes")
    generate_ct(folder, CTOptions(count=11, shape=(16, 8, 8), validation=3 / 11))
    return folder


def unet_run(volumes, folder):
    """Returns a run of a small U-Net."""
    return Config(
        model=UNet3dConfig(features=8, levels=2),
        data=DataConfig(path=volumes, normalize="ct"),
        train=TrainConfig(epochs=3, batch=4),
        output=OutputConfig(folder=folder, plot=False),
    )


@pytest.fixture
def config(volumes, tmp_path):
    return unet_run(volumes, tmp_path / "run")


def with_form(config, form, tmp_path, name, **tables):
    """Returns a run of a form in a folder of its own; DGC has the optimizer's momentum."""
    sgd = SgdConfig(lr=1e-2, decay="none", momentum=0.0 if isinstance(form, DgcConfig) else 0.5)
    changed = change(config, train={"gradients": form}, output={"folder": tmp_path / name})
    return change(replace(changed, optimizer=sgd), **tables)


@pytest.fixture(scope="module")
def alone(volumes, tmp_path_factory):
    """Returns a run that has trained on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    run = with_form(unet_run(volumes, folder), "dense", folder, "run")
    job(LocalTransport(), run)
    return run


@pytest.fixture(scope="module")
def trained(volumes, tmp_path_factory):
    """Returns a function that trains once with each form, on 2 groups of 2 ranks."""

    @functools.cache
    def train(form):
        folder = tmp_path_factory.mktemp("trained")
        run = with_form(unet_run(volumes, folder), form, folder, "run", **UNINTERRUPTED)
        run_local(job, 4, run, 2, (2, 1, 1))
        return run

    return train


@pytest.mark.parametrize("form", EXACT, ids=str)
def test_exact_forms_train_as_one_rank(config, alone, tmp_path, form):
    split = with_form(config, form, tmp_path, "split")
    with on_hosts([1, 3]):
        run_local(job, 4, split, 2, (2, 1, 1))
    assert curve(split) == pytest.approx(curve(alone), rel=1e-4)


@pytest.mark.parametrize("form", ["bf16", *STATEFUL], ids=str)
def test_compressed_forms_train_and_resume_with_the_same_bits(config, trained, tmp_path, form):
    """Interrupted within an epoch: the checkpoint has what was not sent."""
    dense, through = trained("dense"), trained(form)
    parts = with_form(config, form, tmp_path, "parts", **UNINTERRUPTED)
    for steps in (3, None):
        run_local(job, 4, change(parts, train={"steps": steps}), 2, (2, 1, 1))
    assert [event["step"] for event in events(parts, "start")] == [0, 3]
    assert curve(parts) == curve(through)
    for part in ("model", "optimizer", "gradients"):
        assert_same_bits(last_state(parts).get(part), last_state(through).get(part))
    assert all(math.isfinite(loss) for loss in curve(through))
    assert curve(through) == pytest.approx(curve(dense), rel=0.5)
    saved = last_state(through).get("gradients")
    if isinstance(form, str):
        assert saved is None
        assert curve(through) == pytest.approx(curve(dense), rel=0.05)
    else:
        assert saved["steps"] == 6
        assert saved["groups"] == 2
        assert bool(saved["parameters"]) == (form is not LOCAL)


def test_another_number_of_groups_is_told(config, tmp_path):
    """Four groups go on with the mean of what two have not sent, and one without."""
    run = with_form(config, POWER, tmp_path, "run", checkpoint={"every": 1})
    run_local(job, 2, change(run, train={"steps": 2}), 2)
    run_local(job, 4, change(run, train={"steps": 3}), 4)
    said = [e["text"] for e in events(run, "notice")]
    assert [text for text in said if "the state is of 2 sample groups, and there are 4" in text]
    job(LocalTransport(), change(run, train={"steps": 4}))
    said = [e["text"] for e in events(run, "notice")]
    assert [text for text in said if "of 4 sample groups is not used" in text]
    run_local(job, 2, run, 2)  # the state of one group is empty: steps are counted on
    assert last_state(run)["gradients"]["steps"] == 6
    assert len(curve(run)) == 6


def test_a_run_does_not_go_on_with_another_form(config, tmp_path):
    run = with_form(config, POWER, tmp_path, "run", checkpoint={"every": 1})
    run_local(job, 2, change(run, train={"steps": 1}), 2)
    with pytest.raises(CheckpointError, match=r"train.gradients is .*'rank': 2.* there and 'bf16'"):
        run_local(job, 2, change(run, train={"gradients": "bf16"}), 2)
    exact = with_form(config, "dense", tmp_path, "exact", checkpoint={"every": 1})
    run_local(job, 2, change(exact, train={"steps": 1}), 2)
    run_local(job, 2, change(exact, train={"gradients": TorusConfig()}), 2)
    assert len(curve(exact)) == 6


def test_the_log_has_the_bytes_of_each_form(trained):
    """On 2 groups of 2 ranks, relative to the dense form's 2 (N - 1) / N of the gradients."""
    bytes_of = {}
    for form in ("dense", "bf16", TorusConfig(), POWER, SPARSE, LOCAL):
        run = trained(form)
        bytes_of[str(form)] = [event["gradient_bytes"] for event in events(run, "step")]
    (start,) = {event["parameters"] for event in events(run, "start")}
    size = 4 * start
    assert bytes_of["dense"] == [{"all": pytest.approx(1.5 * size, rel=1e-4)}] * 6
    within = pytest.approx(size, rel=0.6)  # rank 0 owns about half
    for sent in bytes_of["bf16"]:
        assert sent["between"] == pytest.approx(size / 4, rel=1e-3)
        assert sent["within"] == pytest.approx(size, rel=1e-3)
    power = [each["between"] for each in bytes_of[str(POWER)]]
    assert power[0] > 5 * power[1] == 5 * power[5]
    sparse = [each["between"] for each in bytes_of[str(SPARSE)]]
    # A warm-up of two steps; then a twentieth of the elements, with their positions.
    assert sparse[0] > sparse[5]
    assert sparse[2] == sparse[5] == pytest.approx(size / 2 * 2 * 0.05, rel=0.6)
    assert all(each["within"] == within for each in bytes_of[str(SPARSE)])
    local = [each["between"] for each in bytes_of[str(LOCAL)]]
    # One step with all groups; then averages of parameters and momentum after steps 2, 4 and 6
    # (validation) and 3 (checkpoint); the log counts them in the step or in the next one.
    assert local[0] > 0
    assert sum(local) < 8 * local[0]


@pytest.mark.parametrize("form", ["bf16", TorusConfig()], ids=str)
def test_stages(config, alone, tmp_path, form):
    split = with_form(config, form, tmp_path, "split", mesh={"stages": 2, "data": 2})
    in_stages(split)
    assert curve(split) == pytest.approx(curve(alone), rel=1e-4 if form != "bf16" else 0.05)


@pytest.mark.parametrize("form", ["fp16", POWER, SPARSE], ids=str)
def test_mixed_precision_in_fp16(config, tmp_path, form):
    """Overflows of the first scales are seen on all ranks: they skip the same steps."""
    run = with_form(config, form, tmp_path, "run")
    run = change(run, train={"amp": "fp16"})
    run_local(job, 2, run, 2)
    state = last_state(run)
    assert all(torch.isfinite(p).all() for p in state["model"].values())
    assert state["scaler"]["scale"] <= 65536
    if form != "fp16":
        assert all(
            torch.isfinite(value).all()
            for entry in state["gradients"]["parameters"].values() for value in entry.values()
        )  # fmt: skip


SGD = '[optimizer]\nname = "sgd"\nmomentum = 0.0\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[train]\ngradients = "fp8"',
            "train.gradients = 'fp8': possible are dense, fp16, bf16",
        ),
        ("[train]\ngradients = 3", 'train.gradients = 3: possible are dense, .*name = "powersgd"'),
        ("[train]\ngradients = {rank = 3}", "train.gradients = {'rank': 3}: possible are dense"),
        ('[train]\ngradients = {name = "powersgd", rnak = 3}', "gradients.rnak is not a .*rank"),
        ('[train]\ngradients = {name = "powersgd", rank = 0}', "train.gradients.rank = 0: input"),
        ('[train]\ngradients = {name = "bf16", rank = 1}', "'rank': 1}: bf16 has no settings; tor"),
        ('[train]\ngradients = {name = "dgc", density = 2.0}', "gradients.density = 2.0: input"),
        (
            '[train]\ngradients = "dgc"',
            'has momentum of its own, 0.9: .* = "adam"',
        ),
        (
            '[train]\ngradients = "dgc"\n[optimizer]\nname = "sgd"',
            "with optimizer.momentum = 0.9",
        ),
        ('[train]\ngradients = "dgc"\n[optimizer]\nname = "lars"', 'name = "lars": its norms need'),
        (
            f'{SGD}[train]\ngradients = "dgc"\nclip_norm = 2.5',
            'dgc. with train.clip_norm: gradi.* set gradients = {name = "dgc", clip_norm = 2.5}',
        ),
        (
            f'{SGD}[train]\ngradients = {{name = "dgc", clip_norm = 0.0}}',
            "gradients.clip_norm = 0.0: input",
        ),
        (
            f'{SGD}[train]\ngradients = {{name = "dgc", momentum = 0.0, clip_norm = 1.0}}\n'
            "[mesh]\ndata = 1",
            "dgc. with mesh.data = 1: nothing",
        ),
        (f'{SGD}[train]\ngradients = "dgc"\n[mesh]\ndata = 1', "dgc. with mesh.data = 1: nothing"),
        (
            '[train]\ngradients = {name = "dgc", momentum = 0.0, nesterov = true}',
            "nesterov = true",
        ),
        (
            '[train]\ngradients = "bf16"\n[optimizer]\nsharded = "always"',
            'train.gradients = "bf16" with optimizer.sharded = "always": steps are divided for',
        ),
        (
            '[train]\ngradients = "powersgd"\n[mesh]\nstages = 2',
            'train.gradients = "powersgd" with mesh.stages: possible are dense, fp16, bf16, torus',
        ),
        (
            '[train]\ngradients = "powersgd"\n[mesh]\nchannel = 2\nsharded_weights = true',
            'train.gradients = "powersgd" with mesh.sharded_weights: possible are dense',
        ),
        (
            '[train]\ngradients = "powersgd"\ncuda_graph = "always"',
            'train.gradients = "powersgd" with train.cuda_graph = "always"',
        ),
        (
            '[train]\ngradients = "powersgd"\nbatch_schedule = {noise_scale = true, largest = 8}',
            'gradients = "powersgd" with train.batch_schedule.noise_scale: .* are dense, fp16',
        ),
        ('[train]\ngradients = "post_local"\namp = "fp16"', "groups would skip other steps"),
    ],
)
def test_settings_that_do_not_fit_are_named(text, message):
    with pytest.raises(UsageError, match=message):
        config_io.loads(text, "run.toml")


def test_a_table_survives_the_way_through_toml():
    for form in ("bf16", *STATEFUL, *EXACT):
        optimizer = SGD if isinstance(form, DgcConfig) else ""
        table = form if isinstance(form, str) else vars(form)
        given = config_io.from_tables(
            {"train": {"gradients": table}, **config_io.tomllib.loads(optimizer)}, "test"
        )
        assert given.train.gradients == form
        assert config_io.loads(config_io.dumps(given), "test") == given


def test_epochs_become_steps():
    ten = MeshSampler(40, 1, 0, 4).steps_until
    assert settings(DgcConfig(warmup_epochs=1.5), ten).warmup == 15
    assert settings(PostLocalConfig(start_epochs=2.0), ten).start == 20
    assert settings("powersgd", ten).rank == 4


def test_epochs_of_a_growing_batch_become_its_steps():
    """Epochs of 10, 5 + 3, 5, 5, ... steps, of 4 samples and of 8."""
    growing = MeshSampler(40, 1, 0, BatchSizes(4, [(60, 8)])).steps_until
    starts = [settings(PostLocalConfig(start_epochs=n), growing).start for n in (1, 1.5, 2, 2.6, 9)]
    assert starts == [10, 14, 18, 21, 53]
    assert settings(DgcConfig(warmup_epochs=2.0), growing).warmup == 18


def test_local_steps_begin_at_their_epoch_while_the_batch_grows(config, tmp_path):
    """Two steps of 4 samples, then one step of 8 in each epoch: the third step is local."""
    schedule = BatchScheduleConfig(((1.0, 8),))
    form = PostLocalConfig(every=4, start_epochs=2.0)
    train = {"batch_schedule": schedule, "epochs": 4, "accumulate": 2, "validate_every": 0}
    run = with_form(config, form, tmp_path, "run", train=train, checkpoint={"every": 99})
    run_local(job, 2, run, 2)
    between = [event["gradient_bytes"]["between"] for event in events(run, "step")]
    assert len(between) == 5
    assert all(between[:3])
    assert between[3:4] == [0]
