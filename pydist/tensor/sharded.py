"""`ShardedTensor`, which shows the global tensor and holds this rank's shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pydist.comm.interface.ledger import CAUSE
from pydist.errors import NotSupported, UsageError
from pydist.exchange.adjoints import average_grad
from pydist.exchange.history import (
    NO_HISTORY,
    caused_by,
    history_of,
    remember,
    remember_change,
)
from pydist.exchange.own_slice import Slicing, is_sharded_weight, set_slicing
from pydist.exchange.redistribution import redistributed
from pydist.grid import AXES, SAMPLE_AXES
from pydist.group_sizes import GroupSizes, mark_batch
from pydist.interop import ArrayLike, as_tensor
from pydist.layout import Layout
from pydist.marks import node_of
from pydist.tensor.aliasing import (
    View,
    ViewPart,
    after_change,
    record_change,
    refuse_stale,
    shares_memory,
    staleness,
    view_at,
)
from pydist.tensor.deferred import NOTHING, Deferred, with_current
from pydist.tensor.handlers import HANDLERS, OUTER, load, observer
from pydist.tensor.refusals import misfit, refusal, refuse_compiled
from pydist.tensor.wrapper import (
    GET_DEVICE,
    GET_DTYPE,
    GET_REQUIRES_GRAD,
    guard_gradient,
    of_wrapper,
    plain,
    plain_operands,
    refuse_foreign_graph,
)

if TYPE_CHECKING:
    from pydist.mesh import Mesh


class Origin(NamedTuple):
    """Properties that a tensor inherits from its forward pass."""

    forward: int
    """Number of the training forward: part of the key of random numbers."""
    sizes: GroupSizes
    """The global batch index of the sample at index 0 of dim 0, and the weights of the groups."""
    statistics: str
    """The ranks over which batch norm forms its statistics: "global", "group" or "rank"."""


class ShardedTensor(torch.Tensor):
    """A tensor that is cut over the ranks of a sample group.

    It shows the global shape and holds this rank's shard, on which autograd's graph lives. Torch
    calls go to the handlers of `pydist.ops`; a call without one is refused by name. Make one with
    `distribute_tensor` or `ShardedTensor.from_local`.
    """

    layout: Layout = None  # type: ignore[assignment]  # hides torch's; each tensor has its own
    """Layout that gives each rank its block (pydist's layout, not `torch.strided`)."""
    _shard: Tensor
    _origin: Origin
    _deferred: Deferred | None
    """Deferred work on the shard, done before it is used; `None` if the shard is not new."""
    _streams: Sequence[torch.cuda.Stream] = ()
    """The stream that has done deferred work on the memory, and those that have waited for it: they
    may have waited for the call before. Views begin with them."""
    _view: View | None = None
    """The tensors that share its memory, here and in torch; `None` if there are none."""
    _shown: tuple[Any] | None = None
    """The node of the shard when `to_local` returned it; a program may change it in place."""
    _is_gathered: bool = False
    """Whether it was gathered for one call, which may therefore leave a part of its gradient on
    each rank: the gathering's adjoint adds the parts."""
    _is_gradient: bool = False
    """Whether the shard is the gradient that a leaf's shard holds."""
    _history: int = NO_HISTORY
    """See `pydist.exchange.history`."""

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, origin: Origin) -> ShardedTensor:
        """Wraps a shard without checks; `from_local` does the checks."""
        requires_grad = local.requires_grad
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            dtype=local.dtype,
            device=local.device,
            requires_grad=requires_grad,
        )
        wrapper._shard, wrapper.layout, wrapper._origin = local, layout, origin
        wrapper._deferred = None
        if requires_grad:
            guard_gradient(wrapper)
            if origin.sizes.in_features:
                mark_batch(local, origin.sizes)
        return wrapper

    @classmethod
    def from_local(
        cls,
        local: ArrayLike,
        layout: Layout,
        first_sample: int | None = None,
        statistics: str = "global",
    ) -> ShardedTensor:
        """Wraps this rank's shard.

        Differentiable: a parameter used in full between `to_local()` and here, as in a custom
        autograd function, gets its true gradient, like all others.

        Args:
            local: the shard, of shape `layout.local_shape`: a tensor, or an array of another
                library (see `pydist.interop`).
            layout: which block each rank holds.
            first_sample: index in the global batch of the group's first sample; by default the
                groups exchange their numbers of samples on first use.
            statistics: the ranks over which batch norm forms its statistics.

        Raises:
            UsageError: the shape of the shard differs from this rank's block of the layout.
        """
        local = plain(as_tensor(local))
        if tuple(local.shape) != layout.local_shape:
            raise UsageError(
                f"a shard of shape {tuple(local.shape)} was given, but rank "
                f"{layout.mesh.rank} holds {layout.local_shape} of {layout.shape}"
            )
        observer.follow(local, layout.mesh)
        local = observer.scale_leaving_gradients(local, layout)
        return cls.of_shard(local, layout, first_sample, statistics)

    @classmethod
    def of_shard(
        cls,
        local: Tensor,
        layout: Layout,
        first_sample: int | None = None,
        statistics: str = "global",
    ) -> ShardedTensor:
        """Wraps a shard whose gradients are already scaled; for the rest see `from_local`."""
        sizes = GroupSizes(
            layout.mesh,
            layout.shape[0] if layout.shape else 1,
            first_sample,
            agreed=torch.is_grad_enabled(),
        )
        return cls(local, layout, Origin(layout.mesh.session.forwards, sizes, statistics))

    @property
    def mesh(self) -> Mesh:
        """The mesh that holds the tensor."""
        return self.layout.mesh

    @property
    def _local(self) -> Tensor:
        if self._deferred is not None:
            pending, self._deferred = self._deferred, None
            if (stream := pending.complete()) is not None:
                self._streams = [stream]
        if self._streams:
            self._streams = with_current(self._streams, self._shard)
        if self._view is not None and self._view.memory.storage is not None:
            refuse_stale(self)
        if self._shown is not None and node_of(self._shard) is not self._shown[0]:
            _reenter(self)
        if self._view is not None and self._view.memory.shown:
            self._view.memory.forget_changed()
        if self._view is not None and not self._shard.numel():  # another view may have changed it
            shard = after_change(self._shard)
            if shard is not self._shard:
                replace_shard_(self, shard, changed=False)
        return self._shard

    # Networks read these very often: as properties they need no dispatch.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape, which all ranks' blocks form together."""
        return torch.Size(self.layout.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims that the global tensor has."""
        return len(self.layout.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Type that the elements have."""
        return of_wrapper(GET_DTYPE, self)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device that holds this rank's shard."""
        return of_wrapper(GET_DEVICE, self)

    def dim(self) -> int:
        """Returns the number of dims."""
        return len(self.layout.shape)

    def size(self, dim: int | None = None) -> Any:
        """Returns the global shape, or its extent in one dim."""
        return torch.Size(self.layout.shape) if dim is None else self.layout.shape[dim]

    def to_local(self) -> Tensor:
        """Returns this rank's shard, a plain tensor in the same autograd graph."""
        local = local_of(self)
        self._show(local)
        if self._view is not None and (storage := self._view.memory.storage) is not None:
            storage.watch(self._view.memory.key, local)
        return local

    def _show(self, local: Tensor) -> None:
        """Marks the shard, which a program has: it may compute with it, or change it."""
        observer.lead_to(local, self.mesh, self._history, self._origin.sizes, self.layout)
        self._shown = (node_of(local),)
        if self._view is not None:
            self._view.memory.note_shown(self)

    def full_tensor(self) -> Tensor:
        """Returns the full tensor, plain, equal on all ranks of the sample group.

        The gradient that flows back into this tensor is the mean over the group.
        """
        layout, local = self.layout, local_of(self)
        with caused_by(self._history):
            whole = redistributed(local, layout, layout.whole())
        if whole is local:
            whole = average_grad(whole, self.mesh, SAMPLE_AXES)
        observer.lead_to(whole, self.mesh, self._history, self._origin.sizes)
        return whole

    def redistribute(
        self, layout: Layout | None = None, *others: Any, **named: Any
    ) -> ShardedTensor:
        """Returns the same tensor in another layout of the same shape and mesh.

        It accepts one layout, which says which block each rank holds afterwards. The other
        arguments, those of torch's DTensor, are refused.

        Raises:
            UsageError: the layout is missing, or has another shape or mesh.
        """
        if others or named or not isinstance(layout, Layout):
            raise UsageError(
                f"redistribute of a ShardedTensor of shape {list(self.layout.shape)} takes one "
                "pydist.Layout, as in x.redistribute(x.layout.whole()); a device mesh and "
                "placements are for torch's DTensor"
            )
        local = local_of(self)
        if layout == self.layout:
            return self
        with caused_by(self._history):
            moved = redistributed(local, self.layout, layout)
        return view_of(self, moved, layout, is_copy=True)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        what = (
            f"stale: it shares memory with another in torch, changed in place {how}"
            if (how := staleness(self))
            else f"local={self._local!r}"
        )
        return f"ShardedTensor(shape={self.layout.shape}, {self.layout!r}, {what})"

    def as_parameter(self) -> ShardedTensor:
        """Makes this a parameter whose slices the ranks hold, and returns it; see `pydist.slices`.

        The shard is a parameter of torch, with the gradient.
        """
        self.__dict__["_is_param"] = True  # for isinstance(_, torch.nn.Parameter)
        self.__dict__["_is_weight"] = True  # for `own_slice`
        used, grid = self.layout.used_axes, self.mesh.grid
        even = -(-self.numel() // grid.size(used))
        set_slicing(self._shard, Slicing(tuple(a for a in AXES if a not in used), even))
        return self

    @property
    def _is_param(self) -> bool:
        """Whether this counts as a `torch.nn.Parameter`, which sets it when it is given this."""
        return "_is_param" in self.__dict__

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        if self._origin.sizes.of_weight:
            raise NotSupported(
                f"torch.nn.Parameter of a tensor of shape {list(self.shape)} that is computed from "
                "sharded weights: change a weight in place, under torch.no_grad()"
            )
        self.__dict__["_is_param"] = value

    def __copy__(self) -> ShardedTensor:
        # As in torch: a leaf that shares memory.
        local = local_of(self).detach().requires_grad_(self._shard.requires_grad)
        return view_of(self, local, self.layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        copied = wrap(self._local.__deepcopy__(memo), self.layout, self)
        return copied.as_parameter() if is_sharded_weight(self) else copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupported(
            "a ShardedTensor can't be pickled: use full_tensor(), or pydist's checkpoints"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if len(types) > 1 and not OUTER.isdisjoint(types):  # type: ignore[arg-type]  # _TensorMeta
            return NotImplemented  # their override computes the call
        refuse_compiled("a function of sharded tensors")
        handler = HANDLERS.get(func)
        if handler is None:
            load()
            handler = HANDLERS.get(func)
        if handler is None:
            raise refusal(func, args, kwargs or {})
        if len(types) > 1:  # type: ignore[arg-type]
            kept = ShardedTensor, observer.gradient_placeholder
            args, kwargs = plain_operands(args, kept), plain_operands(kwargs or {}, kept)
        outermost = not CAUSE.history
        try:
            if outermost:
                CAUSE.history = history_of(func, args, kwargs or {})
            result = handler(*args, **kwargs) if kwargs else handler(*args)
            if outermost:
                remember(result, CAUSE.history, args)
            return result
        except TypeError as error:
            why = misfit(handler, func, args, kwargs or {}, error)
            if why is None:
                raise
            raise refusal(func, args, kwargs or {}, why) from error
        finally:
            if outermost:
                CAUSE.history, CAUSE.module = 0, None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Only calls that bypass __torch_function__ get here (torch.func, vmap, torch.tensor(x),
        # code that disabled the override): they would see a tensor without storage.
        if func is torch.ops.aten.detach.default:
            return _unpacked(*args)
        raise refusal(func, args, kwargs or {})


class _Unpacked(Deferred):
    """A shard that gets a gradient if autograd has set that its wrapper does."""

    def __init__(self, x: ShardedTensor) -> None:
        self._x = x

    def complete(self) -> None:
        self._x._shard.requires_grad_(of_wrapper(GET_REQUIRES_GRAD, self._x))


def _unpacked(x: ShardedTensor) -> ShardedTensor:
    """Returns what autograd makes of an argument of a checkpoint in a checkpoint.

    Autograd packs the argument, as it does any saved tensor, and torch's outer checkpoint detaches
    what is packed. Unpacking makes a new tensor of that and sets whether it needs a gradient. Its
    shard must agree: the inner checkpoint has to save as many tensors when it recomputes.
    """
    # Deferred work is part of the graph, to which calls in __torch_dispatch__ do not add.
    with torch.overrides.enable_reentrant_dispatch(), torch.enable_grad():
        made = wrap(x._local.detach(), x.layout, x)
    made._deferred = _Unpacked(made)
    return made


def wrap(local: Tensor, layout: Layout, like: ShardedTensor) -> ShardedTensor:
    """Returns a result of `like`: the shard `local` in `layout`.

    Args:
        local: this rank's shard of the result, of shape `layout.local_shape`.
        layout: which block each rank holds.
        like: the operand whose forward pass the result belongs to.
    """
    result = ShardedTensor(local, layout, like._origin)
    result._history = like._history  # an outermost call of the program replaces it
    return result


def plain_result(local: Tensor, like: ShardedTensor) -> Tensor:
    """Marks a plain result of `like` that all ranks have, as a loss, and returns it."""
    observer.lead_to(local, like.mesh, CAUSE.history, like._origin.sizes)
    return local


def source_among(operands: Iterable[Any]) -> ShardedTensor:
    """Returns the operand from which a result inherits: the first sharded non-weight."""
    sharded = [each for each in operands if isinstance(each, ShardedTensor)]
    return next((each for each in sharded if not each._origin.sizes.of_weight), sharded[0])


def wrap_new(local: Tensor, layout: Layout, like: ShardedTensor) -> ShardedTensor:
    """Returns a result of `like` in unshared memory, outside autograd's graph.

    Args:
        local: this rank's shard of the result, of shape `layout.local_shape`.
        layout: which block each rank holds.
        like: the operand whose forward pass the result belongs to.
    """
    result = wrap(local, layout, like)
    result._deferred = NOTHING
    return result


def local_of(x: ShardedTensor) -> Tensor:
    """Returns the shard of a handler's argument."""
    refuse_foreign_graph(x)
    return x._local


def whole_of(value: Any) -> Any:
    """Returns a sharded tensor as the full, plain one; other values unchanged."""
    return value.full_tensor() if isinstance(value, ShardedTensor) else value


def _reenter(x: ShardedTensor) -> None:
    """Treats a shard that a program has changed in place like an argument of `from_local`."""
    shard = x._shard
    observer.follow(shard, x.mesh)
    replace_shard_(x, observer.scale_leaving_gradients(shard, x.layout), changed=False)


def view_of(
    x: ShardedTensor,
    local: Tensor,
    layout: Layout,
    is_copy: bool = False,
    part: ViewPart | None = None,
    index: Sequence[Any] | None = None,
    is_expanded: bool = False,
) -> ShardedTensor:
    """Returns a result of `x` that is, or may be, a view in torch.

    Args:
        x: the tensor.
        local: the result's shard.
        layout: of the result.
        is_copy: whether the result does not share memory. Equal on all ranks, as it follows from
            layouts. If one of the two is then changed in place, use of the other is refused.
        part: a box of `x` that contains the result.
        index: of the result in `x`.
        is_expanded: whether elements are repeated without a copy.
    """
    y = wrap(local, layout, x)
    y._streams = x._streams
    if x.mesh.sample_size == 1:
        is_copy = False
        if not shares_memory(local, x._shard):
            return y  # a copy in torch as well
    if 0 not in layout.shape:
        view = view_at(x)
        if x._shown is not None:
            view.memory.note_shown(x)
        memory = view.memory.copied(x._shard) if is_copy else view.memory
        cut = None if index is None else (view, index)
        is_expanded = is_expanded or (view.is_expanded and not is_copy)
        y._view = View(memory, view.part or part, cut, is_expanded)
    return y


def replace_shard_(x: ShardedTensor, local: Tensor, changed: bool = True) -> ShardedTensor:
    """Makes `local`, the result of a call in place, the shard of `x`.

    Args:
        x: the tensor.
        local: its shard from now on.
        changed: whether its values change; autograd then detects stale saved tensors.
    """
    x._shard = after_change(local) if changed else local
    if changed:
        remember_change(x)
    if x._shown is not None:
        x._show(x._shard)  # this change is not the program's own
    if changed and x._view is not None:
        for other in x._view.memory.shown:
            if (shown := other()) is not None and shown is not x:
                shown._show(shown._shard)
        record_change(x)
    if changed and not of_wrapper(torch.Tensor.is_inference, x):
        torch.autograd.graph.increment_version(x)
    if local.requires_grad and not of_wrapper(GET_REQUIRES_GRAD, x):
        of_wrapper(torch.Tensor.requires_grad_, x)
        guard_gradient(x)
    return x
