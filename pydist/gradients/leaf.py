"""Describes parameters as members of the reducer, and sets their hooks."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from pydist.errors import NotSupported, UsageError
from pydist.exchange.link import Link
from pydist.exchange.own_slice import slicing_of
from pydist.gradients.partitioned import PartitionedGradient
from pydist.gradients.rows import is_dense

if TYPE_CHECKING:
    from pydist.mesh import Mesh

_Hook: TypeAlias = "Callable[[Any], Any]"
_OWN = -1  # the key of the reducer's hook; torch counts users' hooks from 0


class GradientKind(NamedTuple):
    """The properties of a gradient that determine its message."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> GradientKind:
        """Returns the kind of a tensor's gradient."""
        return GradientKind(gradient_dtype(tensor), tensor.device, tensor.shape, tensor.stride())

    def zeros(self) -> Tensor:
        """Returns a gradient of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} on {self.device.type}, strides {list(self.stride)}"


class LeafReducer(Protocol):
    """The interface of the reducer that a leaf's hooks call."""

    @property
    def mesh(self) -> Mesh:
        """Mesh that the reducer belongs to."""

    def before(self, leaf: Leaf, grad: Tensor | None) -> Tensor | None:
        """Handles a gradient that arrives at a parameter."""

    def after(self, leaf: Leaf, parameter: Tensor) -> None:
        """Handles a gradient that was accumulated."""


class Leaf:
    """A parameter whose gradient the ranks average.

    The leaf refers to the parameter weakly, and the parameter's hooks refer to the leaf. These are
    hooks of the tensor: unlike graph nodes they survive `model.double()` and `p.data = ...`.

    Attributes:
        key: `id` of the parameter.
        name: for errors.
        axes: axes of the mesh along which the ranks hold equal copies.
        even: its elements, or those of an even slice: the same on all ranks.
        kind: the layout of the gradient in the buckets.
        dense: whether the elements of the parameter fill one interval of memory.
        has_parts: whether the gradient can be partitioned like the parameter.
        is_partitioned: whether each rank gets the mean of its own part only, if `has_parts`.
        fired: whether this rank has accumulated a gradient that is not reduced yet.
        paused: whether it was accumulated under `no_sync`, or in a backward that raised.
        keeps_graph: whether the running backward reduces the arriving gradient, with a graph
            (create_graph), so that nothing is left to reduce.
        partial: whether a backward that raised has added to the gradient, until `Reducer.settle`.
        idle: number of consecutive backward passes in which it was frozen.
        has_hooks: whether users' hooks were registered.
        waits: whether users' hooks wait for the mean in the running backward.
        in_graph: whether users' hooks have seen the mean when it arrived (create_graph), so that
            only post-accumulate hooks wait.
        base: the gradient before the running backward, if hooks need the added part.
        place: group and index in the optimizer that has stepped the parameter first.
        is_placed: whether the ranks have compared `place`.
    """

    def __init__(self, parameter: Tensor, name: str, reducer: LeafReducer) -> None:
        self._parameter = Link(parameter)
        self._reducer = weakref.ref(reducer)
        self.key, self.name = id(parameter), name
        self.axes, _ = slicing_of(parameter)
        self._measure(parameter)
        self.is_partitioned = False
        self.fired = self.paused = self.partial = self.keeps_graph = self.in_graph = False
        self.waits = self.has_hooks = self._gone = False
        self.idle = 0
        self.place: tuple[int, int] | None = None
        self.is_placed = False
        self.base: Tensor | None = None
        self._stamp: tuple[int, int] | None = None
        tensor: Any = parameter
        self.attach(parameter, tensor._backward_hooks, tensor._post_accumulate_grad_hooks)

    def _measure(self, parameter: Tensor) -> None:
        self.kind = GradientKind.of(parameter)
        self.numel, self.dense = parameter.numel(), is_dense(parameter)
        self.even = slicing_of(parameter).even
        self.has_parts = self.dense and parameter.dtype == self.kind.dtype

    def attach(
        self,
        parameter: Tensor,
        before: OrderedDict[int, _Hook] | None,
        after: OrderedDict[int, _Hook] | None,
    ) -> None:
        """Sets the reducer's hooks on the parameter.

        Args:
            parameter: the parameter.
            before: users' hooks for its gradient, which are called after the reducer's.
            after: users' hooks for the accumulated gradient.
        """
        self.has_hooks = False
        self._before, self._after = _Hooks(self, before), _Hooks(self, after)
        self._before.set_own(_before_accumulation)
        self._after.set_own(_after_accumulation)
        _set_hooks(parameter, self._before, self._after)

    def renewed(self, parameter: Tensor) -> Leaf:
        """Returns a leaf for the parameter with a new dtype, shape or strides; this one is void.

        The new leaf keeps the hook objects, as the engine may be calling one of them.
        """
        fresh = copy.copy(self)
        fresh._measure(parameter)
        fresh._before.leaf = fresh._after.leaf = fresh
        self._gone = True
        return fresh

    def parameter(self) -> Tensor | None:
        """Returns the parameter, while it is alive and this leaf is valid."""
        return None if self._gone else self._parameter()

    def describes(self, parameter: Tensor) -> bool:
        """Returns whether the parameter still has the kind that the buckets expect."""
        kind = self.kind
        return (
            gradient_dtype(parameter) is kind.dtype
            and parameter.shape == kind.shape
            and parameter.stride() == kind.stride
            and parameter.device == kind.device
        )

    def reducer(self) -> LeafReducer | None:
        """Returns the reducer of the gradient, while it is alive."""
        return self._reducer()

    def refuse_hooks(self) -> None:
        """Raises if users have registered hooks, which a partitioned gradient does not support."""
        if self._before.users() or self._after.users():
            raise NotSupported(
                f"hooks on the parameter {self.name}, whose gradient is partitioned over the ranks "
                "(pydist.optim.sharded): remove them, or step this parameter with "
                'use="never"'
            )

    def remember_base(self, parameter: Tensor) -> None:
        """Stores the gradient as the base, unless it has a part that is not reduced yet."""
        if self.has_part(parameter):
            return
        grad = parameter.grad
        self.base = None if grad is None else grad.detach().clone()

    def has_part(self, parameter: Tensor) -> bool:
        """Returns whether the gradient has a part that an earlier backward did not reduce."""
        return self.paused and self._stamp == _stamp_of(parameter.grad)

    def remember_pause(self, parameter: Tensor) -> None:
        """Records the gradient after a backward that does not reduce it."""
        self.paused = True
        self._stamp = _stamp_of(parameter.grad)

    def forget(self) -> None:
        """Resets the state of an accumulated gradient, which the caller has cleared."""
        self.fired = self.paused = self.waits = False
        self.base = None

    def is_cleared(self, parameter: Tensor) -> bool:
        """Returns whether the caller has cleared the gradient since it was recorded."""
        grad = parameter.grad
        if grad is None or isinstance(grad, PartitionedGradient):
            return grad is None
        return self._stamp != _stamp_of(grad) and not bool(grad.any())

    @property
    def shows_gradients(self) -> bool:
        """Whether users' hooks see arriving gradients."""
        return self.has_hooks and bool(self._before.users())

    def call_hooks(
        self, parameter: Tensor, unused: Tensor | None = None, in_graph: bool = False
    ) -> None:
        """Calls users' hooks with the mean, as torch would with the gradient.

        Args:
            parameter: the parameter.
            unused: the mean of gradients that arrived at a frozen parameter, whose `.grad` stays.
            in_graph: whether the gradient has a graph: hooks saw the mean when it arrived, and only
                post-accumulate hooks have waited.

        Raises:
            UsageError: a hook returned something else than a gradient.
            Exception: the exception of a hook.
        """
        base, self.base = self.base, None
        if not in_graph:
            self._show_mean(parameter, unused, base)
        for hook in self._after.users():
            with torch.set_grad_enabled(in_graph):
                result = hook(parameter)
            if result is not None:
                raise UsageError(
                    f"a post-accumulate-grad hook of the parameter {self.name} returned something; "
                    "torch demands None: change p.grad in place"
                )

    def take_in_graph(self) -> bool:
        """Returns whether the ending backward made a graph of the gradient, and resets this."""
        found, self.in_graph = self.in_graph, False
        return found

    def _show_mean(self, parameter: Tensor, unused: Tensor | None, base: Tensor | None) -> None:
        """Calls the hooks that may change the part that is added to the gradient `base`."""
        grad = parameter.grad
        if unused is not None:
            self.seen_by_hooks(unused)
        elif self._before.users() and grad is not None:
            given = grad if base is None else grad - base
            before = given._version
            added = self.seen_by_hooks(given)
            if base is not None:
                # Not if nothing has changed: the sum would differ in its last bits between ranks.
                if added is not given or given._version != before:
                    grad.copy_(base.add_(added))  # like torch in place, as it may have a graph
            elif added is not grad:
                parameter.grad = added.to(grad.dtype, copy=True)

    def seen_by_hooks(self, grad: Tensor) -> Tensor:
        """Returns a gradient after users' hooks may have changed it."""
        for hook in self._before.users():
            changed = hook(grad)
            if changed is None:
                continue
            if not isinstance(changed, Tensor) or changed.shape != grad.shape:
                raise UsageError(
                    f"a hook of the parameter {self.name} returned {_what(changed)}; a tensor "
                    f"of shape {list(grad.shape)} or None is possible"
                )
            grad = changed if torch.is_grad_enabled() else changed.detach()
        return grad


def _before_accumulation(leaf: Leaf, grad: Tensor | None) -> Tensor | None:
    reducer = leaf.reducer()
    leaf.waits = leaf.in_graph = False
    return None if reducer is None else reducer.before(leaf, grad)


def _after_accumulation(leaf: Leaf, parameter: Tensor) -> None:
    reducer = leaf.reducer()
    if reducer is not None:
        reducer.after(leaf, parameter)


class _Hooks(OrderedDict[int, _Hook]):
    """Hooks of one kind that a parameter has: the reducer's first, then those of users.

    It replaces torch's dict, so that users' hooks can wait for the mean. Handles of hooks that were
    registered before still refer to the earlier dict, which is kept.
    """

    def __init__(self, leaf: Leaf, earlier: OrderedDict[int, _Hook] | None) -> None:
        super().__init__()
        self.leaf = leaf
        super().__setitem__(_OWN, _nothing)  # first, as the engine calls them in this order
        for key, hook in (earlier or {}).items():
            if key != _OWN:
                leaf.has_hooks = True
                registered = hook.hook if isinstance(hook, _DeferredHook) else hook
                super().__setitem__(key, _DeferredHook(self, registered, earlier, key))

    def set_own(self, hook: Callable[[Leaf, Any], Any]) -> None:
        """Sets the reducer's hook, which keeps neither these hooks nor the parameter alive."""
        me = weakref.ref(self)

        def call(value: Any) -> Any:
            hooks = me()
            return None if hooks is None else hook(hooks.leaf, value)

        super().__setitem__(_OWN, call)

    def __setitem__(self, key: int, hook: _Hook) -> None:
        super().__setitem__(key, _DeferredHook(self, hook))
        self.leaf.has_hooks = True
        if self.leaf.is_partitioned:
            try:
                self.leaf.refuse_hooks()
            except NotSupported:
                del self[key]
                raise

    def users(self) -> list[_Hook]:
        """Returns users' hooks that were not removed, in the order of registration."""
        return [h.hook for h in self.values() if isinstance(h, _DeferredHook) and h.registered]


class _DeferredHook:
    """Wrapper of a user's hook, which runs when the engine calls it, or later with the mean."""

    def __init__(
        self,
        hooks: _Hooks,
        hook: _Hook,
        earlier: OrderedDict[int, _Hook] | None = None,
        key: int = 0,
    ) -> None:
        self._hooks, self.hook = weakref.ref(hooks), hook
        self._earlier, self._key = earlier, key

    @property
    def registered(self) -> bool:
        """Whether the hook was not removed."""
        earlier = self._earlier
        if earlier is None:
            return True
        entry = earlier.get(self._key)
        return entry is not None and getattr(entry, "registered", True)

    def __call__(self, value: Any) -> Any:
        hooks = self._hooks()
        waits = hooks is not None and hooks.leaf.waits
        return None if waits or not self.registered else self.hook(value)


def _nothing(_: Any) -> None:
    """Reserves the first place for the reducer's hook."""


def remove_own(
    tensor: Tensor, before: OrderedDict[int, _Hook] | None, after: OrderedDict[int, _Hook] | None
) -> None:
    """Sets only the users' hooks among these on a tensor that the reducer does not know."""
    _set_hooks(tensor, _users_of(before), _users_of(after))


def _users_of(hooks: OrderedDict[int, _Hook] | None) -> OrderedDict[int, _Hook] | None:
    if not isinstance(hooks, _Hooks):
        return hooks
    # Not None without users' hooks: torch would continue to call the earlier ones.
    return OrderedDict(enumerate(hooks.users()))


def _set_hooks(
    tensor: Any, before: OrderedDict[int, _Hook] | None, after: OrderedDict[int, _Hook] | None
) -> None:
    tensor._backward_hooks = before
    tensor._post_accumulate_grad_hooks = after


def leaf_of(tensor: Tensor) -> Leaf | None:
    """Returns the leaf of a tensor that a reducer knows, or `None`."""
    hooks = tensor._backward_hooks
    if type(hooks) is not _Hooks:
        return None
    after: Any = tensor
    complete = _OWN in hooks and after._post_accumulate_grad_hooks is hooks.leaf._after
    return hooks.leaf if complete else None


def _stamp_of(grad: Tensor | None) -> tuple[int, int] | None:
    if grad is None or isinstance(grad, PartitionedGradient):
        return None
    return id(grad), grad._version


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's gradient, which a script may set by `grad_dtype`."""
    chosen: torch.dtype | None = None
    if parameter.is_leaf:
        chosen = getattr(parameter, "grad_dtype", None)  # not in all supported versions of torch
    return parameter.dtype if chosen is None else chosen


def _what(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
