"""Runs functions and networks on rank-threads, and compares the results with one-device runs.

The bound is that of docs/architecture.md, Numerics: relative to the largest value of the tensor,
and never tighter than the effect of noise in the last bit on torch itself.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pydist import (
    Layout,
    Mesh,
    Partition,
    ShardedTensor,
    Split,
    layout_for_sample,
    parallelize,
    run_local,
)
from pydist.exchange.adjoints import mean_ranks
from pydist.grid import SAMPLE_AXES, SPATIAL_AXES
from support.equivalence.splits import SHAPE

FP64_BOUND = 1e-12

Points = Sequence[int] | None
"""Split points of one dim, [0, ..., extent]; `None` for an unsplit dim."""


class Cut(NamedTuple):
    """Tensor whose last dims are cut at given points, in the order of the mesh's spatial axes."""

    tensor: Tensor
    points: Sequence[Points]


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Returns normal fp64 numbers, equal at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Returns integers of [0, high), equal at every call."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    """Returns max|Δ| / max|expected|; the absolute error if all expected values are zero."""
    assert found.shape == expected.shape, f"{found.shape} instead of {expected.shape}"
    assert found.dtype == expected.dtype, f"{found.dtype} instead of {expected.dtype}"
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((found != expected).sum())
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, 0, (found - expected).abs())
    scale = float(expected.abs().nan_to_num(0, 0, 0).max())
    return float(difference.max()) / (scale if scale > 0 else 1.0)


def jittered(tensor: Tensor, seed: int = 7) -> Tensor:
    """Returns the tensor with noise of one unit in the last place."""
    if not tensor.is_floating_point():
        return tensor
    return (tensor.detach() * noise_like(tensor, seed)).requires_grad_(tensor.requires_grad)


def noise_like(tensor: Tensor, seed: int) -> Tensor:
    """Returns factors one unit in the last place above or below 1."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int64) * 2 - 1
    return 1 + torch.finfo(tensor.dtype).eps * sign.to(tensor.dtype)


def bounds_of(expected: Mapping[str, Tensor], noisy: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns each tensor's error bound: 8 times the effect of noise in the last bit.

    Cancellation makes that effect come in steps: one CPU had an error of 4.0001 times, others less.
    """
    return {
        name: max(FP64_BOUND, 8 * error(noisy[name], reference))
        for name, reference in expected.items()
    }


def assert_equal(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    bounds: Mapping[str, float] | None = None,
) -> None:
    """Checks that every tensor is within its bound; reports all others."""
    assert found.keys() == expected.keys()
    errors = {name: error(found[name], reference) for name, reference in expected.items()}
    allowed = bounds or dict.fromkeys(expected, FP64_BOUND)
    wrong = {name: (e, allowed[name]) for name, e in errors.items() if not e <= allowed[name]}
    assert not wrong, f"error, bound: {wrong}"


def assert_same(
    found: Tensor | Sequence[Tensor | None],
    expected: Tensor | Sequence[Tensor | None],
    *,
    where: str = "",
    zero: float = 0.0,
) -> None:
    """Checks that each tensor is within the bound, or that both are `None`.

    Tensors with no element larger than `zero` count as equal: they are zero except for rounding.
    """
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        found, expected = [found], [expected]
    for i, (mine, whole) in enumerate(zip(found, expected, strict=True)):
        assert (mine is None) == (whole is None), f"{where}, tensor {i}: {mine}, not {whole}"
        if mine is not None and whole is not None:
            off = error(mine.detach(), whole.detach())
            is_zero = zero > 0 and all(float(t.detach().abs().max()) <= zero for t in (mine, whole))
            assert off <= FP64_BOUND or is_zero, f"{where}, tensor {i}: off by {off:.2e}"


def whole_of(x: Tensor) -> Tensor:
    """Returns the full tensor of a sharded one; another as it is."""
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


# -- layouts --------------------------------------------------------------------------------


def layout_at(mesh: Mesh, shape: Sequence[int], points: Sequence[Points]) -> Layout:
    """Returns a layout with given split points of the last three (or fewer) dims."""
    splits: list[Split | None] = [None] * len(shape)
    first = len(shape) - len(points)
    for i, cut in enumerate(points):
        if cut is not None and len(cut) > 2:
            splits[first + i] = Split((SPATIAL_AXES[i],), Partition(cut))
    return Layout(mesh, shape, splits)


def even_points(extent: int, parts: int) -> list[int]:
    """Returns the even partition's split points."""
    return list(Partition.even(extent, parts).points)


def spatial_of(points: Sequence[Points]) -> tuple[int, int, int]:
    """Returns the mesh's spatial shape for the given split points."""
    parts = [1 if cut is None else len(cut) - 1 for cut in points]
    return tuple(parts + [1] * (3 - len(parts)))  # type: ignore[return-value]


def shard(tensor: Tensor, layout: Layout) -> ShardedTensor:
    """Returns this rank's shard of a full tensor, as a leaf."""
    box = layout.box
    index = box.slices
    local = tensor.detach()[index].clone().requires_grad_(tensor.is_floating_point())
    return ShardedTensor.from_local(local, layout)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Runs threads started meanwhile on one core, a different one in each worker of xdist.

    Rank-threads take turns with the interpreter's lock: more cores do not speed them up, and waking
    a thread on another core costs a quarter of their time.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    number = os.getpid() if worker is None else int(worker.removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(before)[number % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def on_ranks(
    spatial: Sequence[int], body: Callable[[Mesh], Any], data: int = 1, **options: Any
) -> list[Any]:
    """Runs `body(mesh)` on every rank-thread of a mesh; returns the results in rank order."""
    others = math.prod(options.get("axes", {}).values())
    with on_one_core():
        return run_local(
            lambda transport: body(Mesh(transport, data, spatial, **options)),
            data * others * math.prod(spatial),
            timeout=120,
        )


def on_shards(
    body: Callable[[ShardedTensor, Mesh], Any],
    spatial: Sequence[int] = (2, 1, 1),
    shape: Sequence[int] = SHAPE,
    **options: Any,
) -> list[Any]:
    """Runs `body(x, mesh)` on every rank, where x = randn(*shape) is an evenly cut leaf."""
    return on_ranks(
        spatial,
        lambda mesh: body(shard(randn(*shape), layout_for_sample(mesh, shape)), mesh),
        **options,
    )


# -- functions ------------------------------------------------------------------------------


def check_function(
    function: Callable[..., Any],
    x: Tensor,
    parameters: Sequence[Tensor] = (),
    points: Sequence[Points] = (),
    *,
    beside: Sequence[Cut] = (),
    second_order: bool = False,
    keep_thin_blocks: bool = True,
    channel: int = 1,
) -> None:
    """Compares output and all gradients of a function, in fp64, between split and one-device runs.

    Args:
        function: called as function(x, *beside, *parameters).
        x: becomes a sharded tensor, cut at `points`.
        parameters: stay plain, equal on all ranks; their gradients count by the mean.
        points: split points of the last dims of `x`, over depth, height, width.
        beside: more operands that become sharded, with their own split points.
        second_order: also compare the gradient of the squared norm of all first gradients.
        keep_thin_blocks: option of the mesh.
        channel: ranks along the mesh's channel axis.
    """
    tensors = [x, *(each.tensor for each in beside)]
    layouts = [points, *(each.points for each in beside)]

    def whole(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        leaves = [
            change(t).detach().clone().requires_grad_(t.is_floating_point())
            for t in (*tensors, *parameters)
        ]
        results = _differentiate(function, leaves, second_order)
        return {name: t.detach() for name, t in results.items()}

    def split(mesh: Mesh) -> dict[str, Tensor]:
        leaves = [
            *(shard(t, layout_at(mesh, t.shape, p)) for t, p in zip(tensors, layouts, strict=True)),
            *(nn.Parameter(p.detach().clone(), p.is_floating_point()) for p in parameters),
        ]
        results = _differentiate(function, leaves, second_order)
        means = {str(i) for i, leaf in enumerate(leaves) if isinstance(leaf, nn.Parameter)}
        return {name: _as_whole(t, mesh, name.lstrip("d") in means) for name, t in results.items()}

    expected = whole(lambda t: t)
    bounds = bounds_of(expected, whole(jittered))
    options: Any = {"keep_thin_blocks": keep_thin_blocks, "axes": {"channel": channel}}
    for found in on_ranks(spatial_of(points), split, **options):
        assert_equal(found, expected, bounds)


def _as_whole(t: Tensor, mesh: Mesh, mean: bool) -> Tensor:
    """Returns a result as this rank sees it: its own copy if several ranks hold one."""
    whole = whole_of(t)
    return (mean_ranks(whole, mesh, SAMPLE_AXES) if mean else whole).detach()


def _differentiate(
    function: Callable[..., Any], leaves: list[Tensor], second_order: bool
) -> dict[str, Tensor]:
    y = function(*leaves)
    results = {"y": y}
    if not y.requires_grad:
        return results
    names = [f"d{i}" for i, leaf in enumerate(leaves) if leaf.requires_grad]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    loss = (y * randn(*y.shape, seed=3)).sum()
    grads = torch.autograd.grad(
        loss, leaves, create_graph=second_order, allow_unused=True, materialize_grads=True
    )
    results |= dict(zip(names, grads, strict=True))
    if second_order:
        penalty: Any = sum((g * g).sum() for g in _true(grads, leaves))
        if penalty.requires_grad:  # False if the function is linear in all leaves
            second = torch.autograd.grad(penalty, leaves, allow_unused=True, materialize_grads=True)
            results |= {f"d{name}": g for name, g in zip(names, second, strict=True)}
    return results


def _true(grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients as users of a parallelized model see them: a parameter's is the mean."""
    x = leaves[0]
    if not isinstance(x, ShardedTensor):
        return list(grads)
    return [
        mean_ranks(g, x.mesh, SAMPLE_AXES) if isinstance(leaf, nn.Parameter) else g
        for g, leaf in zip(grads, leaves, strict=True)
    ]


# -- networks -------------------------------------------------------------------------------


class Task(NamedTuple):
    """Network that a test trains, with its input, target and loss."""

    model: nn.Module
    x: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


class Answer(NamedTuple):
    """Results that one device computes, with the error bound of each."""

    expected: dict[str, Tensor]
    bounds: dict[str, float]


def whole_answer(task: Task) -> Answer:
    """Computes output, loss, gradients and buffers of one step on one device."""
    expected = whole_step(task)
    return Answer(expected, bounds_of(expected, whole_step(task, jittered)))


def check_network(
    task: Task,
    spatial: tuple[int, int, int],
    data: int = 1,
    *,
    answer: Answer | None = None,
    keep_thin_blocks: bool = False,
    axes: Mapping[str, int] | None = None,
    **options: Any,
) -> None:
    """Compares output, loss, gradients and buffers of a network with the one-device run.

    Args:
        task: the task, with the full batch; sample groups get equal contiguous parts of it.
        spatial: the mesh's spatial shape.
        data: number of sample groups.
        answer: result of `whole_answer(task)`, to compare several splits with it.
        keep_thin_blocks: option of the mesh.
        axes: ranks along other axes of the mesh.
        **options: options of `parallelize`.
    """
    expected, bounds = answer or whole_answer(task)

    def rank(mesh: Mesh) -> None:
        own = task._replace(model=copy.deepcopy(task.model))
        # Compared on each rank: the gradients of all ranks together could exceed the memory.
        assert_equal(train_split(own, mesh, **options), expected, bounds)

    on_ranks(spatial, rank, data, keep_thin_blocks=keep_thin_blocks, axes=axes or {})


def whole_step(task: Task, change: Callable[[Tensor], Tensor] = lambda t: t) -> dict[str, Tensor]:
    """Runs forward and backward on one device, after a change of parameters and input."""
    model = copy.deepcopy(task.model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(change(p))
    leaf = change(task.x).detach().clone().requires_grad_()
    y = model(leaf)
    value = task.loss(y, task.target)
    value.backward()
    assert leaf.grad is not None
    return _results(model, y.detach(), value.detach(), leaf.grad)


def train_split(
    task: Task, mesh: Mesh, points: Sequence[Points] | None = None, **options: Any
) -> dict[str, Tensor]:
    """Runs forward and backward on a mesh, and assembles the results as on one device.

    Args:
        task: the task, with the full batch.
        mesh: the mesh.
        points: split points of the input's last dims; by default an even split.
        **options: options of `parallelize`.
    """
    model = parallelize(task.model, mesh, **options)
    mine = group_slice(mesh, task.x.shape[0])
    own = task.x[mine]
    layout = (
        layout_for_sample(mesh, own.shape) if points is None else layout_at(mesh, own.shape, points)
    )
    x = shard(own, layout)
    y = model(x)
    value = task.loss(y, task.target[mine])
    value.backward()
    assert isinstance(x.grad, ShardedTensor)
    grad_x = _all_samples(x.grad.full_tensor(), mesh) / mesh.data_size
    mean = whole_of(value).detach().clone()
    mesh.world.all_reduce(mean)
    return _results(model, _all_samples(whole_of(y).detach(), mesh), mean / mesh.size, grad_x)


def group_slice(mesh: Mesh, batch: int) -> slice:
    """Returns the samples of this rank's group, of an equally divided batch."""
    share = batch // mesh.data_size
    return slice(mesh.data_index * share, (mesh.data_index + 1) * share)


def _all_samples(x: Tensor, mesh: Mesh) -> Tensor:
    return mesh.data.all_gather(x.contiguous()).flatten(0, 1)


def _results(model: nn.Module, y: Tensor, value: Tensor, grad: Tensor) -> dict[str, Tensor]:
    found = {"y": y, "loss": value, "dx": grad}
    for name, p in model.named_parameters():
        if p.grad is not None:  # both on one device and split
            found[f"d {name}"] = p.grad
    for name, b in model.named_buffers():
        if b.is_floating_point():
            found[f"buffer {name}"] = b
    return found
