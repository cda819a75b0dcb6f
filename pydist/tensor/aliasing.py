"""Tracking of views that are copies here: tensors that share storage in torch, and stale ones.

Where torch returns a view, blocks may have to move between ranks, and the result is a copy. The
tensor and its copies then share one `SharedStorage`. An in-place change of one of them makes the
others stale, and the use of a stale tensor is refused. Layouts determine the copies, and the order
of calls the stale tensors, so all ranks refuse the same use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version

from pydist.errors import NotSupported
from pydist.marks import node_of
from pydist.tensor.refusals import module_path, source_line

if TYPE_CHECKING:
    from pydist.layout import Layout

_autograd: Any = torch._C._autograd

ViewPart = tuple["View", tuple[tuple[int, int], ...]]
"""A box of a tensor, named by the tensor's view: [first, last) along each of its dims."""


class View(NamedTuple):
    """The memory of a tensor, and the tensor's position in the one from which it was cut.

    Attributes:
        memory: the memory that the tensor shares with its real views.
        part: a box that contains the tensor; `None` where no box is known.
        cut: the view and the index that selected exactly this tensor, if an index did.
        is_expanded: whether elements share a memory location, perhaps on other ranks only.
    """

    memory: Memory
    part: ViewPart | None = None
    cut: tuple[View, Sequence[Any]] | None = None
    is_expanded: bool = False


class Memory:
    """Memory on this rank that a shard and the real views of it share.

    Attributes:
        storage: the storage that has copies; `None` where no copy was made.
        born: the storage's clock when this copy was made.
        key: names this memory in the storage, which holds no memory.
        plain: the plain tensor that contains this memory on every rank, and its layout, if the
            tensor may be changed.
        shown: the tensors of this memory whose shards a program has and has not changed.
    """

    __slots__ = ("born", "is_base", "key", "plain", "shown", "storage")

    def __init__(self, storage: SharedStorage | None = None) -> None:
        self.storage = storage
        self.plain: tuple[weakref.ref[Tensor], Layout] | None = None
        self.shown: list[weakref.ref[Any]] = []
        self.born = storage.clock if storage else 0
        self.is_base = False
        self.key = object()

    def copied(self, shard: Tensor) -> Memory:
        """Returns the memory of a copy of `shard`, which has this memory."""
        if self.storage is None:
            self.storage = SharedStorage()
            self.is_base = True
            self.storage.watch(self.key, shard)
        return Memory(self.storage)

    def note_shown(self, x: Aliased) -> None:
        """Notes that a program has the shard of `x`; in-place calls on others then show it again.

        Otherwise its next use would take such a change for the program's own.
        """
        if x._shard._is_view() and not _has_node(x._shard):
            return
        if all(other() is not x for other in self.shown):
            self.shown.append(weakref.ref(x))

    def forget_changed(self) -> None:
        """Forgets the tensors whose shards the program has changed."""
        self.shown = [ref for ref in self.shown if _is_as_shown(ref())]

    def __del__(self) -> None:
        if self.storage is not None and not self.is_base:
            self.storage.leave(self.key)


_PARTLY_CHANGED = (
    "a plain tensor of shape {} is used after it was cut over the ranks and changed in place "
    "there: each rank changed only its own block of it; clone() the tensor before the call, or use "
    "the result of the change"
)


class _Probe:
    """Version counter that a shard has, without the shard's memory."""

    def __init__(self, shard: Tensor) -> None:
        self._tensor = shard.detach()
        self._tensor.data = shard.new_empty(0)
        self._seen = self._tensor._version

    def moved(self) -> bool:
        """Returns whether the shard was changed in place since the last call."""
        seen, self._seen = self._seen, self._tensor._version
        return self._seen != seen


class _Change(NamedTuple):
    clock: int
    how: str


class SharedStorage:
    """One storage of torch that is several memories on this rank.

    Attributes:
        clock: number of in-place changes seen.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._changes: dict[tuple[object, ViewPart | None], _Change] = {}
        self._probes: dict[object, _Probe] = {}

    def watch(self, key: object, shard: Tensor) -> None:
        """Detects in-place changes of `shard` that no handler makes, as through `to_local()`."""
        if key not in self._probes and not shard.is_inference():
            self._probes[key] = _Probe(shard)

    def leave(self, key: object) -> None:
        """Stops watching a memory that is freed, and keeps the changes seen in it."""
        if key in self._probes:
            self._look(key)
            del self._probes[key]

    def record(self, key: object, part: ViewPart | None, how: str) -> None:
        """Records an in-place change of a part of one memory, all of it if the part is `None`."""
        self.clock += 1
        self._changes[key, part] = _Change(self.clock, how)
        for probe in self._probes.values():
            probe.moved()  # resets it: earlier changes were seen when the tensor was read

    def take_change(self, key: object, part: ViewPart | None) -> Callable[[], None]:
        """Forgets the last change of a part of a memory; the returned function restores it."""
        change = self._changes.pop((key, part), None)

        def restore() -> None:
            if change is not None:
                self._changes[key, part] = change

        return restore

    def change_after(self, memory: Memory, part: ViewPart | None) -> str:
        """Describes a change of another memory that overlaps a part of this one; "" if none."""
        for key in list(self._probes):
            self._look(key)
        for (key, changed), (clock, how) in self._changes.items():
            if clock > memory.born and key is not memory.key and not _disjoint(changed, part):
                return how
        return ""

    def _look(self, key: object) -> None:
        if self._probes[key].moved():
            self.record(key, None, "through to_local()")


def _is_as_shown(x: Any) -> bool:
    return x is not None and x._shown is not None and node_of(x._shard) is x._shown[0]


def _disjoint(one: ViewPart | None, other: ViewPart | None) -> bool:
    if one is None or other is None or one[0] is not other[0]:
        return False
    return any(a >= d or c >= b for (a, b), (c, d) in zip(one[1], other[1], strict=True))


class Aliased(Protocol):
    """The attributes of a sharded tensor that concern its memory."""

    layout: Layout
    _shard: Tensor
    _view: View | None


def view_at(x: Aliased) -> View:
    """Returns the view of a tensor, and creates it on first use."""
    if x._view is None:
        x._view = View(Memory())
    return x._view


def record_change(x: Aliased) -> None:
    """Records that a handler changed `x` in place, so copies of its memory are stale.

    Raises:
        RuntimeError: `x` is a view of an expanded tensor; as in torch, but on all ranks.
    """
    view = x._view
    if view is not None and view.is_expanded:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            "single memory location; clone() the expanded tensor before"
        )
    if view is not None and view.memory.plain is not None:
        _record_partly(*view.memory.plain)
    if view is not None and (storage := view.memory.storage) is not None:
        source = source_line()
        how = f"of shape {list(x.layout.shape)}{f' at {source}' if source else ''}"
        storage.record(view.memory.key, view.part, how)


class _Detached(Function):
    """Identity whose result shares memory but is not a view for autograd: it may be changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def detached_part(part: Tensor, plain: Tensor) -> Tensor:
    """Returns this rank's part of a plain tensor as the shard of a sharded tensor.

    It may be changed in place, unless `plain` is a leaf that requires a gradient, as in torch.
    """
    if part is plain or not part.requires_grad or not torch.is_grad_enabled() or _is_leaf(plain):
        return part
    entry: Tensor = _Detached.apply(part)
    return entry


def as_result(view: Tensor) -> Tensor:
    """Returns a view of otherwise unreferenced memory as a result that may be changed in place.

    Autograd records a change of a view at another node than a change of a result, and a rank with
    an empty block may have no view.
    """
    if not view.requires_grad or not torch.is_grad_enabled():
        return view
    result: Tensor = _Detached.apply(view)
    return result


def _is_leaf(plain: Tensor) -> bool:
    return plain.is_leaf or (plain._is_view() and plain._base is not None and plain._base.is_leaf)


def after_change(shard: Tensor) -> Tensor:
    """Returns a shard that may have been changed in place, in a graph for second derivatives.

    Autograd reads a changed view from its base by `as_strided`, whose backward has no graph for an
    empty view: on this rank alone, gradients of gradients would end there. That of slices has one.
    """
    if shard.numel() or not shard._is_view() or not shard.requires_grad:
        return shard
    base, node = shard._base, shard.grad_fn if _has_node(shard) else None
    if base is None or node is None or node.name() != "AsStridedBackward0":
        return shard
    with torch.enable_grad():  # keeps the existing graph also where the change needs none
        return base[None][:0].reshape(shard.shape)


def _has_node(view: Tensor) -> bool:
    """Returns whether torch lets one read a view's node after a change.

    It raises for views that were made under `no_grad`, for example.
    """
    return bool(_autograd._get_creation_meta(view) == _autograd.CreationMeta.DEFAULT)


def remember_plain(x: Aliased, plain: Tensor) -> None:
    """Remembers the plain tensor whose block `x` holds without a copy.

    An in-place change of the sharded tensor changes one block of the plain tensor on each rank.
    With gradients enabled, a leaf cannot be changed in place, as in torch.
    """
    is_fixed = plain.requires_grad and plain.is_leaf and torch.is_grad_enabled()
    if not is_fixed and not plain.is_inference():
        view_at(x).memory.plain = weakref.ref(plain), x.layout


class _Changed(Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor) -> Tensor:
        ctx.mark_dirty(plain)
        ctx.shape = list(plain.shape)
        return plain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise NotSupported(_PARTLY_CHANGED.format(ctx.shape))


def _record_partly(of: weakref.ref[Tensor], layout: Layout) -> None:
    """Makes later uses of a plain tensor raise: sharded calls, and the backward of plain ones.

    Calls that need only the block which this rank has changed may still use the tensor. After the
    caller changes it, for example to the next batch, all calls may.
    """
    if (plain := of()) is None:
        return
    plain._pydist_changed = plain._version, layout  # type: ignore[attr-defined]
    if plain.requires_grad and not plain.is_leaf:
        # The change itself has increased the version, which guards saved tensors.
        with torch.enable_grad(), preserve_version(plain):
            _Changed.apply(plain)


def is_partly_changed(plain: Tensor, layout: Layout) -> bool:
    """Returns whether each rank has changed its own block of a tensor, and needs only that.

    Args:
        plain: the plain tensor.
        layout: which block each rank needs now.

    Raises:
        NotSupported: this rank needs blocks that other ranks have changed.
    """
    version, cut = getattr(plain, "_pydist_changed", (None, None))
    if version is None or version != plain._version:
        return False
    if cut != layout:
        raise NotSupported(_PARTLY_CHANGED.format(list(plain.shape)))
    return True


def staleness(x: Aliased) -> str:
    """Describes a change of another tensor that shares the memory of `x` in torch; "" if none."""
    view = x._view
    if view is None or view.memory.storage is None:
        return ""
    return view.memory.storage.change_after(view.memory, view.part)


def is_view_at(value: Any, x: Aliased, index: Sequence[Any]) -> bool:
    """Returns whether a value is the real view of `x` at `index`."""
    return _is_cut(value, x, index) and value._view.memory is view_at(x).memory


def _is_cut(value: Any, x: Aliased, index: Sequence[Any]) -> bool:
    view = getattr(value, "_view", None)
    if view is None or view.cut is None:
        return False
    source, at = view.cut
    return source is x._view and tuple(at) == tuple(index)


def written_back(x: Aliased, value: Any, index: Sequence[Any]) -> Memory | None:
    """Returns the memory of a copy that was cut from `x` at `index` and is now assigned there.

    `x[index] += 1` changes the copy in place and writes it back. That change is not a reason to
    refuse `x`. The caller sets the copy's `born` again after the assignment.

    Raises:
        NotSupported: another tensor that shares the memory of `x` in torch was changed in place.
    """
    if not _is_cut(value, x, index) or (storage := value._view.memory.storage) is None:
        return None
    memory: Memory = value._view.memory
    restore = storage.take_change(memory.key, value._view.part)
    try:
        refuse_stale(x)
    except NotSupported:
        restore()
        raise
    return memory


def refuse_stale(x: Aliased) -> None:
    """Refuses a tensor whose values would have changed in torch.

    Raises:
        NotSupported: the tensor is a copy of one that was changed in place, or was copied to one.
    """
    how = staleness(x)
    if how:
        module, source = module_path(), source_line()
        raise NotSupported(
            f"a tensor of shape {list(x.layout.shape)} is used"
            f"{f' in module {module}' if module else ''}{f' at {source}' if source else ''} after "
            f"a change in place of another ({how}); in torch one may be a view of the other, here "
            "it is a copy, as its blocks were moved: take the view after the change, or use "
            "clone() before it where they are to be independent"
        )


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether a result of a call is a view of its argument."""
    return _address(one) == _address(other)


def _address(local: Tensor) -> int:
    return local.untyped_storage().data_ptr()
