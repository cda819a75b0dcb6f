"""Cases of the tests that PhysicsNeMo has for its ShardTensor: all equal to one device.

Reduced in size. Convolution, pooling, interpolation and reductions by loops over the same kernels,
paddings, strides and meshes; attention, neighborhoods, indices and points one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.equivalence import Cut, Points, check_function, randint, randn

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class Case(NamedTuple):
    """A function of a split tensor, of others beside it, and of plain parameters."""

    function: Callable[..., Any]
    x: Tensor
    points: Sequence[Points]
    parameters: Sequence[Tensor] = ()
    beside: Sequence[Cut] = ()


def cuts(dims: int, extent: int) -> list[list[Points]]:
    """Returns the first dim in uneven halves, and the first two where there are two."""
    halves: Points = [0, extent // 2 + 1, extent]
    found: list[list[Points]] = [[halves, *[None] * (dims - 1)]]
    return [*found, [halves, halves, *[None] * (dims - 2)]] if dims > 1 else found


def windows() -> Iterator[tuple[str, Case]]:
    """Yields convolutions, transposed convolutions and pools of one to three dims."""
    for dims in (1, 2, 3):
        x = randn(2, 3, *[8] * dims)
        for points in cuts(dims, 8):
            parts = f"{dims}d, {sum(p is not None for p in points)} cut"
            for kernel, padding, stride in itertools.product((2, 3), (0, 1), (1, 2)):
                w, b = randn(4, 3, *[kernel] * dims, seed=1), randn(4, seed=2)

                def convolved(x, w, b, dims=dims, stride=stride, padding=padding):
                    return CONVOLUTIONS[dims](x, w, b, stride=stride, padding=padding)

                name = f"conv {parts}, {kernel} {padding} {stride}"
                yield name, Case(convolved, x, points, (w, b))
            for kernel, stride in itertools.product((2, 3), (1, 2)):
                w, b = randn(3, 4, *[kernel] * dims, seed=1), randn(4, seed=2)

                def transposed(x, w, b, dims=dims, stride=stride):
                    return TRANSPOSED[dims](x, w, b, stride=stride)

                yield f"transposed {parts}, {kernel} {stride}", Case(transposed, x, points, (w, b))
            for pools, kernel, stride in itertools.product((AVERAGES, MAXIMA), (2, 4), (2, 4)):
                pool = pools[dims]

                def pooled(x, pool=pool, kernel=kernel, stride=stride):
                    return pool(x, kernel, stride)

                yield f"{pool.__name__} {parts}, {kernel} {stride}", Case(pooled, x, points)


def group_norm(groups, x, *weights):
    return F.group_norm(x, groups, *weights)


def layer_norm(x, *weights):
    return F.layer_norm(x, x.shape[-1:], *weights)


def shapes() -> Iterator[tuple[str, Case]]:
    """Yields padding, interpolation, norms, views and reductions."""
    image, volume = randn(2, 4, 8, 6), randn(2, 4, 6, 4, 4)
    for points in ([[0, 5, 8], None], [[0, 5, 8], [0, 3, 6]]):
        for mode, amounts in itertools.product(
            ("constant", "reflect", "replicate"), ((2, 2, 2, 2), (1, 2, 3, 4), (0, 1, 0, 1))
        ):
            padded = partial(F.pad, pad=amounts, mode=mode)
            yield f"pad {mode} {amounts} {len(points[1] or [])}", Case(padded, image, points)
        for factor in (2, 3):
            larger = partial(F.interpolate, scale_factor=factor)
            yield f"nearest 2d {factor} {len(points[1] or [])}", Case(larger, image, points)
            deep = [[0, 4, 6], points[1] and [0, 2, 4], None]
            yield f"nearest 3d {factor} {len(points[1] or [])}", Case(larger, volume, deep)
    rows = [[0, 5, 8], None]
    for groups, affine in itertools.product((1, 2, 4), (True, False)):
        w = [randn(4, seed=1), randn(4, seed=2)] if affine else []
        yield f"group norm {groups} {affine}", Case(partial(group_norm, groups), image, rows, w)
    tokens = randn(2, 16, 8)
    for affine in (True, False):
        w = [randn(8, seed=1), randn(8, seed=2)] if affine else []
        yield f"layer norm {affine}", Case(layer_norm, tokens, [[0, 9, 16], None], w)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "merge last two": lambda x: x.view(2, 4, 48),
        "split last": lambda x: x.view(2, 4, 8, 2, 3),
        "flatten to 2d": lambda x: x.reshape(-1, 6),
        "all": lambda x: x.view(-1),
        "round trip": lambda x: x.view(-1).view(2, 4, 8, 6),
        "merge batch and channel": lambda x: x.view(8, 8, 6),
        "split the sharded dim": lambda x: x.view(2, 4, 2, 4, 6),
        "mixes": lambda x: x.reshape(2, 4, 6, 8),
        "unbind": lambda x: x.unbind(1)[1] + sum(row.sum() for row in x.unbind(2)),
        "select": lambda x: x[:, 1] * x[:, :, 5:6].sum(),
        "consecutive": lambda x: x.mean(2, keepdim=True).sum(1).exp(),
        "largest": lambda x: x.max(dim=2).values,
    }
    for dim in range(-5, 5):
        views[f"unsqueeze {dim}"] = lambda x, dim=dim: x.unsqueeze(dim)
    for name, dim in itertools.product(("sum", "mean", "amin", "amax"), ((), 0, (0, 1), 2, (2,))):
        views[f"{name} {dim}"] = lambda x, name=name, dim=dim: getattr(x, name)(dim)
    for name, function in views.items():
        yield name, Case(function, image, rows)


def attentions() -> Iterator[tuple[str, Case]]:
    """Yields attention over split tokens, fused, written out and by torch's layers."""
    half: list[Points] = [[0, 20, 32], None]
    q, k, v = (randn(2, 4, 32, 8, seed=seed) for seed in range(3))

    def fused(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def products(q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v

    def sums(q, k, v):
        return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)

    for function in (fused, causal, products, sums):
        yield function.__name__, Case(function, q, half, beside=[Cut(k, half), Cut(v, half)])

    def replicated(k, v, q):
        return fused(q, k, v)

    yield "replicated queries", Case(replicated, k, half, [q], [Cut(v, half)])
    yield "replicated keys", Case(fused, q, half, [k, v])

    volume, w, b = randn(2, 8, 4, 3, 2), randn(24, 8, seed=1) / 3, randn(24, seed=2)
    out, wide, narrow = randn(8, 8, seed=3) / 3, randn(16, 8, seed=4), randn(8, 16, seed=5)

    def multi_head(x, w, b, out, *more):
        tokens = x.flatten(2).transpose(1, 2)
        layer = nn.MultiheadAttention(8, 2, batch_first=True, device="meta")
        given = {"in_proj_weight": w, "in_proj_bias": b, "out_proj.weight": out}
        given["out_proj.bias"] = b[:8]
        return torch.func.functional_call(layer, given, (tokens, tokens, tokens))[0]

    def encoder(x, w, b, out, wide, narrow):
        tokens = x.flatten(2).transpose(1, 2)
        tokens = F.layer_norm(tokens + multi_head(x, w, b, out), (8,))
        return tokens + F.gelu(tokens @ wide.T) @ narrow.T

    cut: list[Points] = [[0, 3, 4], None, None]
    yield "multi-head over a volume", Case(multi_head, volume, cut, (w, b, out))
    yield "encoder over a volume", Case(encoder, volume, cut, (w, b, out, wide, narrow))

    def neighborhood(x):
        keys = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1).flatten(4)
        scores = (x.unsqueeze(-1) * keys).sum(1, keepdim=True).softmax(-1)
        return (scores * keys).sum(-1)

    image, rows = randn(2, 3, 8, 6), [[0, 5, 8], None]
    yield "neighborhood", Case(neighborhood, image, rows)
    yield "columns", Case(lambda x: F.unfold(x, 3, padding=1), image, rows)

    def swin(x, window):
        parts = einops.rearrange(x, "b c (h p) (w q) -> b (h w) (p q) c", p=window, q=2)
        return fused(parts, parts * 2, parts - 1)

    for window in (2, 4, 8):
        yield f"windows of {window}", Case(partial(swin, window=window), image, rows)


def points() -> Iterator[tuple[str, Case]]:
    """Yields calls on points: neighbors, search within a radius, indices, linear layers."""
    clouds, others = randn(24, 3), randn(18, 3, seed=1)
    cut: list[Points] = [[0, 15, 24], None]
    their: list[Points] = [[0, 7, 18], None]

    def nearest(x, y):
        distances, index = torch.cdist(x, y).topk(3, largest=False)
        return distances + y[index].sum(-1)

    def within(x, y):
        near = (torch.cdist(x, y) < 1.5).to(x.dtype)
        return near @ y / near.sum(-1, keepdim=True).clamp(min=1)

    for function in (nearest, within):
        yield f"{function.__name__}, one replicated", Case(function, clouds, cut, [others])
        beside = [Cut(others, their)]
        yield f"{function.__name__}, both sharded", Case(function, clouds, cut, beside=beside)
    for shape in ((2, 12, 8), (2, 13, 8), (2, 12, 4, 8), (2, 13, 4, 8)):
        at: list[Points] = [[0, 7, shape[1]], *[None] * (len(shape) - 2)]
        yield f"linear {shape}", Case(F.linear, randn(*shape), at, [randn(5, 8, seed=1)])
    image, rows = randn(2, 4, 8, 6), [[0, 5, 8], None]
    index = Cut(randint(8, 5), [[0, 3, 5]])
    yield (
        "index_select, sharded index",
        Case(lambda x, i: x.index_select(2, i), image, rows, beside=[index]),
    )
    yield (
        "index_select, plain index",
        Case(lambda x: x.index_select(2, torch.tensor([7, 0, 3, 3])), image, rows),
    )
    along = Cut(randint(8, 2, 4, 8, 6), rows)
    yield "gather", Case(lambda x, i: x.gather(2, i), image, rows, beside=[along])


def others() -> Iterator[tuple[str, Case]]:
    """Yields spectra, sampling, and calls that mix a split dim."""
    image, rows = randn(2, 3, 8, 6), [[0, 5, 8], None]
    theta = randn(2, 2, 3, seed=1) / 2

    def sampled(x, grid):
        return F.grid_sample(x, grid, align_corners=False)

    def warped(x, theta):
        grid = F.affine_grid(theta, [*x.shape], align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    grid = randn(2, 8, 6, 2, seed=2) / 2
    beside = [Cut(grid, [[0, 5, 8], None, None])]
    yield "grid_sample", Case(sampled, image, rows, beside=beside)
    yield (
        "grid_sample, uncut source",
        Case(lambda grid, x: sampled(x, grid), grid, [[0, 5, 8], None, None], [image]),
    )
    yield "affine_grid", Case(warped, image, rows, [theta])

    def coordinates(x):
        lines = [torch.linspace(-1, 1, n, dtype=x.dtype) for n in x.shape[2:]]
        both = torch.stack(torch.meshgrid(*lines, indexing="ij"))
        return torch.cat([x, both.expand(len(x), -1, -1, -1)], 1)

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "fftn": lambda x: torch.fft.ifftn(torch.fft.fftn(x, dim=(2, 3)) ** 2, dim=(2, 3)).real,
        "fft of an uncut dim": lambda x: torch.fft.fft(x, dim=3).abs(),
        "cumsum": lambda x: x.cumsum(2),
        "coordinates": coordinates,
        "positive": lambda x: x[x > 0].mean(),
        "masked_select": lambda x: x.masked_select(x > 0.5),
        "sort": lambda x: x.sort(2).values,
        "median": lambda x: x.median(2).values,
        "quantile": lambda x: x.quantile(torch.tensor([0.1, 0.75], dtype=x.dtype), dim=2),
    }
    for name, function in calls.items():
        yield name, Case(function, image, rows)
    weights = [randn(12, 3, seed=1), randn(12, 4, seed=2), randn(12, seed=3), randn(12, seed=4)]

    def recurrent(x, *weights):
        layer = nn.GRU(3, 4, device="meta")
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        given = dict(zip(names, weights, strict=True))
        rows = x.permute(2, 0, 3, 1).flatten(1, 2)
        return torch.func.functional_call(layer, given, (rows,))[0]

    yield "GRU along depth", Case(recurrent, image, rows, weights)


CASES = dict(itertools.chain(windows(), shapes(), attentions(), points(), others()))


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    case = CASES[name]
    check_function(case.function, case.x, case.parameters, case.points, beside=case.beside)


def test_another_type_of_the_same_bits():
    def bits(x):
        return x.detach().view(torch.int64) >> 52

    check_function(bits, randn(2, 4, 8, 6), (), [[0, 5, 8], None])
