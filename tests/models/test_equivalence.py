"""Unmodified networks of others: a training step on split samples equals the one-device step.

The tests compare output, loss, running statistics and every gradient, in float64 and in float32
(with at most four times the error of one device). Wide networks run once, and few in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from support.equivalence import even_points
from support.equivalence.one_device import Reference
from support.networks.zoo import WIDE, ZOO, task_of

# Networks of pydist have tests of their own, and mc3_18 has the blocks of r3d_18.
LEFT_OUT = {"CosmoFlow", "3D U-Net of the paper", "r3d_18"}
IN_FLOAT32 = {"MONAI UNet, batch norm", "DynUNet", "SegResNet", "BasicUNet, trilinear"}
"""A network with each of batch, instance and group norm, and one that interpolates."""

SPLITS = {
    "2x1x1": lambda n: [even_points(n[0], 2)],
    "1x2x2": lambda n: [[0, n[0]], even_points(n[1], 2), *(even_points(m, 2) for m in n[2:])],
    "uneven, one empty": lambda n: [[0, n[0] // 3, n[0] // 3, n[0]], [0, 1, n[1]]],
}


def cases() -> list[tuple[str, str, torch.dtype]]:
    """Returns combinations of network, split and dtype."""
    found = []
    for name in (each for each in ZOO if each not in LEFT_OUT):
        for split in SPLITS:
            for dtype in (torch.float64, torch.float32):
                first = split == "2x1x1" and dtype == torch.float64
                narrow = name in IN_FLOAT32 and split == "1x2x2"
                usual = name not in WIDE and (dtype == torch.float64 or narrow)
                if first or usual:
                    found.append((name, split, dtype))
    return found


@functools.lru_cache(maxsize=2)
def reference_of(name: str, dtype: torch.dtype) -> Reference:
    return Reference(task_of(name, dtype))


@pytest.fixture(scope="module", autouse=True)
def _forget_networks():
    yield
    reference_of.cache_clear()


def named(case: Sequence[object]) -> str:
    return ", ".join(str(part).removeprefix("torch.") for part in case)


@pytest.mark.parametrize("case", cases(), ids=named)
def test_split_is_whole(case):
    name, split, dtype = case
    extents = ZOO[name].sample[1:]
    points = SPLITS[split](extents)
    points += [[0, n] for n in extents[len(points) :]]
    reference_of(name, dtype).check_split(points, keep_thin_blocks=split.startswith("uneven"))
