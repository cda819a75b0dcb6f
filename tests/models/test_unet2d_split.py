"""Images cut in space: the 2D U-Net equals the one-device run."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F

from pydist import distribute_tensor, parallelize
from pydist.models import UNet2d
from support.equivalence import (
    Answer,
    Task,
    assert_equal,
    even_points,
    on_ranks,
    randint,
    randn,
    train_split,
    whole_answer,
)

EDGES = (24, 16)


@functools.cache
def task_of(samples: int) -> tuple[Task, Answer]:
    """Returns a narrow network in fp64 with a batch, and the results of one device."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = UNet2d(2, 3, features=4, levels=2).double()
    labels = randint(3, samples, *EDGES)
    task = Task(model, randn(samples, 2, *EDGES), labels, F.cross_entropy)
    return task, whole_answer(task)


@pytest.mark.parametrize(
    ("parts", "data", "channel"),
    [*((parts, 1, 1) for parts in ((2, 1), (1, 2), (3, 1), (2, 2), (4, 1))),
     ((2, 2), 2, 1), ((2, 2), 1, 2)],
)  # fmt: skip
def test_an_image_in_parts(parts, data, channel):
    """Blocks of 4 x 1 parts have fewer rows than a halo at the deepest level."""
    task, answer = task_of(2)
    points = [even_points(edge, n) for edge, n in zip(EDGES, parts, strict=True)]

    def rank(mesh):
        own = task._replace(model=copy.deepcopy(task.model))
        assert_equal(train_split(own, mesh, points), *answer)

    on_ranks((*parts, 1), rank, data, axes={"channel": channel})


def test_plain_images_are_cut_along_height_and_width():
    task, answer = task_of(1)

    def rank(mesh):
        model = parallelize(copy.deepcopy(task.model), mesh)
        cut = distribute_tensor(task.x, mesh)
        assert cut.to_local().shape == (1, 2, 12, 8)
        whole = distribute_tensor(task.x, mesh, {})
        assert whole.to_local().shape == task.x.shape
        scores = model(task.x)
        assert scores.to_local().shape == (1, 3, 12, 8)
        loss = F.cross_entropy(scores, task.target)
        loss.backward()
        return {f"d {n}": p.grad for n, p in model.named_parameters()}

    expected = {n: g for n, g in answer.expected.items() if n.startswith("d ")}
    for found in on_ranks((1, 2, 2), rank):
        assert_equal(found, expected, answer.bounds)


def test_images_stay_plain_where_the_mesh_has_no_parts_for_them():
    task, _ = task_of(1)

    def rank(mesh):
        model = parallelize(copy.deepcopy(task.model), mesh)
        return type(model(task.x))

    assert set(on_ranks((2, 1, 1), rank)) == {torch.Tensor}
