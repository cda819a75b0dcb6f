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
from pydist.ops.products.contraction import Labels, contract, require_fit
from pydist.tensor import HANDLERS, ShardedTensor, implements
from pydist.tensor.operands import require_broadcastable, use_weight


def _product(func: Callable[..., Tensor], a: Tensor, b: Tensor) -> Any:
    require_fit(func, a, b)
    first, second, out = _labels(a, b)
    return contract(func, [a, b], [first, second], out, func)


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
    return _product(torch.matmul, input, other)


@implements(torch.Tensor.__rmatmul__)
def rmatmul(input: Tensor, other: Tensor) -> Any:
    """Computes the matrix product with swapped operands: `other @ input`."""
    return matmul(other, input)


for _name in ("mm", "bmm", "mv", "dot"):
    for _owner in (torch, torch.Tensor):
        HANDLERS[getattr(_owner, _name)] = partial(_product, getattr(torch, _name))


def _added(
    func: Callable[..., Tensor],
    product_of: Callable[[Tensor, Tensor], Tensor],
    input: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    require_fit(func, input, a, b)
    product = product_of(a, b)
    require_broadcastable(input, product.shape)
    if beta == 0:
        return product * alpha
    return (input * beta + product * alpha).to(product.dtype)


for _name, _product_of in (
    ("addmm", torch.mm),
    ("baddbmm", torch.bmm),
    ("addmv", torch.mv),
    ("addbmm", partial(torch.einsum, "bmk,bkn->mn")),
):
    for _owner in (torch, torch.Tensor):
        HANDLERS[getattr(_owner, _name)] = partial(_added, getattr(torch, _name), _product_of)


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
    require_fit(F.linear, input, weight, bias)
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
