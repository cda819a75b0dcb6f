"""Placeholders for partitioned gradients (ZeRO-1): each rank has only its own part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist.errors import NotSupported

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport


class GradientSet:
    """Partitioned gradients that one backward has made, in the same order on all ranks."""

    def __init__(self, transport: Transport) -> None:
        """Starts an empty set; `transport` connects all ranks that have parts."""
        self.transport = transport
        self._pieces: list[Tensor] = []
        self._norms: dict[float, Tensor] = {}

    def add(self, piece: Tensor) -> int:
        """Adds a gradient by this rank's part, and returns its index in the set."""
        self._pieces.append(piece)
        return len(self._pieces) - 1

    def norm(self, member: int, order: float) -> Tensor:
        """Returns the norm of one full gradient, in fp64 on its device, equal on all ranks.

        Collective: the first call computes the norms of the complete set, with one message.
        """
        if not order > 0:
            raise _refusal(f"norm of order {order:g}")
        if order not in self._norms:
            total = torch.stack([_norm_of_piece(piece, order) for piece in self._pieces])
            if order == float("inf"):
                self.transport.all_reduce(total, "max")
            else:
                total = total.pow(order)
                self.transport.all_reduce(total)
                total = total.pow(1 / order)
            self._norms[order] = total
        return self._norms[order][member]

    def forget_norms(self) -> None:
        """Discards the norms, after one of the gradients has changed."""
        self._norms.clear()


def _norm_of_piece(piece: Tensor, order: float) -> Tensor:
    if not piece.numel():  # torch refuses some norms of empty tensors
        return piece.new_zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(piece, order, dtype=torch.float64)


_Handler = Callable[..., Any]
_HANDLERS: dict[Any, _Handler] = {}
# Attributes and methods of a gradient that need no values.
_METADATA = {
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf",
        "is_sparse", "is_cpu", "is_cuda", "is_meta", "is_quantized", "is_nested", "itemsize",
    )
} | {
    getattr(Tensor, name)
    for name in (
        "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex",
        "requires_grad_", "detach_",
    )
}  # fmt: skip


class PartitionedGradient(Tensor):
    """Placeholder for a parameter's gradient that is partitioned over the ranks (ZeRO-1).

    It has the shape of the gradient (of a sharded weight, that of this rank's slice) but no values:
    each rank has the mean over all ranks for its own part. `clip_grad_norm_`, `clip_grad_value_`,
    `GradScaler` and `zero_grad` work; all ranks must call them, as they communicate. Any other use
    of values is refused: `pydist.optim.gather_gradients` converts all to ordinary gradients.
    """

    piece: Tensor
    """The mean of this rank's part: elements in the order of memory, shape [n], n >= 0."""
    pending: Tensor | None
    """The gradient that this rank has accumulated since, under `no_sync` or in a backward that
    raised. The next backward reduces it."""
    arriving: bool
    """Whether a backward that raised has left a part of it in flight."""
    spoiled: bool
    """Whether a step of stages that raised has added to it; this rank may have no part of it."""
    gradient_set: GradientSet
    member: int
    """Its index in the set."""

    @staticmethod
    def __new__(
        cls, parameter: Tensor, piece: Tensor, gradient_set: GradientSet
    ) -> PartitionedGradient:
        """Makes the placeholder for the gradient of `parameter`."""
        made: PartitionedGradient = Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        made.piece, made.pending, made.gradient_set = piece, None, gradient_set
        made.arriving = made.spoiled = False
        made.member = gradient_set.add(piece)
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartitionedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        handler = _HANDLERS.get(func)
        if handler is None:
            raise _refusal(getattr(func, "__name__", str(func)))
        return handler(func, *args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise _refusal(str(func))


def _refusal(what: str) -> NotSupported:
    return NotSupported(
        f"{what} of a gradient that is partitioned over the ranks, like its optimizer "
        "(pydist.optim.sharded): call pydist.optim.gather_gradients(model) before, on all ranks"
    )


def _handles(*functions: Any) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@_handles(Tensor.__repr__)
def _repr(_: Any, grad: PartitionedGradient, **__: Any) -> str:
    return PartitionedGradient.__repr__(grad)


@_handles(Tensor.zero_)
def _zero(_: Any, grad: PartitionedGradient) -> PartitionedGradient:
    grad.piece.zero_()
    grad.pending, grad.arriving, grad.spoiled = None, False, False
    grad.gradient_set.forget_norms()
    return grad


@_handles(torch._foreach_zero_)
def _zero_all(_: Any, grads: Sequence[Tensor]) -> None:
    for grad in grads:
        grad.zero_()


@_handles(Tensor.mul_, Tensor.div_, Tensor.__imul__, Tensor.__itruediv__, Tensor.clamp_)
def _elementwise(func: Any, grad: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Applies an element-wise in-place change to this rank's part."""
    given = (*args, *kwargs.values())
    if not isinstance(grad, PartitionedGradient) or not all(map(_is_number, given)):
        raise _refusal(func.__name__)
    for tensor in _numbers(func, [grad], linear=func is not Tensor.clamp_):
        func(tensor, *args, **kwargs)
    return grad


@_handles(torch._foreach_mul_, torch._foreach_div_)
def _scale_all(func: Any, grads: Sequence[Tensor], other: Any) -> None:
    if not _is_number(other):
        raise _refusal(func.__name__)
    func(_numbers(func, grads, linear=True), other)


@_handles(torch._foreach_clamp_min_, torch._foreach_clamp_max_)
def _clamp_all(func: Any, grads: Sequence[Tensor], bound: Any) -> None:
    if not _is_number(bound):
        raise _refusal(func.__name__)
    func(_numbers(func, grads, linear=False), bound)


@_handles(torch._amp_foreach_non_finite_check_and_unscale_)
def _unscale(func: Any, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscales gradients for `GradScaler`; an infinite value on any rank counts on all ranks."""
    func(_numbers(func, grads, linear=True), found_inf, inv_scale)
    gradient_set = next(
        grad.gradient_set for grad in grads if isinstance(grad, PartitionedGradient)
    )
    gradient_set.transport.all_reduce(found_inf, "max")


@_handles(torch.linalg.vector_norm)
def _norm(_: Any, grad: PartitionedGradient, ord: float = 2.0) -> Tensor:
    refuse_pending(grad)
    return grad.gradient_set.norm(grad.member, float(ord)).to(grad.dtype)


@_handles(torch._foreach_norm)
def _norm_all(_: Any, grads: Sequence[Tensor], ord: float = 2.0) -> list[Tensor]:
    return [torch.linalg.vector_norm(grad, ord) for grad in grads]


def _numbers(func: Any, grads: Iterable[Tensor], *, linear: bool) -> list[Tensor]:
    """Returns this rank's tensors that an in-place change, `linear` or not, applies to."""
    found = []
    is_first = True
    for grad in grads:
        if not isinstance(grad, PartitionedGradient):
            found.append(grad)
            continue
        if is_first:  # all ranks get the same parameters, also if one alone makes the change
            group, is_first = grad.gradient_set.transport, False
            group.ledger.note(group, (f"{func.__name__} of gradients",), waits=False)
        grad.gradient_set.forget_norms()
        found.append(grad.piece)
        if grad.arriving or not linear:
            refuse_pending(grad)
        if grad.pending is not None:
            found.append(grad.pending)
    return found


def refuse_pending(grad: PartitionedGradient) -> None:
    """Refuses a gradient with a part that is not reduced yet."""
    if grad.pending is not None or grad.arriving:
        raise NotSupported(
            "gradients that are partitioned over the ranks, and to which a backward() under "
            "no_sync(), or one that raised, has added: they are known after the next backward() "
            "outside of no_sync(); after an error zero_grad() clears them"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, PartitionedGradient):
        return False
    return (
        value is None
        or isinstance(value, int | float)
        or (isinstance(value, Tensor) and value.dim() == 0)
    )
