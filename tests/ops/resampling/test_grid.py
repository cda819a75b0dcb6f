"""Sampling at positions of a grid, split against whole."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pydist.ops.resampling.grid as grid_module
from pydist import Mesh, distribute_tensor, layout_for_sample, parallelize, run_local
from support.equivalence import (
    Cut,
    assert_same,
    check_function,
    layout_at,
    on_ranks,
    randn,
    shard,
    spatial_of,
)

SHAPE = (2, 3, 9, 8, 7)
POINTS = {
    "2x1x1": [[0, 4, 9], None, None],
    "2x2x2, half of them empty": [[0, 2, 9], [0, 3, 8], [0, 0, 7]],
}


def identity(*extents, aligned=False):
    """Returns the grid at which sampling changes nothing."""
    theta = torch.eye(len(extents), len(extents) + 1, dtype=torch.float64)[None]
    return F.affine_grid(theta, (1, 1, *extents), aligned)


sampled = partial(F.grid_sample, align_corners=False)


def displaced(by):
    """Returns a function of an input and displacements, [N, 3, D, H, W], up to `by`."""

    def call(x, flow, **options):
        base = identity(*flow.shape[2:], aligned=options.get("align_corners", False))
        return F.grid_sample(x, base + by * flow.movedim(1, -1).tanh(), **options)

    return call


OPTIONS = {
    "zeros": {"align_corners": False},
    "aligned, border": {"align_corners": True, "padding_mode": "border"},
    "reflection": {"align_corners": False, "padding_mode": "reflection"},
    "nearest": {"align_corners": True, "mode": "nearest"},
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("by", [0.1, 1.5])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_displacements(options, by, points):
    flow = randn(2, 3, *SHAPE[2:], seed=1)
    check_function(
        lambda x, f: displaced(by)(x, f, **options),
        randn(*SHAPE), (), points, beside=[Cut(flow, points)], second_order=True,
    )  # fmt: skip


def check_at_steps(call, x, x_points, flow, flow_points):
    """Compares result and gradients where noise in the last bit would change them."""

    def answer(x, flow):
        y = call(x, flow)
        return [y, *torch.autograd.grad(y.square().sum(), (x, flow))]

    def body(mesh):
        own = shard(x, layout_at(mesh, x.shape, x_points))
        return [
            t.full_tensor()
            for t in answer(own, shard(flow, layout_at(mesh, flow.shape, flow_points)))
        ]

    expected = answer(x.requires_grad_(), flow.requires_grad_())
    for found in on_ranks(spatial_of(x_points), body):
        assert_same(found, expected)


@pytest.mark.parametrize("points", [[[0, 10, 24], None, None], [None, [0, 4, 10, 24], [0, 0, 8]]])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_the_nearest_of_two_equally_near_inputs(padding, points):
    """At half the resolution positions are halfway between inputs. Boxes begin at odd inputs."""

    def call(x, flow):
        grid = identity(12, 12, 4) + 0 * flow.movedim(1, -1)
        return F.grid_sample(x, grid, "nearest", padding, align_corners=False)

    halves = [cut and [n // 2 for n in cut] for cut in points]
    check_at_steps(call, randn(1, 2, 24, 24, 8), points, randn(1, 3, 12, 12, 4), halves)


@pytest.mark.parametrize("points", [[[0, 5, 11, 19], None, None], [None, [0, 4, 13], [0, 0, 8]]])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("aligned", [False, True])
def test_derivatives_at_the_inputs(aligned, padding, points):
    """They jump there. Registration begins there, with a displacement of zero."""

    def call(x, flow):
        grid = identity(19, 13, 8, aligned=aligned) + flow.movedim(1, -1)
        return F.grid_sample(x, grid, "bilinear", padding, aligned)

    flow = torch.zeros(1, 3, 19, 13, 8, dtype=torch.float64)
    check_at_steps(call, randn(1, 2, 19, 13, 8), points, flow, points)


def test_of_images_by_cubes():
    flow = randn(2, 2, 8, 7, seed=1)
    check_function(
        lambda x, f: displaced(0.2)(x, f, mode="bicubic", align_corners=False),
        randn(2, 3, 8, 7), (), [[0, 3, 8], [0, 6, 7]],
        beside=[Cut(flow, [[0, 4, 8], None])], second_order=True,
    )  # fmt: skip


def test_of_a_plain_volume_and_at_plain_positions():
    check_function(
        lambda flow, atlas: displaced(0.3)(atlas, flow, align_corners=False),
        randn(2, 3, 6, 5, 4), [randn(2, 1, 7, 7, 7, seed=1)], [[0, 2, 6], None, [0, 1, 4]],
        second_order=True,
    )  # fmt: skip
    check_function(
        lambda x, theta: F.grid_sample(
            x, F.affine_grid(theta, (2, 3, 5, 4, 6), False).tanh(), align_corners=False
        ),
        randn(*SHAPE), [randn(2, 3, 4, seed=1)], [[0, 2, 9], [0, 3, 8], None],
    )  # fmt: skip


def test_affine_map_of_the_network():
    def call(x):
        theta = x.mean((2, 3, 4)).repeat(1, 4).reshape(2, 3, 4)
        grid = F.affine_grid(theta, x.shape, align_corners=True)
        return F.grid_sample(x, grid, align_corners=True)

    check_function(call, randn(*SHAPE), (), [[0, 2, 9], [0, 3, 8], None])


@pytest.mark.parametrize(
    "points",
    [[[0, 2, 4], None, None], [None, [0, 1, 3], None], [[0, 1, 4], [0, 2, 3], None]],
)
def test_an_affine_map_whose_matrices_are_cut(points):
    """Its grid is whole along the axes that cut the matrices."""

    def call(x):
        theta = x.mean(1).reshape(2, 4, 3).transpose(1, 2)
        return F.affine_grid(theta, (2, 1, 3, 2, 4), align_corners=False)

    check_function(call, randn(2, 3, 4, 3, 1), (), points, second_order=True)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: sampled(x, x.new_zeros(1, 3, 3, 3, 3)), RuntimeError),
        (lambda x: sampled(x[:, :, 9:], x.new_zeros(2, 3, 3, 3, 3)), RuntimeError),
        (lambda x: sampled(x[:1], x.new_zeros(2, 3, 3, 3, 3)), RuntimeError),
        (lambda x: sampled(x, x.new_zeros(2, 3, 3, 3, 2)), RuntimeError),
        (lambda x: sampled(x, x.new_zeros(2, 3, 3, 3, 3), "cubic"), ValueError),
        (lambda x: sampled(x, x.new_zeros(2, 3, 3, 3, 3), padding_mode="x"), ValueError),
        (lambda x: F.affine_grid(x[:1, :3, 0, :4, 0], (2, 1, 3, 3, 3), False), RuntimeError),
        (lambda x: F.affine_grid(x[:, :2, 0, :3, 0], (2, 1, 3, 3, 3), False), ValueError),
    ],
)
def test_shapes_and_modes_that_torch_refuses(call, kind):
    whole = randn(2, 3, 9, 8, 7)
    with pytest.raises(kind):
        call(whole)

    def body(mesh):
        with pytest.raises(kind, match=r"grid_sample: |affine_grid: "):
            call(shard(whole, layout_at(mesh, whole.shape, POINTS["2x1x1"])))

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("points", [[0, 3, 3, 5], [0, 0, 5], [0, 5, 5, 5]], ids=str)
def test_ranks_without_positions(mode, points):
    def call(x):
        grid = torch.tanh(x[:, :2]).movedim(1, -1)
        return F.grid_sample(x, grid, mode, align_corners=False)

    check_function(
        call, randn(2, 4, 5, 4), (), [None, points, None], second_order=mode != "nearest"
    )


def test_a_group_without_samples_has_an_empty_grid():
    def body(world):
        mesh = Mesh(world, 2)
        net = parallelize(nets[world.rank], mesh)
        x = torch.ones(1 - mesh.data_index, 2, 4, 4, 4)
        theta = net(distribute_tensor(x, mesh)).mean((2, 3, 4)).view(-1, 3, 4)
        grid = F.affine_grid(theta, x.shape, align_corners=False)
        y = F.grid_sample(distribute_tensor(x, mesh), grid, align_corners=False)
        assert y.shape == x.shape
        (y.sum() / max(1, len(x))).backward()
        return net.weight.grad

    torch.manual_seed(0)
    nets = [nn.Conv3d(2, 12, 3, padding=1)] * 1
    nets.append(deepcopy(nets[0]))
    one, other = run_local(body, 2)
    assert one.abs().max() > 0
    assert torch.equal(one, other)


def latest(mesh):
    """Returns the plans that a mesh keeps of grids."""
    return mesh.session.find(grid_module._LatestPlans)._plans.values()


def test_few_plans_are_kept_of_many_grids():
    """Boxes follow from values, which differ in each step."""
    thetas = randn(60, 1, 3, 4)
    x, points = randn(1, 2, 16, 16, 16), [[0, 3, 9, 16], None, None]
    expected = [
        F.grid_sample(x, F.affine_grid(t, x.shape, False), align_corners=False) for t in thetas
    ]

    def body(mesh):
        cut = shard(x, layout_at(mesh, x.shape, points))
        for theta, whole in zip(thetas, expected, strict=True):
            grid = F.affine_grid(theta, x.shape, False).movedim(-1, 1)
            grid = shard(grid, layout_at(mesh, grid.shape, points)).movedim(1, -1)
            y = F.grid_sample(cut, grid, align_corners=False)
            torch.testing.assert_close(y.full_tensor(), whole, rtol=0, atol=1e-12)
            y.sum().backward()
        return len(latest(mesh))

    assert on_ranks((3, 1, 1), body) == [grid_module._PLANS] * 3


def test_bounded_displacements_gather_a_halo():
    """A rank of four receives less than half of the others' planes."""

    def body(mesh):
        x = shard(randn(1, 1, 64, 4, 4), layout_for_sample(mesh, (1, 1, 64, 4, 4)))
        quarters = [[0, 16, 32, 48, 64], None, None]
        base = identity(64, 4, 4).movedim(-1, 1)
        grid = shard(base, layout_at(mesh, base.shape, quarters)).movedim(1, -1)
        F.grid_sample(x, grid, align_corners=False)
        (plan,) = latest(mesh)
        assert [slot.shape[2] <= 32 for slot in plan.slots] == [True]

    on_ranks((4, 1, 1), body)
