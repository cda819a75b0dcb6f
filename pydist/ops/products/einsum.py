"""Computes einsum, and products that are expressed by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.ops.dims import canonical, canonical_all
from pydist.ops.products.contraction import Labels, contract, require_fit
from pydist.tensor import implements


@implements(torch.einsum)
def einsum(equation: str, *operands: Any) -> Any:
    """Computes torch.einsum; over split labels the ranks add partial sums."""
    tensors: Sequence[Tensor] = operands
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        tensors = operands[0]
    labels, out = _parse(equation, tensors)
    return contract(torch.einsum, tensors, labels, out, partial(torch.einsum, equation))


def _parse(equation: str, tensors: Sequence[Tensor]) -> tuple[list[Labels], Labels]:
    """Parses the labels of the operands and the result; dims in "..." are counted from its end."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(tensors):
        raise RuntimeError(
            f"einsum(): {len(tensors)} operands were given for the equation {equation!r}"
        )
    labels: list[Labels] = [
        _term(term, t.dim(), equation) for term, t in zip(terms, tensors, strict=True)
    ]
    rest = max((tuple(i for i in names if i.startswith(".")) for names in labels), key=len)
    if not arrow:
        letters = sorted(inputs.replace(",", "").replace(".", ""))
        result = "..." * bool(rest) + "".join(i for i in letters if letters.count(i) == 1)
    covered = len(rest) if "..." in result else 0
    return labels, _term(result, len(result.replace("...", "")) + covered, equation)


def _term(term: str, dims: int, equation: str) -> list[str]:
    before, dots, after = term.partition("...")
    covered = dims - len(before) - len(after)
    if covered < 0 or (covered and not dots):
        raise RuntimeError(
            f"einsum(): the term {term!r} of {equation!r} does not fit an operand of {dims} dims"
        )
    return [*before, *(f".{i}" for i in range(covered, 0, -1)), *after]


@implements(torch.bilinear)
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Computes bilinear forms of the last dims of two tensors."""
    require_fit(torch.bilinear, input1, input2, weight, bias)
    y = einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias


@implements(torch.outer, torch.ger, torch.Tensor.outer, torch.Tensor.ger)
def outer(input: Tensor, vec2: Tensor) -> Any:
    """Computes the outer product of two vectors."""
    return contract(torch.outer, [input, vec2], [["i"], ["j"]], ["i", "j"], torch.outer)


@implements(torch.cross, torch.Tensor.cross)
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Computes the cross product of vectors along a dim; by default the first of extent 3."""
    if dim is None:
        dim = next((d for d, n in enumerate(input.shape) if n == 3), -1)
    return linalg_cross(input, other, dim=dim)


@implements(torch.linalg.cross)
def linalg_cross(input: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    """Computes the cross product of vectors along a dim."""
    dim = canonical(dim, input.dim())
    if input.dim() != other.dim() or {input.shape[dim], other.shape[dim]} != {3}:
        raise RuntimeError(
            f"cross product of shapes {list(input.shape)} and {list(other.shape)} along dim {dim}: "
            "equal numbers of dims, and an extent of 3"
        )
    ahead = input.roll(-1, dim) * other.roll(-2, dim)
    return ahead - input.roll(-2, dim) * other.roll(-1, dim)


@implements(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Any:
    """Sums products over the last dims of `a` and the first of `b`, or over given dims."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = (range(a.dim() - dims, a.dim()), range(dims))
    summed = [canonical_all(each, t.dim()) for each, t in zip(dims, (a, b), strict=True)]
    first, second = [f"a{i}" for i in range(a.dim())], [f"b{i}" for i in range(b.dim())]
    for i, j in zip(*summed, strict=True):
        second[j] = first[i]
    left = [i for i in (*first, *second) if (i in first) != (i in second)]
    local = partial(torch.tensordot, dims=tuple(list(each) for each in summed))
    return contract(torch.tensordot, [a, b], [first, second], left, local)
