"""Split CosmoFlow equals the one-device run: output, loss, gradients of input and parameters.

The networks have all nine million parameters; from 32³ on their last layers have fewer voxels than
ranks.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from pydist.models import CosmoFlow
from support.equivalence import Answer, Task, check_network, randn, whole_answer

SPLITS = [(2, 1, 1), (1, 1, 2), (3, 1, 1), (2, 2, 2), (1, 3, 2)]


@functools.cache
def task_of(width: int, samples: int, **options) -> tuple[Task, Answer]:
    """Returns the network in fp64 with a batch, and the results of one device."""
    torch.manual_seed(0)
    model = CosmoFlow(width, dropout=0.0, **options).double()
    x = randn(samples, 4, width, width, width).exp().log1p()
    task = Task(model, x, randn(samples, 4, seed=1), F.mse_loss)
    return task, whole_answer(task)


@pytest.fixture(scope="module", autouse=True)
def _forget_networks():
    yield
    task_of.cache_clear()


def check(task_and_answer, spatial, data=1, **options) -> None:
    task, answer = task_and_answer
    check_network(task, spatial, data, answer=answer, **options)


@pytest.mark.parametrize("spatial", [*SPLITS, (8, 1, 1)])
def test_32(spatial):
    check(task_of(32, 1), spatial)


@pytest.mark.parametrize("spatial", [(2, 2, 2), (8, 1, 1)])
def test_32_with_idle_ranks_at_depth(spatial):
    check(task_of(32, 1), spatial, keep_thin_blocks=True)


@pytest.mark.parametrize("spatial", [(3, 1, 1), (2, 2, 2), (1, 3, 2)])
@pytest.mark.parametrize("thin", [False, True], ids=["moved", "thin"])
def test_32_with_batch_norm(spatial, thin):
    check(task_of(32, 2, batch_norm=True), spatial, keep_thin_blocks=thin)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batch norm"])
@pytest.mark.parametrize("spatial", [(2, 1, 1), (1, 2, 1)])
def test_32_in_two_sample_groups(spatial, batch_norm):
    check(task_of(32, 2, batch_norm=batch_norm), spatial, data=2)


@pytest.mark.parametrize("spatial", [(2, 1, 1), (1, 3, 2)])
def test_32_of_the_mlperf_variant(spatial):
    check(task_of(32, 1, variant="mlperf"), spatial)


@pytest.mark.parametrize("spatial", SPLITS)
def test_64(spatial):
    check(task_of(64, 1), spatial)


def test_64_with_batch_norm():
    check(task_of(64, 1, batch_norm=True), (2, 2, 1))
