"""`StageTensor`, a tensor of a network whose calls are divided into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pydist.errors import NotSupported
from pydist.tensor.handlers import OUTER
from pydist.tensor.wrapper import GET_GRAD_FN, GET_REQUIRES_GRAD, of_wrapper, tensors_of


class CallHandler(Protocol):
    """Interface that executes the calls of one forward pass.

    Attributes:
        device: the device of the values.
    """

    device: torch.device

    def handle(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a call on stage tensors."""


class StageTensor(torch.Tensor):
    """A tensor that a forward pass shows on all stages, and that only some of them hold.

    Every rank runs the forward pass of the whole network on stage tensors. A call is computed by
    the stage that it belongs to; the others propagate shapes and dtypes.

    Attributes:
        calls: the forward pass.
        number: of earlier tensors of the pass.
        meta: a tensor on torch's meta device, with the shape, dtype and views of this one.
        value: the tensor, sharded or plain, on the stages that hold it; else `None`.
        needs_grad: whether a gradient flows back into it.
        made: whether a call has made it, so that it is not an argument of the network.
        owner: the last stage that computed it.
        stages: the stages that hold its present value.
    """

    calls: CallHandler
    number: int
    meta: Tensor
    value: Tensor | None
    needs_grad: bool
    made: bool
    owner: int
    stages: set[int]

    @staticmethod
    def __new__(
        cls, calls: CallHandler, meta: Tensor, value: Tensor | None, device: torch.device
    ) -> StageTensor:
        """Wraps a value, or what is known of the value of another stage."""
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, dtype=meta.dtype, device=device
        )
        wrapper.calls, wrapper.meta, wrapper.value = calls, meta, value
        return wrapper

    # The override is ignored as torch declares no types.
    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        where = "here" if self.value is not None else f"on stage {self.owner}"
        return f"StageTensor(shape={tuple(self.meta.shape)}, {self.meta.dtype}, {where})"

    def now_needs_grad(self) -> None:
        """Records that a gradient flows back into the tensor, and guards the wrapper against it."""
        self.needs_grad = True
        if not of_wrapper(GET_REQUIRES_GRAD, self):
            of_wrapper(torch.Tensor.requires_grad_, self)

    def refuse_foreign_graph(self) -> None:
        """Raises if the wrapper has become a node of a graph.

        Raises:
            NotSupported: an `autograd.Function` was applied to it, whose backward would be skipped.
        """
        node = of_wrapper(GET_GRAD_FN, self)
        if node is not None:
            raise NotSupported(
                f"{node.name()} was applied to a tensor of a network in stages, so its backward "
                "would be skipped: autograd.Function bypasses torch's overrides (for "
                "torch.utils.checkpoint use_reentrant=False is possible)"
            )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = next(x for x in tensors_of((args, kwargs)) if isinstance(x, StageTensor))
        return found.calls.handle(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares other types
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise NotSupported(
            f"{func} on a tensor of a network in stages, which has no memory here: "
            "autograd.Function, torch.func and vmap bypass torch's overrides"
        )


OUTER.add(StageTensor)
