"""Provides base classes of pydist's autograd functions."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from pydist.exchange.exchanger import in_memory


class Function(torch.autograd.Function):
    """An autograd function whose `backward` gets gradients with all values in memory.

    Where a formula of torch knows that a gradient is zero, or has only its negative, the engine
    passes a tensor without these values. This depends on the graph of one rank alone: a rank that
    passed such a tensor to native code would raise while the others communicate.

    Where no gradient exists, as for values that a gradient of a gradient does not depend on,
    torch's nodes pass `None`, and optimizers skip a parameter without a gradient. These functions
    pass `None` too, but exchange zeros: another rank may have a gradient of zeros, for a hook that
    only this rank has.

    Autocast is off in `backward`, whatever the program's pass runs in: its operations have the
    dtypes that those of `forward` had.

    Where a subclass with one result sets `boxed_grads_call`, its `backward` gets the gradient in a
    list, from which it may take and free it. Torch before 2.13 holds it until `backward` returns.
    """

    boxed_grads_call = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = staticmethod(cls._made_forward(cls.forward))  # type: ignore[method-assign]
            cls.backward = staticmethod(cls._made_backward(cls.backward))  # type: ignore[method-assign]
            cls.apply = staticmethod(_made_apply(cls))  # type: ignore[method-assign]

    @classmethod
    def _made_forward(cls, forward: Any) -> Any:
        """Returns the function that torch calls for a subclass's `forward`."""

        @wraps(forward)
        def without_zeros(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            return forward(ctx, *args)

        return without_zeros

    @classmethod
    def _made_backward(cls, backward: Any) -> Any:
        """Returns the function that torch calls for a subclass's `backward`."""

        @wraps(backward)
        def with_memory(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> Any:
            return _called(backward, ctx, (), grad, rest)

        @wraps(backward)
        def boxed(ctx: Any, *grads: Any) -> Any:
            box = grads[0] if isinstance(grads[0], list) else list(grads)
            del grads
            ctx.has_gradient = box[0] is not None
            box[0] = _zeros_of(ctx) if box[0] is None else in_memory(box[0])
            with without_autocast(ctx._input_metadata[0].device):
                found = backward(ctx, box)
            return found if ctx.has_gradient else (None,) * len(found)

        return boxed if cls.boxed_grads_call else with_memory


def _called(
    backward: Any, ctx: Any, first: tuple[Any, ...], grad: Tensor | None, rest: tuple[Any, ...]
) -> Any:
    """Calls a `backward` with gradients in memory, after the arguments `first`."""
    ctx.has_gradient = grad is not None
    if rest:
        ctx.has_gradient |= any(g is not None for g in rest)
        rest = tuple(None if g is None else in_memory(g) for g in rest)
    with without_autocast(ctx._input_metadata[0].device):
        if grad is not None:
            return backward(ctx, *first, in_memory(grad), *rest)
        found = backward(ctx, *first, _zeros_of(ctx), *rest)
    return found if ctx.has_gradient else (None,) * len(found)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context manager that turns autocast off."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()  # takes a tenth of the time to enter


def _zeros_of(ctx: Any) -> Tensor:
    """Returns zeros in the place of the gradient of a function's first result."""
    of_result = ctx._input_metadata[0]
    return torch.zeros(of_result.shape, dtype=of_result.dtype, device=of_result.device)


def _made_apply(cls: Any) -> Any:
    """Returns a faster `Function.apply` for a class without defaults and `setup_context`.

    The time matters, as a step makes about a hundred calls.
    """
    general = super(Function, cls).apply
    plain = super(torch.autograd.Function, cls).apply

    def apply(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return general(*args)
        return plain(*[unwrap_if_dead(a) if isinstance(a, Tensor) else a for a in args])

    return apply


class ExchangeFunction(Function):
    """An autograd function whose `backward` exchanges, and gets the tensors saved in `forward`.

    Each subclass sets `part`: its `forward`, which exchanges, counts as this part of a step
    (`pydist.timers.Timers`), on the timers of its argument `mesh`. An argument `part` replaces it.
    It is None for functions with several parts, which they measure, and for those whose `forward`
    exchanges nothing; a `backward` applies another such function, or measures its own exchange.

    `forward` sets `ctx.mesh`. `backward` is called as ``backward(ctx, saved, *grads)``, after two
    steps that make all ranks reach the exchange:

    - Saved tensors are read first, and there is always one. Non-reentrant checkpointing recomputes
      a region when its first saved tensor is read. A rank with an empty shard may save nothing of
      its own, would not recompute, and so would miss the exchanges that the others repeat.
    - The mesh's gradient reducer is notified that a backward pass is running, since a rank without
      work may reach no parameter.
    """

    part: ClassVar[str | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "part" not in cls.__dict__:
            raise TypeError(
                f"{cls.__name__}: set `part`, under which its exchange is timed, or None"
            )
        super().__init_subclass__(**kwargs)

    @classmethod
    def _made_forward(cls, forward: Any) -> Any:
        part, names = cls.part, [*inspect.signature(forward).parameters][1:]
        of_mesh = None if part is None else names.index("mesh")
        of_part = names.index("part") if "part" in names else None

        @wraps(forward)
        def with_saved(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            if of_mesh is None:
                result = forward(ctx, *args)
            else:
                timers = args[of_mesh].session.timers
                with timers.measure(part if of_part is None else args[of_part]):
                    result = forward(ctx, *args)
            if ctx.to_save is None:
                ctx.save_for_backward(torch.empty(0))
            return result

        return with_saved

    @classmethod
    def _made_backward(cls, backward: Any) -> Any:
        @wraps(backward)
        def announced(ctx: Any, grad: Tensor | None, *rest: Tensor | None) -> Any:
            saved = ctx.saved_tensors
            for call in ctx.mesh.session.at_backward:
                call()
            return _called(backward, ctx, (saved,), grad, rest)

        return announced


class _Next(threading.local):
    """Whether a backward function of pydist starts the thread's next pass, not the program."""

    is_own = False


_next = _Next()


def own_grad(y: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Returns gradients with a graph, for a backward function that recomputed `y`."""
    _next.is_own = True
    try:
        return torch.autograd.grad(y, inputs, grad, create_graph=True)
    finally:
        _next.is_own = False


def is_own_pass() -> bool:
    """Returns whether `own_grad` starts the pass that begins; called once per pass."""
    found, _next.is_own = _next.is_own, False
    return found


def way_back(x: Tensor) -> Tensor:
    """Returns an empty second result of a function of x, to which double backward gives zeros.

    Where torch's own backward takes its input as an argument, as those of pools do, gradients of
    gradients reach the input as zeros instead of `None`.
    """
    return x.new_empty(0)
