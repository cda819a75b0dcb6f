"""Describes parameters as members of the reducer, and attaches its hooks to them."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pydist.errors import NotSupported, UsageError
from pydist.exchange.link import Link
from pydist.exchange.own_slice import slicing_of
from pydist.gradients.leaf_hooks import OWN, Hook, Hooks, set_hooks
from pydist.gradients.partitioned import PartitionedGradient
from pydist.gradients.rows import is_dense

if TYPE_CHECKING:
    from pydist.mesh import Mesh


OLD, NEW = 1, 2
"""Flags of a gradient that is older than the backward pass, and of one to which the pass has added
on any rank; 0 if there is none."""
_MEAN = "_pydist_mean"
"""Attribute of a gradient: its version when the mean of all ranks was stored."""


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
        parameter: returns the parameter, while it is alive and this leaf is valid; else `None`.
        reducer: returns the reducer of the gradient, while it is alive; else `None`.
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
        has_moved: whether the reducer of another mesh had the parameter before.
        base: the gradient before the running backward, if hooks need the added part.
        place: group and index in the optimizer that has stepped the parameter first.
        is_placed: whether the ranks have compared `place`.
    """

    def __init__(self, parameter: Tensor, name: str, reducer: LeafReducer) -> None:
        self.parameter: Callable[[], Tensor | None] = Link(parameter)
        self.reducer = weakref.ref(reducer)
        self.key, self.name = id(parameter), name
        self.axes, _ = slicing_of(parameter)
        self._measure(parameter)
        self.is_partitioned = False
        self.fired = self.paused = self.partial = self.keeps_graph = self.in_graph = False
        self.waits = self.has_hooks = self.has_moved = False
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
        is_real = not parameter.is_complex()
        self.has_parts = self.dense and is_real and parameter.dtype == self.kind.dtype

    def attach(
        self,
        parameter: Tensor,
        before: OrderedDict[int, Hook] | None,
        after: OrderedDict[int, Hook] | None,
    ) -> None:
        """Sets the reducer's hooks on the parameter.

        Args:
            parameter: the parameter.
            before: users' hooks for its gradient, which are called after the reducer's.
            after: users' hooks for the accumulated gradient.
        """
        self.has_hooks = False
        self._before, self._after = Hooks(self, before), Hooks(self, after)
        self._before.set_own(_before_accumulation)
        self._after.set_own(_after_accumulation)
        set_hooks(parameter, self._before, self._after)

    def renewed(self, parameter: Tensor) -> Leaf:
        """Returns a leaf for the parameter with a new dtype, shape or strides; this one is void.

        The new leaf keeps the hook objects, as the engine may be calling one of them.
        """
        fresh = copy.copy(self)
        fresh._measure(parameter)
        fresh._before.leaf = fresh._after.leaf = fresh
        self.make_void()
        return fresh

    def make_void(self) -> None:
        """Ends this leaf, as another one describes the parameter; its lane sends no gradient."""
        self.parameter = _none

    def describes(self, parameter: Tensor) -> bool:
        """Returns whether the parameter still has the kind that the buckets expect."""
        kind = self.kind
        return (
            gradient_dtype(parameter) is kind.dtype
            and parameter.shape == kind.shape
            and parameter.stride() == kind.stride
            and parameter.device == kind.device
        )

    def refuse_hooks(self) -> None:
        """Raises if users have registered hooks, which a partitioned gradient does not support."""
        if self.is_hooked:
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

    def remember_mean(self) -> None:
        """Marks the gradient, into which the mean of all ranks was stored."""
        parameter = self.parameter()
        grad: Any = None if parameter is None else parameter.grad
        if grad is not None and not isinstance(grad, PartitionedGradient):
            grad.__dict__[_MEAN] = grad._version  # torch swaps no tensor with a weak reference

    def has_mean(self, grad: Tensor) -> bool:
        """Returns whether a gradient is the mean as it was stored, and not a script's."""
        return grad.__dict__.get(_MEAN) == grad._version

    def is_assigned(self, parameter: Tensor) -> bool:
        """Returns whether a script has set the gradient of a trained parameter itself."""
        grad = parameter.grad
        return grad is not None and parameter.requires_grad and _MEAN not in grad.__dict__

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
    def is_hooked(self) -> bool:
        """Whether users' hooks are registered now."""
        return bool(self._before.users() or self._after.users())

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
                self.remember_mean()

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


def _none() -> None:
    """Replaces the link to the parameter of a leaf that is void."""


def _before_accumulation(leaf: Leaf, grad: Tensor | None) -> Tensor | None:
    reducer = leaf.reducer()
    leaf.waits = leaf.in_graph = False
    return None if reducer is None else reducer.before(leaf, grad)


def _after_accumulation(leaf: Leaf, parameter: Tensor) -> None:
    reducer = leaf.reducer()
    if reducer is not None:
        reducer.after(leaf, parameter)


def leaf_of(tensor: Tensor) -> Leaf | None:
    """Returns the leaf of a tensor that a reducer knows, or `None`, as for any sharded tensor."""
    hooks = None if "_shard" in tensor.__dict__ else tensor._backward_hooks
    if type(hooks) is not Hooks:
        return None
    leaf: Leaf = hooks.leaf
    after: Any = tensor
    complete = OWN in hooks and after._post_accumulate_grad_hooks is leaf._after
    return leaf if complete else None


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


def pieces_of(row: Tensor, leaves: Sequence[Leaf]) -> list[Tensor]:
    """Returns views of the parameters' places in a row that holds all of them, in this order."""
    places, start = [], 0
    for leaf in leaves:
        piece = row[start : start + leaf.numel]
        shape, stride = leaf.kind.shape, leaf.kind.stride
        places.append(piece.as_strided(shape, stride) if leaf.dense else piece.view(shape))
        start += leaf.numel
    return places
