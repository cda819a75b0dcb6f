"""Tests of random networks in stages, and of stages on meshes of any axes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pydist.errors import NotSupported, UsageError
from support.equivalence import Task, randn
from support.networks.small import initialized
from support.random_networks.cases import Case, cases
from support.staged import DEEP, ONE, Meshes, check_stages, ranks_of

MESHES: list[tuple[Meshes, list[int] | None]] = [
    ([ONE] * 2, None), ([ONE] * 3, None), ([ONE] * 4, None), ([DEEP, ONE], None),
    ([ONE, DEEP], None), ([ONE] * 2, [0, 1, 0, 1]), ([ONE] * 2, [0, 1, 1, 0]),
    ([DEEP, ONE], [0, 1, 0]), ([ONE] * 3, [2, 0, 1, 0]),
]  # fmt: skip
"""The meshes, and the mesh of each stage."""


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cases(),
    st.sampled_from(MESHES),
    st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    st.booleans(),
)
def test_a_random_network_equals_one_device(
    case: Case, placed: tuple[Meshes, list[int] | None], schedule: str, recompute: bool
) -> None:
    meshes, order = placed
    assume(len(case.shape) == 5 and any(True for _ in case.model.parameters()))
    assume(case.is_sound())
    try:
        check_stages(case.task(), meshes, order=order, schedule=schedule, recompute=recompute)
    except NotSupported:
        assume(False)  # without an exact form, as on shards; or memory that stages would share
    except UsageError as error:
        assume("forward pass can be cut at" not in str(error))
        raise


class Skip(nn.Module):
    """Layers whose argument is concatenated with their result."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    """Draws convolutions with norms, one of them across a skip connection."""
    norms = (nn.Identity, nn.BatchNorm3d, nn.InstanceNorm3d, lambda n: nn.GroupNorm(2, n))
    widths = [2, *draw(st.lists(st.sampled_from((2, 4, 6)), min_size=3, max_size=5))]
    blocks = [
        nn.Sequential(
            nn.Conv3d(a, b, draw(st.sampled_from((1, 3))), padding="same"),
            draw(st.sampled_from(norms))(b),
            draw(st.sampled_from((nn.ReLU(inplace=True), nn.Tanh(), nn.PReLU()))),
        )
        for a, b in itertools.pairwise(widths)
    ]
    at = draw(st.integers(1, len(blocks) - 1))
    blocks[at - 1] = Skip(blocks[at - 1])
    blocks[at][0] = nn.Conv3d(widths[at - 1] + widths[at], widths[at + 1], 3, padding=1)
    return initialized(nn.Sequential(*blocks))


@st.composite
def compositions(draw: st.DrawFn) -> tuple[Meshes, list[int] | None]:
    """Draws two or three meshes of up to eight ranks, and sometimes a mesh for two stages."""
    data = draw(st.integers(1, 2))
    axes: list[Mapping[str, Any]] = [
        {}, {"spatial": (2, 1, 1)}, {"spatial": (1, 2, 1)}, {"channel": 2},
        {"channel": 2, "spatial": (2, 1, 1)}, {"channel": 2, "shares": {"channel": (0.7, 0.3)}},
        {"spatial": (2, 1, 1), "shares": {"depth": (0.7, 0.3)}},
    ]  # fmt: skip
    drawn = draw(st.lists(st.sampled_from(axes), min_size=2, max_size=3))
    meshes = [{"data": data, **each} for each in drawn]
    assume(ranks_of(meshes) <= 8)
    orders: list[list[int] | None] = [None]
    if len(meshes) == 2:
        orders += [[0, 1, 0], [0, 1, 1, 0]]
    return meshes, draw(st.sampled_from(orders))


@settings(
    max_examples=settings().max_examples // 2,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    networks(),
    compositions(),
    st.integers(1, 4),
    st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    st.booleans(),
    st.booleans(),
)
def test_a_random_composition_equals_one_device(
    net: nn.Module,
    placed: tuple[Meshes, list[int] | None],
    micro_batches: int,
    schedule: str,
    recompute: bool,
    in_slices: bool,
) -> None:
    meshes, order = placed
    samples = 4 * meshes[0]["data"]
    x = randn(samples, 2, 6, 4, 4, seed=1)
    with torch.no_grad():
        target = randn(*copy.deepcopy(net)(x).shape, seed=2)
    in_slices &= any(mesh.get("channel", 1) > 1 for mesh in meshes)
    check_stages(
        Task(net, x, target, F.mse_loss), meshes, micro_batches, order=order, schedule=schedule,
        recompute=recompute, sharded_weights=in_slices,
    )  # fmt: skip
