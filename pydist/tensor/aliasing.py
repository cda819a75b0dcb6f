"""Views that are copies here: which tensors share one storage in torch, and which are stale.

Where torch gives a view, blocks may have to move between ranks, and the result is a copy. The
tensor and its copies then are one `Storage`. A change in place of one of them makes the others
stale, and a stale tensor is refused when it is used. What is a copy follows from layouts, and what
is stale from the order of calls, so all ranks refuse the same use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version

from pydist.errors import NotSupported
from pydist.tensor.refusals import module_path, source_line

if TYPE_CHECKING:
    from pydist.layout import Layout

Part = tuple["View", tuple[tuple[int, int], ...]]
"""A box of a tensor, named by the tensor's view: [first, last) along each of its dims."""


class View(NamedTuple):
    """The memory of a tensor, and where the tensor is in the one from which it was cut.

    Attributes:
        memory: what the tensor shares with its real views.
        part: a box that contains the tensor; `None` where no box is known.
        cut: the view and the index that selected exactly this tensor, if an index did.
        is_expanded: whether several elements are one in memory, perhaps on other ranks only.
    """

    memory: Memory
    part: Part | None = None
    cut: tuple[View, Sequence[Any]] | None = None
    is_expanded: bool = False


class Memory:
    """Memory on this rank, shared by a shard and the real views of it.

    Attributes:
        storage: the storage that has copies; `None` where no copy was made.
        born: the storage's clock when this copy was made.
        key: names this memory in the storage, which holds no memory.
        plain: the plain tensor that has this memory and more on every rank, and how it is cut, if
            it may be changed.
    """

    __slots__ = ("born", "is_base", "key", "plain", "storage")

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = storage
        self.plain: tuple[weakref.ref[Tensor], Layout] | None = None
        self.born = storage.clock if storage else 0
        self.is_base = False
        self.key = object()

    def copied(self, shard: Tensor) -> Memory:
        """The memory of a copy of `shard`, which has this one."""
        if self.storage is None:
            self.storage = Storage()
            self.is_base = True
            self.storage.watch(self.key, shard)
        return Memory(self.storage)

    def __del__(self) -> None:
        if self.storage is not None and not self.is_base:
            self.storage.leave(self.key)


_PARTLY_CHANGED = (
    "a plain tensor of shape {} is used after it was cut over the ranks and changed in place "
    "there: each rank changed only its own block of it; clone() the tensor before the call, or use "
    "the result of the change"
)


class _Probe:
    """The version counter of a shard, without its memory."""

    def __init__(self, shard: Tensor) -> None:
        self._tensor = shard.detach()
        self._tensor.data = shard.new_empty(0)
        self._seen = self._tensor._version

    def moved(self) -> bool:
        """Whether the shard was changed in place since the last call."""
        seen, self._seen = self._seen, self._tensor._version
        return self._seen != seen


class _Change(NamedTuple):
    clock: int
    how: str


class Storage:
    """One storage of torch that is several memories on this rank.

    Attributes:
        clock: how many changes in place were seen.
    """

    def __init__(self) -> None:
        self.clock = 0
        self._changes: dict[tuple[object, Part | None], _Change] = {}
        self._probes: dict[object, _Probe] = {}

    def watch(self, key: object, shard: Tensor) -> None:
        """Notices changes in place of `shard` that no handler makes, as through `to_local()`."""
        if key not in self._probes and not shard.is_inference():
            self._probes[key] = _Probe(shard)

    def leave(self, key: object) -> None:
        """Stops watching a memory that is freed, and keeps the changes seen in it."""
        if key in self._probes:
            self._look(key)
            del self._probes[key]

    def record(self, key: object, part: Part | None, how: str) -> None:
        """A change in place of a part of one memory, all of it if the part is `None`."""
        self.clock += 1
        self._changes[key, part] = _Change(self.clock, how)
        for probe in self._probes.values():
            probe.moved()  # by this change; those before it were seen when the tensor was read

    def take_change(self, key: object, part: Part | None) -> Callable[[], None]:
        """Forgets the last change of a part of a memory; what is returned remembers it."""
        change = self._changes.pop((key, part), None)

        def restore() -> None:
            if change is not None:
                self._changes[key, part] = change

        return restore

    def change_after(self, memory: Memory, part: Part | None) -> str:
        """How another memory was changed that overlaps a part of this one; "" if none was."""
        for key in list(self._probes):
            self._look(key)
        for (key, changed), (clock, how) in self._changes.items():
            if clock > memory.born and key is not memory.key and not _disjoint(changed, part):
                return how
        return ""

    def _look(self, key: object) -> None:
        if self._probes[key].moved():
            self.record(key, None, "through to_local()")


def _disjoint(one: Part | None, other: Part | None) -> bool:
    if one is None or other is None or one[0] is not other[0]:
        return False
    return any(a >= d or c >= b for (a, b), (c, d) in zip(one[1], other[1], strict=True))


class Aliased(Protocol):
    """A sharded tensor, as far as its memory goes."""

    _view: View | None

    @property
    def _layout(self) -> Layout: ...


def view_at(x: Aliased) -> View:
    """The view of a tensor; made when first asked for."""
    if x._view is None:
        x._view = View(Memory())
    return x._view


def record_change(x: Aliased) -> None:
    """A handler has changed `x` in place: copies of what it shares memory with are stale.

    Raises:
        RuntimeError: it is a view of an expanded tensor; as torch, but on all ranks.
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
        how = f"of shape {list(x._layout.shape)}{f' at {source}' if source else ''}"
        storage.record(view.memory.key, view.part, how)


class _Entry(Function):
    """The identity. Its result shares memory, but is no view for autograd: it may be changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


def entry_of_plain(part: Tensor, plain: Tensor) -> Tensor:
    """This rank's part of a plain tensor, to be the shard of a sharded one.

    It may be changed in place, unless `plain` is a leaf that requires a gradient, as in torch.
    """
    if part is plain or not part.requires_grad or not torch.is_grad_enabled() or _is_leaf(plain):
        return part
    entry: Tensor = _Entry.apply(part)
    return entry


def as_result(view: Tensor) -> Tensor:
    """A view of memory that nothing else refers to, as a result that may be changed in place.

    For a view, autograd would record a change elsewhere than for a result, and a rank whose block
    is empty may have no view there.
    """
    if not view.requires_grad or not torch.is_grad_enabled():
        return view
    result: Tensor = _Entry.apply(view)
    return result


def _is_leaf(plain: Tensor) -> bool:
    return plain.is_leaf or (plain._is_view() and plain._base is not None and plain._base.is_leaf)


def to_change(x: Aliased, shard: Tensor, others: Iterable[Any] = ()) -> Tensor:
    """The shard of `x`, for a change in place by a call with these other arguments.

    Where an empty view is changed in place, autograd loses gradients of gradients: that of torch's
    `as_strided` ends the graph there, on this rank alone. As nothing changes, what it is a view of
    need not know, unless its gradient would go to one of the others.
    """
    if shard.numel() or not shard._is_view() or not shard.requires_grad or shard.is_leaf:
        return shard
    if x._view is not None and any(isinstance(o, Tensor) and o.requires_grad for o in others):
        return shard
    with torch.enable_grad():  # also where the change needs no graph, what was there keeps its own
        entry: Tensor = _Entry.apply(shard)
    torch.autograd.graph.increment_version(shard)  # as the change does on other ranks
    return entry


def remember_plain(x: Aliased, plain: Tensor) -> None:
    """Remembers the plain tensor of which `x` has a block, without a copy.

    A change in place of the sharded tensor reaches one block of the plain one on each rank. With
    gradients there is none of a leaf, as in torch.
    """
    is_fixed = plain.requires_grad and plain.is_leaf and torch.is_grad_enabled()
    if not is_fixed and not plain.is_inference():
        view_at(x).memory.plain = weakref.ref(plain), x._layout


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
    """Stops what uses a plain tensor from now on: sharded calls, and the backward of plain ones.

    Calls that need no more of it than the block which this rank has changed may use it.
    If the caller changes it afterwards, such as to the next batch, all may.
    """
    if (plain := of()) is None:
        return
    plain._pydist_changed = plain._version, layout  # type: ignore[attr-defined]
    if plain.requires_grad and not plain.is_leaf:
        # Its version counts for what was saved, and has been raised by the change itself.
        with torch.enable_grad(), preserve_version(plain):
            _Changed.apply(plain)


def is_partly_changed(plain: Tensor, layout: Layout) -> bool:
    """Whether each rank has changed its own block of a plain tensor, and needs only that.

    Args:
        plain: the plain tensor.
        layout: which block each rank needs now.

    Raises:
        NotSupported: this rank needs what others have changed.
    """
    version, cut = getattr(plain, "_pydist_changed", (None, None))
    if version is None or version != plain._version:
        return False
    if cut != layout:
        raise NotSupported(_PARTLY_CHANGED.format(list(plain.shape)))
    return True


def staleness(x: Aliased) -> str:
    """How another tensor was changed that shares the memory of `x` in torch; "" if none was."""
    view = x._view
    if view is None or view.memory.storage is None:
        return ""
    return view.memory.storage.change_after(view.memory, view.part)


def is_view_at(value: Any, x: Aliased, index: Sequence[Any]) -> bool:
    """Whether a value is a real view of `x`, the one at `index`."""
    return _is_cut(value, x, index) and value._view.memory is view_at(x).memory


def _is_cut(value: Any, x: Aliased, index: Sequence[Any]) -> bool:
    view = getattr(value, "_view", None)
    if view is None or view.cut is None:
        return False
    source, at = view.cut
    return source is x._view and tuple(at) == tuple(index)


def written_back(x: Aliased, value: Any, index: Sequence[Any]) -> Memory | None:
    """The memory of a copy that was cut from `x` at `index`, and is now assigned there.

    So does `x[index] += 1`: the copy is changed in place and written back. Then that change is no
    reason to refuse `x`. After the assignment the copy is `born` again.

    Raises:
        NotSupported: another tensor was changed in place that shares the memory of `x` in torch.
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
    """Stops the use of a tensor whose numbers would have changed in torch.

    Raises:
        NotSupported: it is a copy of a tensor that was changed in place, or the other way round.
    """
    how = staleness(x)
    if how:
        module, source = module_path(), source_line()
        raise NotSupported(
            f"a tensor of shape {list(x._layout.shape)} is used"
            f"{f' in module {module}' if module else ''}{f' at {source}' if source else ''} after "
            f"a change in place of another ({how}); in torch one may be a view of the other, here "
            "it is a copy, as its blocks were moved: take the view after the change, or use "
            "clone() before it where they are to be independent"
        )


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether a result of a call is a view of its argument."""
    return _address(one) == _address(other)


def _address(local: Tensor) -> int:
    return local.untyped_storage().data_ptr()
