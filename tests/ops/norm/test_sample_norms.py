"""Split instance and group norms equal the one-device run."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import ShardedTensor, distribute_tensor, parallelize
from pydist.comm import LocalTransport
from pydist.errors import NotSupported, UsageError
from support.equivalence import (
    Task,
    assert_same,
    check_function,
    check_network,
    error,
    layout_at,
    on_ranks,
    randn,
    shard,
    spatial_of,
)
from support.equivalence.strategies import cuts

EMPTY = [[0, 2, 5], [0, 1, 4], [0, 0, 3]]
SHAPE = (2, 4, 5, 4, 3)


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


class Case(NamedTuple):
    x: Tensor
    points: list[list[int]]
    groups: int
    affine: list[Tensor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws 1-D to 3-D cases on 2 to 8 ranks, in either memory format, with any affine part."""
    groups = draw(st.sampled_from([1, 2, 3]))
    channels = groups * draw(st.integers(1, 2))
    extents = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda e: max(e) > 1))
    x = randn(draw(st.integers(1, 3)), channels, *extents) + 3
    affine = [randn(channels, seed=seed) for seed in range(1, 1 + draw(st.integers(0, 2)))]
    change = draw(st.sampled_from([lambda x: x, channels_last]))
    return Case(change(x), draw(cuts(extents)), groups, affine)


# Two values always become -1 and 1: without eps their gradient is pure rounding.
EPS = {"eps": 0.1}


@given(case=cases())
@settings(max_examples=15)
def test_instance_norm_to_second_order(case):
    check_function(
        lambda x, *affine: F.instance_norm(x, None, None, *affine, **EPS),
        case.x, case.affine, case.points, second_order=True,
    )  # fmt: skip


@given(case=cases())
@settings(max_examples=15)
def test_group_norm_to_second_order(case):
    check_function(
        lambda x, *affine: F.group_norm(x, case.groups, *affine, **EPS),
        case.x, case.affine, case.points, second_order=True,
    )  # fmt: skip


CALLS = {
    "F.instance_norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.1),
    "torch.instance_norm": lambda x, w, b: torch.instance_norm(
        x, w, b, None, None, True, 0.1, 0.1, False
    ),
    "F.group_norm": lambda x, w, b: F.group_norm(x, 2, weight=w, bias=b, eps=0.1),
    "torch.group_norm": lambda x, w, b: torch.group_norm(x, 2, w, b, 0.1),
    "torch.batch_norm": lambda x, w, b: torch.batch_norm(
        x, w, b, None, None, True, 0.1, 0.1, False
    ),
}


@pytest.mark.parametrize("points", [EMPTY, [[0, 3, 5], None, None], [None] * 3])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_name(call, points):
    check_function(call, randn(*SHAPE), [randn(4, seed=1), randn(4, seed=2)], points)


@pytest.mark.parametrize("norm", ["instance", "group"])
@pytest.mark.parametrize("points", [[0, 0, 1, 3], [0, 1, 2, 3]])
def test_samples_on_several_ranks_to_second_order(norm, points):
    """Each rank normalizes its own samples without an exchange; one rank has no samples."""
    function = {
        "instance": lambda x, w: F.instance_norm(x, weight=w),
        "group": lambda x, w: F.group_norm(x, 2, w),
    }[norm]
    check_function(
        function, randn(3, 4, 6), [randn(4, seed=1)], [points, None, None], second_order=True
    )


def test_checkpointed_with_empty_shards():
    def norm(x, w):
        return F.instance_norm(x * x, weight=w)

    check_function(
        lambda x, w: checkpoint(norm, x, w, use_reentrant=False),
        randn(*SHAPE), [randn(4, seed=1)], EMPTY,
    )  # fmt: skip


# -- running statistics ---------------------------------------------------------------------

MODULES = {
    "affine": {"affine": True},
    "tracked": {"track_running_stats": True},
    "tracked and affine": {"track_running_stats": True, "affine": True, "momentum": 0.3},
}


def network(**options) -> nn.Module:
    norm = nn.InstanceNorm3d(4, **options).double()
    with torch.no_grad():
        for seed, p in enumerate(norm.parameters()):
            p.copy_(randn(4, seed=seed) + 1)
    return norm


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 2, 1)), (2, (2, 1, 1)), (4, (1, 1, 1))])
def test_module(options, data, spatial):
    x, target = randn(4, 4, 5, 4, 3) + 100, randn(4, 4, 5, 4, 3, seed=3)
    check_network(Task(network(**options), x, target, F.mse_loss), spatial, data)


@pytest.mark.parametrize("data", [1, 2])
def test_running_statistics_after_steps_and_evaluation_by_them(data):
    plain = network(**MODULES["tracked and affine"])
    batches = [randn(3, 4, 5, 4, 3, seed=step) + 100 for step in range(3)]
    for x in batches:
        plain(x)
    expected = plain.eval()(batches[0]).detach()

    def body(mesh):
        model = parallelize(network(**MODULES["tracked and affine"]), mesh)
        # The last sample group has fewer samples.
        mine = slice(None) if data == 1 else [slice(0, 2), slice(2, 3)][mesh.data_index]
        for x in batches:
            model(x[mine])
        y = model.eval()(batches[0][mine]).full_tensor().detach()
        assert error(y, expected[mine]) < 1e-12
        return model.running_mean, model.running_var

    first, *others = on_ranks((2, 2, 1), body, data=data)
    assert error(first[0], plain.running_mean) < 1e-12
    assert error(first[1], plain.running_var) < 1e-12
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("kind", [nn.InstanceNorm3d, nn.BatchNorm3d])
@pytest.mark.parametrize("after", [nn.Identity, nn.Tanh], ids=["last", "not last"])
@pytest.mark.parametrize("spatial", [(1, 1, 1), (3, 1, 1)])
def test_running_statistics_in_a_checkpoint(kind, after, samples, spatial):
    """If instance norm is the last to save a tensor, torch updates once, otherwise twice."""
    x = randn(samples, 3, 4, 4, 3)

    def norm_after_a_step(change):
        model = nn.Sequential(kind(3, affine=True, track_running_stats=True), after()).double()
        model = change(model)
        given = x.clone().requires_grad_()
        y = checkpoint(model, given, use_reentrant=False)
        (y.sin().mean()).backward()
        return model[0].running_mean, model[0].running_var, model[0].weight.grad, given.grad

    def body(mesh):
        return norm_after_a_step(lambda model: parallelize(model, mesh))

    expected = norm_after_a_step(lambda model: model)
    for found in on_ranks(spatial, body):
        assert_same(found, expected)


@pytest.mark.parametrize("points", [EMPTY, [[0, 3, 5], None, None]])
def test_given_statistics_to_second_order(points):
    mean, var = randn(4, seed=4), randn(4, seed=5).abs() + 0.5
    check_function(
        lambda x, w, b: F.instance_norm(x, mean, var, w, b, use_input_stats=False),
        randn(*SHAPE), [randn(4, seed=1), randn(4, seed=2)], points, second_order=True,
    )  # fmt: skip


def test_without_a_batch_dim():
    plain = nn.InstanceNorm2d(5, affine=True).double()
    x = randn(5, 4, 3)

    def body(mesh):
        model = copy.deepcopy(plain)
        y = model(shard(x, layout_at(mesh, x.shape, [[0, 1, 4], [0, 2, 3]])))
        return y.full_tensor().detach()

    for y in on_ranks((2, 2, 1), body):
        assert error(y, plain(x).detach()) < 1e-12


# -- precision ------------------------------------------------------------------------------

NORMS = {
    "batch": lambda x, **kw: F.batch_norm(x, None, None, training=True, **kw),
    "instance": F.instance_norm,
    "group": lambda x, **kw: F.group_norm(x, 2, **kw),
}


@pytest.mark.parametrize("change", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_float32_far_from_zero_is_as_exact_as_on_one_device(norm, change):
    """With mean 1e4 and standard deviation 1, E[x²] - E[x]² would lose all digits."""
    x, g = change((randn(2, 4, 24, 16, 16) + 1e4).float()), randn(2, 4, 24, 16, 16, seed=1).float()

    def results(x, g):
        x = x.detach().requires_grad_()
        y = norm(x)
        return y.detach(), torch.autograd.grad(y, x, g)[0]

    exact = results(x.double(), g.double())
    allowed = [4 * (a.double() - b).abs().max() for a, b in zip(results(x, g), exact, strict=True)]
    points = [[0, 2, 15, 24], None, [0, 3, 16]]

    def body(mesh):
        split = shard(x, layout_at(mesh, x.shape, points))
        y = norm(split)
        local = y.to_local()
        (grad,) = torch.autograd.grad(
            local, split.to_local(), shard(g, y.layout).to_local().detach()
        )
        return y.full_tensor(), ShardedTensor.from_local(grad, y.layout).full_tensor()

    for found in on_ranks(spatial_of(points), body):
        for a, b, most in zip(found, exact, allowed, strict=True):
            assert (a.double() - b).abs().max() <= most


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_channels_last_on_one_rank_is_as_exact_as_contiguous_on_one_device(norm):
    """pydist chooses this format, in which torch's own kernel is up to 1,000 times less exact."""
    x = (randn(1, 4, 16, 16, 16) + 8).float()
    exact = norm(x.double())
    own = (norm(x).double() - exact).abs().max()

    def body(mesh):
        split = shard(x.to(memory_format=torch.channels_last_3d), layout_at(mesh, x.shape, [None]))
        return norm(split).full_tensor().detach()

    for y in on_ranks((1, 1, 1), body):
        assert (y.double() - exact).abs().max() <= 4 * own


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["instance", "group"])
def test_narrow_values_have_statistics_in_float32(norm, dtype, autocast):
    """This also holds under autocast on CPU, where torch leaves these calls alone."""
    x, w = (randn(2, 4, 8, 6, 6) + 8).to(dtype), randn(4, seed=1).float()
    exact = NORMS[norm](x.double(), weight=w.double())

    def body(mesh):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = NORMS[norm](distribute_tensor(x, mesh), weight=w)
            assert y.dtype == NORMS[norm](x, weight=w).dtype == dtype
        return y.full_tensor()

    eps = torch.finfo(dtype).eps
    for y in on_ranks((2, 2, 1), body):
        torch.testing.assert_close(y.double(), exact, rtol=eps, atol=eps)


def test_autocast_to_float32_is_followed(monkeypatch):
    """On CUDA, torch's autocast list contains group norm."""
    plain = torch.group_norm
    monkeypatch.setattr(torch, "group_norm", lambda x, *args: plain(x.float(), *args))
    x = randn(*SHAPE).bfloat16()

    def body(mesh):
        return F.group_norm(shard(x, layout_at(mesh, x.shape, EMPTY)), 2).full_tensor().detach()

    for y in on_ranks(spatial_of(EMPTY), body):
        assert error(y, F.group_norm(x.float(), 2)) < 1e-5


# -- exchanges and memory -------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "statistics"), [("batch", 4), ("instance", 8), ("group", 4)])
def test_two_numbers_a_statistic_travel_once_each_way(norm, statistics, monkeypatch):
    sent = []
    for name in ("all_gather", "all_gather_async", "all_reduce", "all_reduce_async"):
        original = getattr(LocalTransport, name)

        def counted(self, tensor, *args, original=original, name=name, **kwargs):
            if self.rank == 0 and tensor.is_floating_point():  # not the checks of the mesh
                sent.append((name, tensor.numel()))
            return original(self, tensor, *args, **kwargs)

        monkeypatch.setattr(LocalTransport, name, counted)

    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        mesh.world.barrier()
        if mesh.rank == 0:
            sent.clear()
        NORMS[norm](x).to_local().sum().backward()

    on_ranks((2, 1, 1), body)
    assert sent == [("all_gather_async", 2 * statistics), ("all_reduce_async", 2 * statistics)]


@pytest.mark.parametrize("change", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_memory_format_is_kept(norm, change):
    x = change(randn(*SHAPE))

    def body(mesh):
        layout = layout_at(mesh, x.shape, [[0, 2, 5], None, None])
        box = layout.box
        local = change(x[:, :, box.lo[2] : box.hi[2]]).requires_grad_()
        y = norm(ShardedTensor.from_local(local, layout)).to_local()
        (grad,) = torch.autograd.grad(y, local, change(y.detach()))
        assert y.stride() == grad.stride() == local.stride()

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_whole_tensor_goes_to_torch(norm):
    """Equal autograd nodes give equal bits."""
    x = randn(*SHAPE).float()
    expected = norm(x.clone().requires_grad_())

    def body(mesh):
        y = norm(shard(x, layout_at(mesh, x.shape, [None] * 3)))
        assert type(y.to_local().grad_fn) is type(expected.grad_fn)
        return y.full_tensor()

    for y in on_ranks((1, 1, 1), body):
        assert torch.equal(y, expected)


def in_any_strides(seed: int, *shape: int) -> Tensor:
    """Returns a dense tensor: random dim order in memory, any strides for dims of extent 1."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(shape), generator=generator).tolist()
    x = randn(*(shape[d] for d in order), seed=seed).permute([order.index(d) for d in range(4)])
    odd = torch.randint(1, 200, (4,), generator=generator).tolist()
    return x.as_strided(
        shape, [s if n > 1 else o for n, s, o in zip(shape, x.stride(), odd, strict=True)]
    )


@pytest.mark.parametrize("norm", [*NORMS, "evaluated batch"])
def test_gradients_of_whole_tensors_are_right_in_any_strides(norm):
    """torch's own gradients are wrong if dims of extent 1 leave the format ambiguous (2.13)."""
    mean, var = randn(3, seed=1), randn(3, seed=2).abs() + 0.5
    function = {**NORMS, "group": lambda x: F.group_norm(x, 3)}.get(
        norm, lambda x: F.batch_norm(x, mean, var)
    )

    def body(mesh):
        for seed in range(60):
            shape = (1 + seed % 2, 3, *[(3, 1), (1, 4), (3, 4)][seed % 3])
            x, g = in_any_strides(seed, *shape), in_any_strides(seed + 100, *shape)
            split = ShardedTensor.from_local(x.requires_grad_(), layout_at(mesh, shape, [None] * 2))
            (found,) = torch.autograd.grad(function(split).to_local(), x, g)
            plain = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            g = g.clone(memory_format=torch.contiguous_format)
            (expected,) = torch.autograd.grad(function(plain), plain, g)
            assert error(found, expected) < 1e-10, (shape, x.stride(), g.stride())

    on_ranks((1, 1, 1), body)


# -- refusals -------------------------------------------------------------------------------

ONE_VALUE = {
    "instance": (F.instance_norm, (2, 3, 1, 1, 1), "more than 1 spatial element"),
    "group": (lambda x: F.group_norm(x, 3), (1, 3, 1, 1, 1), "more than 1 value per channel"),
}


@pytest.mark.parametrize(("norm", "shape", "words"), ONE_VALUE.values(), ids=ONE_VALUE)
def test_one_value_is_refused_in_torchs_words_by_the_global_count(norm, shape, words):
    with pytest.raises(ValueError, match=words):
        norm(torch.ones(shape))

    def body(mesh):
        with pytest.raises(UsageError, match=words):
            norm(shard(torch.ones(shape), layout_at(mesh, shape, [[0, 1, 1], None, None])))
        # Each rank has one of two values.
        pair = randn(1, 3, 2, 1, 1)
        y = norm(shard(pair, layout_at(mesh, pair.shape, [[0, 1, 2], None, None])))
        assert error(y.full_tensor().detach(), norm(pair)) < 1e-12

    on_ranks((2, 1, 1), body)


def test_what_does_not_fit_is_named():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        with pytest.raises(UsageError, match="4 channels can't be divided into 3 groups"):
            F.group_norm(x, 3)
        with pytest.raises(UsageError, match=r"norm of 4 channels got a weight of shape \(3,\)"):
            F.instance_norm(x, weight=torch.ones(3).double())
        plain = randn(*SHAPE)
        for norm in NORMS.values():
            with pytest.raises(NotSupported, match="the input is plain"):
                norm(plain, weight=x[0, :, 0, 0, 0])

    on_ranks((2, 1, 1), body)


# -- next to other layers --------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.InstanceNorm3d(4), nn.GroupNorm(2, 4), nn.BatchNorm3d(4)])
@pytest.mark.parametrize(
    "parametrized",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm],
)
def test_behind_convolutions_with_normed_weights(norm, parametrized):
    """Weight norms run on plain tensors; power iterations agree on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrized(nn.Conv3d(2, 4, 3, padding=1)), copy.deepcopy(norm), nn.LeakyReLU(),
        parametrized(nn.Conv3d(4, 3, 3, stride=2)),
    ).double()  # fmt: skip
    task = Task(model, randn(2, 2, 7, 6, 5), randn(2, 3, 3, 2, 2, seed=1), F.mse_loss)
    for data, spatial in ((1, (2, 2, 1)), (2, (1, 2, 1))):
        check_network(task, spatial, data)
