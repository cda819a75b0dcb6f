"""Slow NumPy definition of boundary convolution and its adjoints, one kernel index at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Attributes:
    """Attributes of a 3-D convolution, and the global coordinates of element 0 of its arrays."""

    in_lo: Triple
    out_lo: Triple
    stride: Triple
    padding: Triple
    dilation: Triple
    groups: int


def _links(
    attributes: Attributes, in_shape: Triple, out_shape: Triple, kernel: Triple
) -> Iterator[tuple[Triple, tuple, tuple]]:
    """Yields each kernel index with the (output, input) index grids that it connects."""
    for k in itertools.product(*map(range, kernel)):
        outs, ins = [], []
        for dim in range(3):
            o = np.arange(out_shape[dim])
            i = (
                (o + attributes.out_lo[dim]) * attributes.stride[dim]
                - attributes.padding[dim]
                + k[dim] * attributes.dilation[dim]
                - attributes.in_lo[dim]
            )
            inside = (i >= 0) & (i < in_shape[dim])
            outs.append(o[inside])
            ins.append(i[inside])
        yield k, np.ix_(*outs), np.ix_(*ins)


def _grouped(x: np.ndarray, weight: np.ndarray, y: np.ndarray, groups: int) -> list[np.ndarray]:
    """Returns views with grouped channel dims: [N, G, Ci, ...], [G, Co, Ci, ...]."""
    return [
        x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]),
        weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]),
        y.reshape(y.shape[0], groups, y.shape[1] // groups, *y.shape[2:]),
    ]


def forward(x: np.ndarray, weight: np.ndarray, y: np.ndarray, attributes: Attributes) -> None:
    """Adds the contributions of x to `y`, which must be contiguous."""
    xg, wg, yg = _grouped(x, weight, y, attributes.groups)
    for k, o, i in _links(attributes, x.shape[2:], y.shape[2:], weight.shape[2:]):
        w = wg[(..., *k)]
        yg[(slice(None), slice(None), slice(None), *o)] += np.einsum(
            "ngizyx,goi->ngozyx", xg[(slice(None), slice(None), slice(None), *i)], w
        )


def dgrad(y: np.ndarray, weight: np.ndarray, x: np.ndarray, attributes: Attributes) -> None:
    """Adds the adjoint of y with respect to the inputs to `x`, which must be contiguous."""
    xg, wg, yg = _grouped(x, weight, y, attributes.groups)
    for k, o, i in _links(attributes, x.shape[2:], y.shape[2:], weight.shape[2:]):
        w = wg[(..., *k)]
        xg[(slice(None), slice(None), slice(None), *i)] += np.einsum(
            "ngozyx,goi->ngizyx", yg[(slice(None), slice(None), slice(None), *o)], w
        )


def wgrad(x: np.ndarray, y: np.ndarray, weight: np.ndarray, attributes: Attributes) -> None:
    """Adds the adjoint with respect to the weight to `weight`, which must be contiguous."""
    xg, wg, yg = _grouped(x, weight, y, attributes.groups)
    for k, o, i in _links(attributes, x.shape[2:], y.shape[2:], weight.shape[2:]):
        wg[(..., *k)] += np.einsum(
            "ngizyx,ngozyx->goi",
            xg[(slice(None), slice(None), slice(None), *i)],
            yg[(slice(None), slice(None), slice(None), *o)],
        )
