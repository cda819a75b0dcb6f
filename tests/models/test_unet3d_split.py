"""Split U-Net equals the one-device run: scores, loss, every gradient, running statistics."""

from __future__ import annotations

import functools

import pytest
import torch

from pydist.models import UNet3d
from pydist.train.losses import SegmentationLoss
from support.equivalence import Answer, Task, check_network, randint, randn, whole_answer


@functools.cache
def task_of(samples: int, loss: str) -> tuple[Task, Answer]:
    """Returns a narrow network in fp64 with a batch, and the results of one device."""
    torch.manual_seed(0)
    model = UNet3d(2, 3, features=4, levels=2).double()
    task = Task(
        model,
        randn(samples, 2, 12, 8, 8),
        randint(3, samples, 12, 8, 8),
        SegmentationLoss(loss),
    )
    return task, whole_answer(task)


@pytest.mark.parametrize(("spatial", "thin"), [((3, 1, 1), False), ((2, 2, 2), True)])
def test_one_volume(spatial, thin):
    """With more splits in `test_equivalence.py`."""
    task, answer = task_of(1, "dice_ce")
    check_network(task, spatial, answer=answer, keep_thin_blocks=thin)


@pytest.mark.parametrize("loss", ["cross_entropy", "dice", "dice_ce"])
def test_two_sample_groups(loss):
    task, answer = task_of(2, loss)
    check_network(task, (1, 2, 1), 2, answer=answer)
