"""Computes matrix products and linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.exchange.own_slice import is_sharded_weight
from pydist.ops.channels import free_channel_axis, on_plain, output_split
from pydist.ops.products.contraction import Labels, contract
from pydist.tensor import HANDLERS, ShardedTensor, implements
from pydist.tensor.operands import require_broadcastable, use_weight


def _product(func: Callable[..., Tensor], a: Tensor, b: Tensor) -> Any:
    first, second, out = _labels(a, b)
    _require_inner(func, a, a.shape[-1], b, b.shape[-2 if b.dim() > 1 else -1])
    return contract(func, [a, b], [first, second], out, func)


def _require_inner(func: Callable[..., Any], a: Tensor, n: int, b: Tensor, m: int) -> None:
    """Raises if the extents of the summed dim differ, as blocks of extent 1 would broadcast."""
    if n != m:
        raise RuntimeError(
            f"{func.__name__}: the shapes {list(a.shape)} and {list(b.shape)} can't be multiplied"
        )


def _labels(a: Tensor, b: Tensor) -> tuple[Labels, Labels, Labels]:
    """Labels the dims of two factors of torch.matmul, and of their product."""
    batch = [f"b{i}" for i in range(max(a.dim(), b.dim()) - 2, 0, -1)]
    rows, columns = ["m"] * (a.dim() > 1), ["n"] * (b.dim() > 1)
    first = [*batch[len(batch) - max(0, a.dim() - 2) :], *rows, "k"]
    second = [*batch[len(batch) - max(0, b.dim() - 2) :], "k", *columns]
    return first, second, [*batch, *rows, *columns]


@implements(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.linalg.matmul)
def matmul(input: Tensor, other: Tensor) -> Any:
    """Computes the product of matrices or vectors, or of batches of matrices."""
    if 0 in (input.dim(), other.dim()):
        raise RuntimeError("both arguments to matmul need to be at least 1D")
    return _product(torch.matmul, input, other)


@implements(torch.Tensor.__rmatmul__)
def rmatmul(input: Tensor, other: Tensor) -> Any:
    """Computes the matrix product with swapped operands: `other @ input`."""
    return matmul(other, input)


def _of_dims(name: str, first: int, second: int) -> None:
    """Registers torch.{name}, a matrix product of tensors with `first` and `second` dims."""
    func = getattr(torch, name)

    @implements(func, getattr(torch.Tensor, name))
    def handler(a: Tensor, b: Tensor) -> Any:
        if (a.dim(), b.dim()) != (first, second):
            raise RuntimeError(
                f"{name}: tensors of {first} and {second} dims expected, got {a.dim()} and "
                f"{b.dim()}"
            )
        if name == "bmm" and a.shape[0] != b.shape[0]:
            raise RuntimeError(f"bmm: batches of {a.shape[0]} and {b.shape[0]} do not fit together")
        return _product(func, a, b)


for _name, _first, _second in (("mm", 2, 2), ("bmm", 3, 3), ("mv", 2, 1), ("dot", 1, 1)):
    _of_dims(_name, _first, _second)


def _added(
    func: Any, input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    product = func(a, b)
    require_broadcastable(input, product.shape)
    if beta == 0:
        return product * alpha
    return (input * beta + product * alpha).to(product.dtype)


def _sum_of_products(a: Tensor, b: Tensor) -> Any:
    labels = ("bmk", "bkn")
    return contract(torch.addbmm, [a, b], labels, "mn", partial(torch.einsum, "bmk,bkn->mn"))


for _name, _function in (
    ("addmm", torch.mm),
    ("baddbmm", torch.bmm),
    ("addmv", torch.mv),
    ("addbmm", _sum_of_products),
):
    for _owner in (torch, torch.Tensor):
        HANDLERS[getattr(_owner, _name)] = partial(_added, _function)


@implements(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Applies a linear layer over the last dim; if it is split, the ranks add partial sums.

    Otherwise a mesh with a channel axis splits the outputs; see `pydist.ops.channels`.
    """
    if not isinstance(input, ShardedTensor):
        return on_plain(F.linear, linear, input, weight, bias)
    for each in (weight, bias):
        if each is not None:
            use_weight(each, input.mesh)
    if is_sharded_weight(weight):
        input = free_channel_axis(input)
    _require_inner(F.linear, input, input.shape[-1], weight, weight.shape[-1])
    rows = [f"b{i}" for i in range(input.dim() - 1)]
    out = ["n"] * (weight.dim() - 1)
    operands, labels = [input, weight], [[*rows, "k"], [*out, "k"]]
    # A weight that is data, or the transpose of a sharded one, may be split along the summed dim.
    sums = any(isinstance(x, ShardedTensor) and x.layout.splits[-1] is not None for x in operands)
    if bias is None or (not sums and bias.dim() == len(out)):
        if bias is not None:
            operands.append(bias)
            labels.append(out)
        is_cut = not out or isinstance(weight, ShardedTensor)
        split = None if is_cut else output_split(input.layout, weight.shape[0])
        preset = None if split is None else {"n": split}
        return contract(F.linear, operands, labels, [*rows, *out], F.linear, preset)
    product = contract(F.linear, operands, labels, [*rows, *out], F.linear)
    require_broadcastable(bias, product.shape)
    return (product + bias).to(product.dtype)
