"""Networks of images in stages, unmodified: data × stages, cuts in and between blocks, channels.

HyPar-Flow's contract: gradients and statistics are those of one process that runs the same
micro-batches in sequence.
"""

from __future__ import annotations

import copy

import pytest
import torch

from pydist import Mesh, distribute_tensor, parallelize, run_local
from pydist.stages import pipeline
from pydist.tensor import ShardedTensor, local_of
from support.equivalence import Task, assert_equal, bounds_of, jittered, randn
from support.networks.images import NETWORKS, cifar10, mnist, task_of
from support.networks.small import initialized
from support.staged import HIGH, ONE, check_stages, in_sequence, on_stages, results

SHARES = {"channel": (70, 25, 5)}
UNEQUAL = {"channel": 3, "shares": SHARES}


@pytest.mark.parametrize(
    ("data", "count", "schedule"),
    [(1, 2, "gpipe"), (1, 4, "1f1b"), (2, 2, "1f1b"), (2, 4, "gpipe"), (2, 2, "zero-bubble")],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_groups_times_stages(name, data, count, schedule):
    """Each pair of values occurs."""
    check_stages(task_of(name), [{"data": data}] * count, 2, schedule=schedule)


@pytest.mark.parametrize(
    ("name", "cuts", "skips"),
    [
        ("ResNet", ["blocks.2"], "direct"),
        ("ResNet", ["blocks.0", "blocks.2", "blocks.4"], "relay"),
        ("ResNet", ["blocks.0.norm1", "blocks.2.shortcut", "blocks.4.conv2"], "direct"),
        ("U-Net", ["bottom"], "direct"),
        ("U-Net", ["down.1", "bottom", "up.0"], "relay"),
        ("U-Net", ["down.0.norm2", "down.1.act1", "up.1.conv2"], "direct"),
    ],
    ids=str,
)
def test_cuts_at_blocks_and_within(name, cuts, skips):
    """Shortcuts and skips cross the cuts, over several stages."""
    check_stages(task_of(name), [ONE] * (len(cuts) + 1), 4, cuts=cuts, skips=skips)


@pytest.mark.parametrize("name", ["ResNet", "U-Net"])
@pytest.mark.parametrize(
    "meshes",
    [
        [{"spatial": (1, 2, 1)}] * 2,
        [{"spatial": (1, 2, 2)}, {"spatial": (1, 2, 1)}],
        [{"spatial": (1, 2, 1)}, ONE],
        [ONE, {"spatial": (1, 1, 2)}],
    ],
    ids=str,
)
def test_stages_that_cut_images(name, meshes):
    """An image is cut along the dims that the script names."""
    task = task_of(name)
    expected = in_sequence(task, 2)
    bounds = bounds_of(expected, in_sequence(task, 2, jittered))

    def rank(stages):
        made = pipeline(copy.deepcopy(task.model), stages, task.x, micro_batches=2)
        cut = distribute_tensor(task.x, stages.mesh, {2: "height", 3: "width"})
        loss = made.step(cut, task.target, task.loss)
        assert_equal(results(made, loss), expected, bounds)

    on_stages(meshes, rank)


def heights(model):
    """Returns the local and the global extents along the last dims but one that convolutions have
    computed so far, in a list that grows with each call."""
    seen = []

    def note(module, inputs, out):
        if isinstance(out.value, ShardedTensor):
            seen.append((local_of(out.value).shape[-2], out.shape[-2]))

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    return seen


@pytest.mark.parametrize("name", ["ResNet", "U-Net"])
@pytest.mark.parametrize("meshes", [[HIGH] * 2, [ONE, HIGH], [HIGH, ONE, HIGH]], ids=str)
def test_plain_images_are_cut(name, meshes):
    """As without stages, and on a stage after one that does not cut them."""
    task = task_of(name)
    expected = in_sequence(task, 2)
    bounds = bounds_of(expected, in_sequence(task, 2, jittered))

    def rank(stages):
        own = copy.deepcopy(task.model)
        made = pipeline(own, stages, task.x, micro_batches=2, balance="memory")
        seen = heights(own)
        loss = made.step(task.x, task.target, task.loss)
        assert seen
        parts = stages.mesh.sample_size
        assert all(local < whole for local, whole in seen) == (parts > 1), seen
        assert_equal(results(made, loss), expected, bounds)

    on_stages(meshes, rank)


def test_plain_lines_are_cut():
    net = torch.nn.Sequential(
        torch.nn.Conv1d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv1d(4, 2, 3, padding=1)
    )
    x, target = randn(4, 1, 8, seed=1), randn(4, 2, 8, seed=2)
    task = Task(initialized(net), x, target, torch.nn.functional.mse_loss)
    for meshes in ([{"spatial": (1, 1, 2)}, ONE], [ONE, {"spatial": (1, 1, 2)}]):
        check_stages(task, meshes, 2)


@pytest.mark.parametrize("name", ["MNIST", "CIFAR-10"])
@pytest.mark.parametrize("meshes", [[UNEQUAL], [UNEQUAL, ONE], [ONE, UNEQUAL]], ids=str)
def test_channels_on_unequal_ranks(name, meshes):
    check_stages(task_of(name), meshes, 2, balance="time")


@pytest.mark.parametrize(
    ("make", "sample", "filters"),
    [(mnist, (1, 8, 8), [42, 120, 168]), (cifar10, (3, 16, 16), [42, 60, 84, 120])],
    ids=["MNIST", "CIFAR-10"],
)
def test_filters_of_the_fastest_rank(make, sample, filters):
    """At full width, 70 % of the filters: of the first of two layers that split in turn."""
    x = torch.randn(1, *sample)
    whole = make()
    whole(x)

    def rank(world):
        mesh = Mesh(world, 1, axes={"channel": 3}, shares=SHARES)
        model, y = parallelize(copy.deepcopy(whole), mesh), distribute_tensor(x, mesh, {})
        found = []
        for layer in model:
            y = layer(y)
            if isinstance(layer, torch.nn.Conv2d):
                found.append(y.to_local().shape[1])
        return found

    assert run_local(rank, 3)[0][: len(filters)] == filters
