"""Handles neighborhood attention by natten, if that is installed.

A query attends to the keys in a window around it, which is shifted inwards at the borders of the
domain. Each rank gathers the box with the windows of its queries, natten computes attention in the
box, and the rank keeps its own part. Windows in the box are those in the domain: where the box ends
inside the domain, the windows of own queries end no later.

natten's functions are plain Python, without torch's check for overrides; the one that all others
call gets this check here.

Source: Hassani et al., "Generalized Neighborhood Attention", 2025.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from pydist.errors import UsageError
from pydist.exchange.redistribution import BoxGatherer
from pydist.layout import Layout, Split
from pydist.ops.empty import with_elements, without_added
from pydist.ops.windows import as_tuple
from pydist.partition import Box
from pydist.tensor import HANDLERS, ShardedTensor, source_among, wrap
from pydist.tensor.operands import operand_in

NAME = "neighborhood_attention_generic"
"""Function of natten 0.20 and later that `na1d`, `na2d`, `na3d` and the modules call."""


class Neighborhood(NamedTuple):
    """Neighborhood that queries have along one dim of space.

    Attributes:
        extent: tokens of the domain.
        kernel: keys in a window.
        stride: consecutive queries that share the window of one of them, their leader.
        dilation: distance between the keys of a window, and of the queries of a leader.
        is_causal: whether windows end at their query.
    """

    extent: int
    kernel: int
    stride: int
    dilation: int
    is_causal: bool

    def needs(self, lo: int, hi: int) -> tuple[int, int]:
        """Returns an interval that contains the windows of the queries from `lo` to `hi`.

        It contains at least one window, even if there are no queries. Windows in it are those in
        the domain, as it begins and ends between the groups of a leader.
        """
        first = min(lo, self.extent - 1)
        last = max(first, hi - 1)
        # Tokens at multiples of the dilation form sequences, of one of these two lengths.
        shortest, longest = self.extent // self.dilation, -(-self.extent // self.dilation)
        start = self._start(first // self.dilation, shortest)
        stop = self._start(last // self.dilation, longest) + self.kernel
        stop = max(stop, (last // self.dilation // self.stride + 1) * self.stride)
        if self.is_causal:  # in a box of one window, natten asks for a kernel that CPUs don't have
            start, stop = max(0, start - self.stride), stop + 1
        start -= start % self.stride
        return start * self.dilation, min(stop * self.dilation, self.extent)

    def _start(self, query: int, length: int) -> int:
        """Returns the first key of a query's window, in a sequence of `length` tokens."""
        leader = query - query % self.stride
        leader += self.stride - 1 if self.is_causal else self.stride // 2
        before = self.kernel - 1 if self.is_causal else self.kernel // 2
        return max(0, min(min(leader, length - 1) - before, length - self.kernel))


def neighborhood_attention(
    natten: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Computes attention to neighbors in tensors [samples, *space, heads, channels].

    Args:
        natten: the function that computes it for plain tensors.
        query: the queries; the result is split like them, but for channels.
        key: the keys, in the space of the queries.
        value: the values of the keys.
        kernel_size: keys in a window, for each dim of space or for all.
        stride: consecutive queries that share a window.
        dilation: distance between the keys of a window.
        is_causal: whether windows end at their query.
        scale: factor of the scores; 1 / sqrt(channels) by default.
        additional_keys: keys for all queries, [samples, tokens, heads, channels].
        additional_values: the values of these keys.
        return_lse: whether to return the logarithm of each query's sum of exponentials, too.
        options: natten's choices of kernels.

    Raises:
        UsageError: the shapes and windows do not fit together.
    """
    space = _space(query, key, value, (kernel_size, stride, dilation, is_causal or False))
    for_all = {"additional_keys": additional_keys, "additional_values": additional_values}
    context = {name: t for name, t in for_all.items() if t is not None and t.numel()}
    like = source_among((query, key, value, *context.values()))
    splits = _splits(query, key, value)
    out = Layout(like.mesh, (*query.shape[:-1], value.shape[-1]), splits)
    own, box = out.box, _with_windows(out.box, space)
    before = [a - b for a, b in zip(own.lo, box.lo, strict=True)]
    after = [b - a for a, b in zip(own.hi, box.hi, strict=True)]
    pads = [n for ends in zip(reversed(before), reversed(after), strict=True) for n in ends]
    queries = operand_in(query, Layout(out.mesh, tuple(query.shape), splits), out)
    operands = [F.pad(queries, pads), *(_in_box(x, space, out) for x in (key, value))]
    found, sums = natten(
        *map(with_elements, operands),
        kernel_size=kernel_size,
        stride=stride,
        dilation=dilation,
        is_causal=is_causal,
        scale=scale,
        return_lse=True,
        **{name: with_elements(_for_all(x, out)) for name, x in context.items()},
        **options,
    )
    inner = tuple(slice(lo, lo + n) for lo, n in zip(before, own.shape, strict=True))
    if any(split is not None for split in splits[1:-2]):  # on all ranks: the graphs are equal
        found, sums = found[inner].clone(), sums[inner[:-1]].clone()
    result = wrap(without_added(found, own.shape), out, like)
    if not return_lse:
        return result
    layout = Layout(out.mesh, out.shape[:-1], splits[:-1])
    return result, wrap(without_added(sums, layout.local_shape), layout, like)


def _space(
    query: Tensor, key: Tensor, value: Tensor, windows: Sequence[Any]
) -> tuple[Neighborhood, ...]:
    """Returns the neighborhood along each dim of space; checks what natten checks of the domain."""
    shapes = [list(t.shape) for t in (query, key, value)]
    dims = query.dim() - 3
    if dims not in (1, 2, 3) or any(s[: 1 + dims] != shapes[0][: 1 + dims] for s in shapes):
        raise UsageError(
            f"neighborhood attention of queries {shapes[0]}, keys {shapes[1]} and values "
            f"{shapes[2]}: [samples, *space, heads, channels] with the same 1 to 3 dims of space "
            "are possible"
        )
    given = [as_tuple(each, dims) for each in windows]
    if any(len(each) != dims for each in given):
        raise UsageError(
            f"neighborhood attention in {dims} dims of space with kernel_size, stride, dilation "
            f"and is_causal {tuple(windows)}: one value or {dims} are possible for each"
        )
    extents = shapes[0][1 : 1 + dims]
    for extent, kernel, stride, dilation, _ in zip(extents, *given, strict=True):
        if min(kernel, stride, dilation) < 1 or stride > kernel or kernel * dilation > extent:
            raise UsageError(
                f"neighborhood attention over {extent} tokens with kernel_size {kernel}, stride "
                f"{stride} and dilation {dilation}: a stride of at most kernel_size is possible, "
                "and kernel_size * dilation of at most the tokens"
            )
    return tuple(Neighborhood(*each) for each in zip(extents, *given, strict=True))


def _splits(query: Tensor, key: Tensor, value: Tensor) -> tuple[Split | None, ...]:
    """Returns how the result is split: as the first sharded operand is, channels whole."""
    sharded = next((t for t in (query, key, value) if isinstance(t, ShardedTensor)), None)
    if sharded is None:
        return (None,) * query.dim()
    *most, heads, _ = sharded.layout.splits
    is_shared = query.shape[-2] != key.shape[-2]  # a head of keys, by several of queries
    return (*most, None if is_shared else heads, None)


def _with_windows(own: Box, space: Sequence[Neighborhood]) -> Box:
    """Returns the box of tokens that contains the windows of a rank's queries."""
    lo, hi = list(own.lo), list(own.hi)
    for dim, each in enumerate(space, start=1):
        lo[dim], hi[dim] = each.needs(own.lo[dim], own.hi[dim])
    return Box(lo, hi)


def _in_box(x: Tensor, space: tuple[Neighborhood, ...], out: Layout) -> Tensor:
    """Returns this rank's box of keys or values."""
    layout = Layout(out.mesh, tuple(x.shape), out.splits)
    if not isinstance(x, ShardedTensor):  # every rank has them all
        box = _with_windows(layout.box, space)
        unsplit = layout.replace(changes=dict.fromkeys(range(1, 1 + len(space))))
        index = list(box.slices)
        index[0] = index[-2] = index[-1] = slice(None)  # only space is whole
        return operand_in(x, unsplit, out)[tuple(index)]

    def make() -> BoxGatherer:
        return BoxGatherer(layout, [_with_windows(own, space) for own in layout.boxes])

    gather = out.mesh.session.plan(("neighborhood", layout, space), make)
    return gather(operand_in(x, layout, out))


def _for_all(x: Tensor, out: Layout) -> Tensor:
    """Returns the keys or values of this rank's samples and heads that all queries attend to."""
    splits = (out.splits[0], None, out.splits[-2], None)
    return operand_in(x, Layout(out.mesh, tuple(x.shape), splits), out)


def check_overrides(*modules: Any) -> None:
    """Gives natten's function torch's check for overrides, in each module that has its name."""
    plain = getattr(modules[0], NAME)

    @wraps(plain)
    def checked(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = (kwargs.get("additional_keys"), kwargs.get("additional_values"))
        tensors = (query, key, value, *(t for t in others if t is not None))
        if has_torch_function(tensors):
            return handle_torch_function(checked, tensors, query, key, value, *args, **kwargs)
        return plain(query, key, value, *args, **kwargs)

    HANDLERS[checked] = partial(neighborhood_attention, plain)
    for module in modules:
        setattr(module, NAME, checked)


if find_spec("natten") is not None:
    # Versions before 0.20 have no such function; a broken one shows its error to who imports it.
    with suppress(ImportError, OSError, AttributeError):
        check_overrides(*map(importlib.import_module, ("natten.functional", "natten.modules")))
