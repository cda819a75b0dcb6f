"""Split against whole: runs a function or a network on rank-threads and on plain tensors.

The bound is that of docs/architecture.md, Numerics: relative to the largest value of the tensor
itself, and never tighter than torch's own answer to noise in the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pydist
from pydist.comm import run_local
from pydist.layout import Layout, Split, layout_for_sample
from pydist.mesh import SPATIAL_AXES, Mesh
from pydist.partition import Partition
from pydist.tensor import ShardedTensor

FP64_BOUND = 1e-12


def error(found: Tensor, expected: Tensor) -> float:
    """max|Δ| / max|expected|; absolute where everything expected is zero."""
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale if scale > 0 else 1.0)


def jittered(tensor: Tensor, seed: int = 7) -> Tensor:
    """The tensor with noise of one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int64) * 2 - 1
    noisy = tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * sign.to(tensor.dtype))
    return noisy.requires_grad_(tensor.requires_grad)


def assert_equal(
    found: dict[str, Tensor], expected: dict[str, Tensor], noisy: dict[str, Tensor]
) -> None:
    """Every tensor within the bound; reports all that are not."""
    assert found.keys() == expected.keys()
    wrong = {}
    for name, reference in expected.items():
        bound = max(FP64_BOUND, 4 * error(noisy[name], reference))
        if not error(found[name], reference) <= bound:
            wrong[name] = (error(found[name], reference), bound)
    assert not wrong, f"error, bound: {wrong}"


def layout_at(mesh: Mesh, shape: Sequence[int], points: Sequence[Sequence[int] | None]) -> Layout:
    """A layout cut at given points of the last three (or fewer) dims; `None` leaves a dim whole."""
    splits: list[Split | None] = [None] * len(shape)
    first = len(shape) - len(points)
    for i, cut in enumerate(points):
        if cut is not None and len(cut) > 2:
            splits[first + i] = Split((SPATIAL_AXES[i],), Partition(cut))
    return Layout(mesh, shape, splits)


def even_points(extent: int, parts: int) -> list[int]:
    return list(Partition.even(extent, parts).points)


def random_points(draw_int: Callable[[int, int], int], extent: int, parts: int) -> list[int]:
    """Random split points; blocks may be thin or empty."""
    inner = sorted(draw_int(0, extent) for _ in range(parts - 1))
    return [0, *inner, extent]


def check_function(
    function: Callable[..., Any],
    x: Tensor,
    parameters: Sequence[Tensor] = (),
    points: Sequence[Sequence[int] | None] = (),
    *,
    second_order: bool = False,
) -> None:
    """Outputs and all gradients of `function(x, *parameters)`, split against whole, in fp64."""
    spatial = [1, 1, 1]
    for i, cut in enumerate(points):
        spatial[i] = len(cut) - 1 if cut is not None else 1
    expected = _whole(function, x, parameters, second_order)
    noisy = _whole(function, jittered(x), [jittered(p) for p in parameters], second_order)
    ranks = spatial[0] * spatial[1] * spatial[2]

    def rank(transport: Any) -> dict[str, Tensor]:
        mesh = Mesh(transport, 1, spatial)
        layout = layout_at(mesh, x.shape, points)
        box = layout.box
        index = tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))
        local = x.detach()[index].clone().requires_grad_(x.is_floating_point())
        own = [p.detach().clone().requires_grad_() for p in parameters]
        sharded = ShardedTensor.from_local(local, layout)
        results = _differentiate(function, sharded, own, second_order)
        return {name: _whole_value(t, mesh) for name, t in results.items()}

    for found in run_local(rank, ranks):
        assert_equal(found, expected, noisy)


def _whole_value(t: Tensor, mesh: Mesh) -> Tensor:
    """A sharded result gathered; a plain gradient's mean over the group, as the convention says."""
    if isinstance(t, ShardedTensor):
        return t.full_tensor().detach()
    mean = t.detach().clone(memory_format=torch.contiguous_format)
    mesh.sample.all_reduce(mean)
    return mean / mesh.sample_size


def _whole(
    function: Callable[..., Any], x: Tensor, parameters: Sequence[Tensor], second_order: bool
) -> dict[str, Tensor]:
    leaf = x.detach().clone().requires_grad_(x.is_floating_point())
    own = [p.detach().clone().requires_grad_() for p in parameters]
    results = _differentiate(function, leaf, own, second_order)
    return {name: t.detach() for name, t in results.items()}


def _differentiate(
    function: Callable[..., Any], x: Tensor, parameters: Sequence[Tensor], second_order: bool
) -> dict[str, Tensor]:
    y = function(x, *parameters)
    results = {"y": y}
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    loss = (y * probe).sum()
    leaves = [x, *parameters]
    names = ["dx", *(f"dp{i}" for i in range(len(parameters)))]
    grads = torch.autograd.grad(loss, leaves, create_graph=second_order)
    results |= dict(zip(names, grads, strict=True))
    if second_order:
        # A gradient penalty, through the norm of every first gradient.
        penalty = sum((g * g).sum() for g in _truly(grads, x))
        if penalty.requires_grad:  # not where the function is linear in everything
            second = torch.autograd.grad(
                penalty, leaves, allow_unused=True, materialize_grads=True
            )
            results |= {f"d{name}": g for name, g in zip(names, second, strict=True)}
    return results


def _truly(grads: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """Gradients as users see them: a parameter's is the mean over the group."""
    if not isinstance(x, ShardedTensor):
        return list(grads)
    from pydist.comm.reducer import _MeanWorld

    return [
        g if isinstance(g, ShardedTensor) else _MeanWorld.apply(g, x.mesh.sample) for g in grads
    ]


def check_network(
    model: nn.Module,
    x: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,
    spatial: tuple[int, int, int],
    data: int = 1,
    **options: Any,
) -> None:
    """Output, loss, input and parameter gradients and buffers of a network, split against whole.

    `x` and `target` hold the whole batch; sample groups take equal contiguous parts of it.
    """
    expected = _train_whole(model, x, loss, target, noise=False)
    noisy = _train_whole(model, x, loss, target, noise=True)
    ranks = data * spatial[0] * spatial[1] * spatial[2]
    results = run_local(
        lambda t: train_split(copy.deepcopy(model), x, loss, target, Mesh(t, data, spatial), **options),
        ranks,
        timeout=240,
    )
    for found in results:
        assert_equal(found, expected, noisy)


def _train_whole(
    model: nn.Module,
    x: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,
    *,
    noise: bool,
) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    leaf = x.detach().clone().requires_grad_()
    if noise:
        leaf = jittered(leaf).detach().requires_grad_()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(jittered(p))
    y = model(leaf)
    value = loss(y, target)
    value.backward()
    return _results(model, y.detach(), value.detach(), leaf.grad)


def train_split(
    model: nn.Module,
    x: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    target: Tensor,
    mesh: Mesh,
    **options: Any,
) -> dict[str, Tensor]:
    """One forward and backward on a mesh, with the results put together as one device has them."""
    model = pydist.parallelize(model, mesh, **options)
    share = x.shape[0] // mesh.data_size
    mine = slice(mesh.data_index * share, (mesh.data_index + 1) * share)
    layout = layout_for_sample(mesh, x[mine].shape)
    box = layout.box
    index = tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))
    local = x[mine][index].clone().requires_grad_()
    sharded = ShardedTensor.from_local(local, layout)
    y = model(sharded)
    value = loss(y, target[mine])
    value.backward()
    grad = sharded.grad
    assert grad is not None
    full = y.full_tensor().detach() if isinstance(y, ShardedTensor) else y.detach()
    grad_x = mesh.data.all_gather(grad.full_tensor().contiguous()).flatten(0, 1) / mesh.data_size
    y_all = mesh.data.all_gather(full.contiguous()).flatten(0, 1)
    mean = value.detach().clone()
    mesh.world.all_reduce(mean)
    return _results(model, y_all, mean / mesh.size, grad_x)


def _results(model: nn.Module, y: Tensor, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
    found = {"y": y, "loss": value, "dx": grad}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found[f"d {name}"] = p.grad
    for name, b in model.named_buffers():
        if b.is_floating_point():
            found[f"buffer {name}"] = b
    return found
