"""The calls that a network makes on sharded tensors, and their exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map

from pydist.errors import NotSupported
from pydist.exchange.exchanger import Exchanger
from pydist.grid import CHANNEL_AXIS
from pydist.layout import Layout, layout_for_sample
from pydist.mesh import Mesh
from pydist.ops.coarsening import channel_form
from pydist.tensor import ShardedTensor
from pydist.tensor.operands import shard_of_plain
from pydist.tensor.refusals import module_path, name_of
from pydist.tensor.sharded import whole_of

# Queries, which compute nothing.
_QUESTIONS = frozenset(
    "is_floating_point is_complex numel nelement is_contiguous stride storage_offset element_size "
    "is_pinned is_cuda has_names get_device".split()
)


# The layers that split their channels, and the dim of these.
_LAYERS = {
    F.linear: -1, torch.conv1d: 1, torch.conv2d: 1, torch.conv3d: 1, torch.conv_transpose1d: 1,
    torch.conv_transpose2d: 1, torch.conv_transpose3d: 1,
}  # fmt: skip


@dataclass
class ShardedCall:
    """Call that takes or returns sharded tensors.

    Attributes:
        name: name of the function, as users write it.
        module: path of the module that made the call.
        halo: the widest slabs received before and after this rank's block, by dim of the input.
        moved: number of elements that this rank received, halo or otherwise.
        is_global: whether numbers were reduced over ranks.
        form: what the ranks exchanged, where the cheapest form is chosen. Of a layer with weights
            and a split of channels: "outputs", or, if those of its input are cut, the form of
            `pydist.ops.coarsening`, or "groups". Of attention over split keys: the form of
            `pydist.ops.attention.forms`.
        refusal: why it has no exact form; if set, it was computed on full tensors.
    """

    name: str
    module: str
    halo: dict[int, tuple[int, int]]
    moved: int = 0
    is_global: bool = False
    form: str = ""
    refusal: str = ""


class CallRecorder(TorchFunctionMode):
    """Recorder that notes this thread's calls on sharded tensors, and computes those refused.

    Args:
        mesh: the mesh whose exchanges are attributed to the calls.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.calls: list[ShardedCall] = []
        self._mesh = mesh
        self._now: ShardedCall | None = None

    def __enter__(self) -> CallRecorder:
        for transport in self._mesh.transports:
            transport.watcher = self._note
        self._mesh.session.at_form = self._note_form
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for transport in self._mesh.transports:
            transport.watcher = None
        self._mesh.session.at_form = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Computes refused calls on full tensors in the block, where checkpoints repeat them."""
        calls = list(self.calls)
        with self:
            yield
        self.calls = calls

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not tree_any(_is_sharded, (args, kwargs)) or _is_question(func):
            return func(*args, **kwargs)
        self._now = ShardedCall(name_of(func), module_path(), {})
        self.calls.append(self._now)
        try:
            result = func(*args, **kwargs)
        except NotSupported as error:
            self._now.refusal = str(error)
        else:
            self._now.form = self._now.form or _channels(func, args, result)
            return result
        finally:
            self._now = None
        return self._on_whole(func, args, kwargs)

    def _on_whole(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Computes a call on full tensors; a result that looks like a sample is sharded again."""
        like = next(x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_sharded(x))
        args, kwargs = tree_map(whole_of, args), tree_map(whole_of, kwargs)
        result = func(*args, **kwargs)

        def cut(x: Any) -> Any:
            looks_like = isinstance(x, Tensor) and x.dim() == like.dim() >= 3
            if not looks_like or not x.is_floating_point():
                return x
            layout = sample_layout(self._mesh, x.shape)
            return ShardedTensor(shard_of_plain(x, layout), layout, like._origin)

        return tree_map(cut, result)

    def _note_form(self, form: str) -> None:
        if self._now is not None:
            self._now.form = form

    def _note(self, moved: Exchanger | Tensor) -> None:
        call = self._now
        if call is None:
            return
        if isinstance(moved, Tensor):
            # Integers are excluded: ranks reduce them to agree on plans.
            call.is_global |= moved.is_floating_point()
            return
        call.moved += sum(message.elements for message in moved.plan.recvs)
        own = moved.owned
        if own.empty:
            return
        for transfer in (t for message in moved.plan.recvs for t in message.transfers):
            box = transfer.box
            for dim, (lo, hi) in enumerate(zip(box.lo, box.hi, strict=True)):
                before, after = own.lo[dim] - lo, hi - own.hi[dim]
                if before > 0 or after > 0:
                    known = call.halo.get(dim, (0, 0))
                    call.halo[dim] = max(known[0], before), max(known[1], after)


def sample_layout(mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Returns the layout of [N, C, ...] with its spatial dims over the axes of their names."""
    return layout_for_sample(mesh, shape)


def _channels(func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> str:
    """Describes how a call has split its channels; see `ShardedCall.form`."""
    dim = _LAYERS.get(func)
    if dim is None or not args or not (_is_sharded(args[0]) and _is_sharded(result)):
        return ""
    layout = args[0].layout
    before, after = (
        split is not None and (dim == 1 or CHANNEL_AXIS in split.axes)
        for split in (layout.splits[dim], result.layout.splits[dim])
    )
    if not before:
        return "outputs" if after else ""
    if not after:
        return "sum"
    whole = result if "transpose" in func.__name__ else args[0]
    if args[1].shape[1] < whole.shape[1]:
        return "groups"
    return channel_form(layout, tuple(result.shape))


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedTensor)


def _is_question(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__") or name in _QUESTIONS
