"""Tests of runs whose steps have several passes, and of a batch that changes in a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pydist.comm import run_local
from pydist.data import MeshSampler
from pydist.data.batch_sizes import BatchSizes
from pydist.errors import UsageError
from pydist.train import config_io
from pydist.train.config import (
    BatchScheduleConfig,
    Config,
    SgdConfig,
    SharesConfig,
    StageConfig,
)  # fmt: skip
from pydist.train.datasets import pass_rule
from pydist.train.loop import Trainer
from pydist.train.ranks import check_ranks
from support.training.runs import (
    alone,
    assert_same_bits,
    change,
    events,
    in_stages,
    job,
    last_state,
    universe_run,
)

GROWING = BatchScheduleConfig(((1.0, 3), (1.5, 6)))
"""Of the six samples: steps of 2, 2, 2; of 3, and 3 that are left of a batch of 6; and of 6."""


def steps(config: Config, name: str) -> list:
    return [event[name] for event in events(config, "step")]


def growing_run(universes: Path, folder: Path) -> Config:
    """Returns a run of three epochs with dropout whose batch grows, first within the second."""
    table = SgdConfig(lr=1e-3, lr_batch=2, warmup_epochs=0.5, decay_epochs=3.0)
    train = {"epochs": 3, "batch": 2, "accumulate": 2, "batch_schedule": GROWING}
    run = universe_run(universes, folder)
    return change(run, optimizer=vars(table), train=train)


@pytest.fixture
def growing(universes, tmp_path) -> Config:
    return growing_run(universes, tmp_path / "run")


@pytest.fixture(scope="module")
def grown(universes, tmp_path_factory) -> Config:
    """Returns the same run after it has trained on one rank."""
    config = growing_run(universes, tmp_path_factory.mktemp("grown") / "run")
    alone(config)
    return config


@pytest.mark.parametrize(
    ("data", "spatial", "shares"),
    [(1, (1, 1, 1), None), (2, (1, 1, 1), None), (2, (2, 1, 1), (1.0, 2.0))],
)
def test_passes_train_as_the_whole_batch(config, tmp_path, data, spatial, shares):
    """The network has dropout, and two groups share the five samples of a batch unevenly."""
    config = change(config, train={"batch": 5})
    alone(config)
    mesh = {"spatial": spatial, "shares": SharesConfig(data=shares)}
    parts = change(
        config, train={"accumulate": 2}, mesh=mesh, output={"folder": tmp_path / "parts"}
    )
    run_local(job, data * spatial[0], parts, data, spatial)
    assert steps(parts, "loss") == pytest.approx(steps(config, "loss"), rel=1e-4)
    assert steps(parts, "passes") == [2, 1, 2, 1]
    assert steps(parts, "batch") == steps(config, "batch") == [5, 1, 5, 1]


def test_the_batch_follows_its_milestones_and_the_rate_follows_the_batch(grown, growing, tmp_path):
    assert steps(grown, "batch") == [2, 2, 2, 3, 3, 6]
    assert steps(grown, "passes") == [2, 2, 2, 3, 3, 6]
    seen, sizes, expected = 0, [2, 2, 2, 3, 6, 6], []
    for size, used in zip(sizes, steps(grown, "batch"), strict=True):
        peak, end = 1e-3 * size / 2, 1e-7 * size / 2
        if seen < 3:
            expected.append(peak * (0.01 + 0.99 * seen / 3))
        else:
            expected.append(end + (peak - end) * (1 - (seen - 3) / 18))
        seen += used
    assert steps(grown, "lr") == pytest.approx(expected, rel=1e-12)
    fixed = change(growing, optimizer={"lr_batch": None})
    alone(fixed)
    rates = [rate * 2 / size for rate, size in zip(expected, sizes, strict=True)]
    assert steps(fixed, "lr") == pytest.approx(rates, rel=1e-12)
    output = {"folder": tmp_path / "rooted"}
    rooted = change(growing, optimizer={"lr_scaling": "sqrt"}, output=output)
    alone(rooted)
    rates = [rate * (2 / size) ** 0.5 for rate, size in zip(expected, sizes, strict=True)]
    assert steps(rooted, "lr") == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize(
    ("by", "largest", "passes"),
    [("accumulate", None, [2, 2, 2, 3, 3, 6]), ("batch", None, [2, 2, 2, 2, 1, 2]),
     ("both", 2, [2, 2, 2, 2, 2, 3])],
)  # fmt: skip
def test_what_grows_does_not_change_the_training(grown, growing, by, largest, passes):
    table = BatchScheduleConfig(GROWING.milestones, by=by, largest_pass=largest)
    other = change(growing, train={"batch_schedule": table})
    run_local(job, 2, other, 1, (2, 1, 1))
    assert steps(other, "batch") == steps(grown, "batch")
    assert steps(other, "passes") == passes
    assert steps(other, "loss") == pytest.approx(steps(grown, "loss"), abs=5e-6)


def test_milestones_in_samples(growing):
    table = BatchScheduleConfig(((6, 3), (9, 6)), unit="samples")
    config = change(growing, train={"batch_schedule": table})
    alone(config)
    assert steps(config, "batch") == [2, 2, 2, 3, 3, 6]


@pytest.mark.parametrize(
    ("ranks", "data", "tables"),
    [
        (1, 1, {"model": {"variant": "paper", "batch_norm": True}}),
        (2, 1, {"optimizer": {"sharded": "always"}, "mesh": {"spatial": (2, 1, 1)}}),
        (2, 2, {"train": {"accumulate": 1}}),
        (2, 1, {"mesh": {"channel": 2, "sharded_weights": True}}),
    ],
    ids=["one rank", "partitioned", "groups", "slices"],
)
def test_a_run_resumes_within_a_change_bit_by_bit(growing, tmp_path, ranks, data, tables):
    """It is interrupted within epochs: before a change, right at one, and after the last."""
    through = change(growing, **tables)
    spatial = through.mesh.spatial
    run_local(job, ranks, through, data, spatial)
    parts = change(through, output={"folder": tmp_path / "parts"})
    for stop in (2, 4, 5, None):
        run_local(job, ranks, change(parts, train={"steps": stop}), data, spatial)
    for name in ("loss", "lr", "batch", "passes"):
        assert steps(parts, name) == steps(through, name)
    assert_same_bits(last_state(parts), last_state(through))


def test_a_checkpoint_goes_on_with_other_passes_but_not_with_other_batches(grown, growing):
    alone(change(growing, train={"steps": 4}))
    table = BatchScheduleConfig(((1.0, 3), (2.0, 6)))
    with pytest.raises(UsageError, match=r"batches that change at \[\(6, 3\), \(9, 6\)\]"):
        alone(change(growing, train={"batch_schedule": table}))
    with pytest.raises(UsageError, match=r"change at .* this one at \[\]"):
        alone(change(growing, train={"batch_schedule": BatchScheduleConfig()}))
    table = BatchScheduleConfig(GROWING.milestones, by="batch")
    run_local(job, 2, change(growing, train={"batch_schedule": table, "accumulate": 1}), 2)
    assert steps(growing, "loss") == pytest.approx(steps(grown, "loss"), abs=5e-6)


def test_stages_accumulate_over_more_micro_batches(grown, growing):
    mesh = {"stages": (StageConfig(), StageConfig((2, 1, 1))), "micro_batches": 2}
    staged = change(growing, mesh=mesh, train={"accumulate": 1})
    in_stages(staged)
    assert steps(staged, "batch") == steps(grown, "batch")
    assert steps(staged, "passes") == [2, 2, 2, 3, 6, 6]
    assert steps(staged, "loss") == pytest.approx(steps(grown, "loss"), abs=5e-6)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train": {"batch": 2, "accumulate": 3}}, "a batch of train.batch = 2 has at most 2"),
        ({"train": {"batch_schedule": {"milestones": [[2.0, 4], [1.0, 8]]}}}, "ascending places"),
        ({"train": {"batch_schedule": {"by": "batch"}}}, "neither milestones nor noise_scale"),
        ({"train": {"batch_schedule": {"milestones": [[1.0, 0]]}}}, "greater than or equal to 1"),
        ({"train": {"batch_schedule": {"milestones": [[1.0, 8]], "by": "both"}}},
         "needs the samples of the largest pass"),
        ({"train": {"batch_schedule": {"milestones": [[1.0, 8]], "largest_pass": 4}}},
         "other values have none"),
        ({"train": {"batch_schedule": {"milestones": [[1.0, 8]], "by": "both", "largest_pass": 2}}},
         "the first passes have 3 samples"),
        ({"train": {"batch_schedule": {"noise_scale": True}}}, "needs the largest batch"),
        ({"train": {"batch_schedule": {"noise_scale": True, "largest": 2}}},
         "largest = 2 is below train.batch = 3"),
        ({"train": {"batch_schedule": {"milestones": [[1.0, 8]], "largest": 9}}},
         "milestones name theirs"),
        ({"train": {"batch_schedule": {"milestones": [[1.0, 8]], "noise_scale": True,
                                       "largest": 9}}}, "either is possible"),
        ({"train": {"batch_schedule": {"milestones": [[1.0, 1]], "by": "batch"}, "accumulate": 2}},
         "a batch of 1 in train.accumulate = 2 passes"),
        ({"train": {"batch_schedule": {"milestons": [[1.0, 8]]}}}, 'did you mean "milestones"'),
        ({"train": {"accumulate": 3, "cuda_graph": "always"}}, "a step of one pass and one size"),
        ({"train": {"accumulate": 3}, "mesh": {"stages": 2}}, "mesh.micro_batches; set that"),
        ({"train": {"batch_schedule": {"noise_scale": True, "largest": 9}}, "mesh": {"stages": 2}},
         "no stage has the gradient of the whole network"),
    ],
)  # fmt: skip
def test_settings_that_are_impossible_are_named_in_one_line(tables, message):
    given = {**tables, "train": {"batch": 3, **tables["train"]}}
    with pytest.raises(UsageError, match=message) as caught:
        config_io.from_tables(given, "run.toml")
    assert "\n" not in str(caught.value)


DGC = {"gradients": {"name": "dgc"}}


@pytest.mark.parametrize(
    ("ranks", "train", "message"),
    [
        (4, {"batch_schedule": {"milestones": [[1.0, 3]]}},
         r"train\.batch_schedule\.milestones = \[\[1\.0, 3\]\] with 4 sample groups: .* 4 or more"),
        (4, {"accumulate": 3}, r"train\.accumulate = 3 with .* possible are up to 2"),
        (1, {"batch_schedule": {"noise_scale": True, "largest": 9}}, "which is one pass of one"),
        (4, {"gradients": {"name": "torus", "row": 3}},
         r"train\.gradients\.row = 3: 4 ranks have no rows of 3; possible are 1, 2, 4"),
        (1, DGC, r'"dgc" with one sample group on 1 rank: .*"dense" is possible'),
    ],
)  # fmt: skip
def test_what_does_not_suit_the_sample_groups_is_named_before_ranks_start(ranks, train, message):
    optimizer = {"name": "sgd", "momentum": 0.0}
    tables = {"train": {"batch": 8, **train}, "optimizer": optimizer}
    with pytest.raises(UsageError, match=message):
        check_ranks(config_io.from_tables(tables, "run.toml"), ranks)


def test_ranks_suit_a_mesh_that_they_choose():
    tables = {"mesh": {"spatial": "auto", "data": 1}, "train": {"batch": 1}}
    check_ranks(config_io.from_tables(tables, "run.toml"), 2)


def test_stages_take_a_largest_micro_batch():
    table = {"milestones": [[1.0, 8]], "by": "both", "largest_pass": 2}
    tables = {
        "train": {"batch": 4, "batch_schedule": table},
        "mesh": {"stages": 2, "micro_batches": 4},
    }
    rule = pass_rule(config_io.from_tables(tables, "run.toml"))
    assert [rule.passes(n, n) for n in (4, 8, 16)] == [4, 4, 8]


def test_more_passes_than_the_groups_have_samples_for(config):
    with pytest.raises(UsageError, match=r"3 in 3 passes: .* possible are up to 1 passes"):
        run_local(job, 2, change(config, train={"accumulate": 3}), 2)


def test_a_schedule_is_read_and_written_as_toml():
    text = "[train]\naccumulate = 2\n[train.batch_schedule]\nmilestones = [[1.5, 8]]\nby = 'batch'"
    config = config_io.loads(text, "run.toml")
    assert config.train.batch_schedule == BatchScheduleConfig(((1.5, 8),), by="batch")
    assert config_io.loads(config_io.dumps(config), "again") == config


def test_the_example_runs(universes, tmp_path):
    """On four ranks and six samples: the batch grows from 4 to 8 and 16, larger than an epoch."""
    path = Path(__file__).parents[2] / "examples" / "cosmoflow-growing-batch.toml"
    config = config_io.load(path)
    config = change(
        config, data={"path": universes}, output={"folder": tmp_path / "run", "plot": False}
    )
    assert config.mesh.spatial == (2, 1, 1)
    run_local(job, 4, config, config.mesh.data, config.mesh.spatial)
    assert steps(config, "batch") == [4, 2, 6, 6, 6]
    assert steps(config, "passes") == [2, 1, 2, 2, 2]
    (event,) = events(config, "layers")
    assert event["step"] == 4
    assert all(row["ratio"] > 0 for row in event["layers"].values())


@pytest.mark.parametrize("most", [None, 0, 1, 7, 8, 20])
@pytest.mark.parametrize(("place", "taken"), [((0, 0), 0), ((0, 2), 2), ((1, 1), 4), ((4, 0), 7)])
def test_the_end_of_a_run_is_known_before_it(most, place, taken):
    """Epochs of 3, 2, 1, 1, 1, 1 steps; of two billion epochs as of six."""
    sampler = MeshSampler(6, 1, 0, BatchSizes(2, [(6, 3), (12, 6)]))
    sampler.seek(*place)

    def expected(epochs):
        run = SimpleNamespace(
            config=SimpleNamespace(epochs=epochs, steps=most),
            loader=SimpleNamespace(sampler=sampler),
            state=SimpleNamespace(step=taken),
        )
        return Trainer.expected(run)

    epoch, steps = place[0], taken - place[1]
    while epoch < 6 and steps < (99 if most is None else most):
        steps, epoch = steps + sampler.steps(epoch), epoch + 1
    assert expected(6) == (steps if most is None else min(steps, most), epoch)
    many = 2**31 - 1
    assert expected(many)[0] == (many + 3 if most is None else min(most, many + 3))
