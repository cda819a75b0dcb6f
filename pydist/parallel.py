"""parallelize: an unmodified network on a mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pydist.comm.reducer import Reducer
from pydist.errors import NotSupported, UsageError
from pydist.mesh import Mesh
from pydist.ops.norm import STATISTICS
from pydist.tensor import Origin, ShardedTensor, distribute_tensor

_COMPILER = "torch/_dynamo/eval_frame.py"

_M = TypeVar("_M", bound=nn.Module)


def parallelize(model: _M, mesh: Mesh, batch_norm: str = "global") -> _M:
    """Trains `model` on a mesh: on split samples, over several groups, or both.

    The model keeps its class, its hooks and its `state_dict` keys; only hooks are added. All ranks
    start from the parameters and buffers of rank 0. Inputs may be sharded (as a `Loader` gives
    them) or plain 5-D tensors, equal on all ranks of a sample group, which are cut on entry. After
    `backward()` every gradient is the mean over the sample groups, as under DDP. The optimizer may
    be made before or after. `model.no_sync()` postpones the reduction to accumulate gradients.

    Args:
        model: any `nn.Module`; its calls on sharded tensors must have handlers.
        mesh: the mesh, from `pydist.init`.
        batch_norm: over which ranks batch norm forms its statistics in training: "global" (all;
            what one device with the whole batch computes), "group" (the sample group) or "rank".
            Running statistics are the mean over the ranks in each case.

    Returns:
        The same object.

    Raises:
        UsageError: `batch_norm` is none of these, or the model is parallelized already.
    """
    if batch_norm not in STATISTICS:
        raise UsageError(f"batch_norm={batch_norm!r}; possible are {', '.join(STATISTICS)}")
    if "_pydist_path" in model.__dict__:
        raise UsageError(f"this {type(model).__name__} is parallelized already")
    for path, module in model.named_modules():
        module.__dict__["_pydist_path"] = path or type(model).__name__
    _broadcast_state(model, mesh)
    entry = _Entry(mesh, batch_norm, Reducer(model.parameters(), mesh))
    model.register_forward_pre_hook(entry, with_kwargs=True)
    model.__dict__["no_sync"] = entry.reducer.no_sync
    return model


class _Entry:
    """The hook at the model's entry: counts the forward passes, and wraps the inputs."""

    def __init__(self, mesh: Mesh, statistics: str, reducer: Reducer) -> None:
        self.mesh, self.statistics, self.reducer = mesh, statistics, reducer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Entry:
        # A copy of the model (an average of its weights, say) runs on the same mesh; its own
        # parameters are not reduced.
        return self

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _refuse_compiler()
        if module.training and torch.is_grad_enabled():
            self.mesh.forwards += 1
            self.reducer.forget_unfinished()
        return (
            tuple(self._wrap(a) for a in args),
            {name: self._wrap(a) for name, a in kwargs.items()},
        )

    def _wrap(self, x: Any) -> Any:
        if isinstance(x, ShardedTensor):
            first = x._origin.first_sample
        elif isinstance(x, Tensor) and x.dim() == 5:
            x = distribute_tensor(x, self.mesh)
            first = x._origin.first_sample
        else:
            return x
        origin = Origin(self.mesh.forwards, first, self.statistics)
        return ShardedTensor(x.to_local(), x.layout, origin)


def _refuse_compiler() -> None:
    """Stops a call through torch.compile.

    While the compiler traces, an error raised here only makes it fall back to running this call
    as it is, still inside of it: so its frames are looked for.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            raise NotSupported(
                "torch.compile of a parallelized model: the compiler can't trace exchanges "
                "between ranks; call the model without it"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _broadcast_state(model: nn.Module, mesh: Mesh) -> None:
    """Overwrites parameters and buffers with those of rank 0."""
    with torch.no_grad():
        for tensor in _distinct([*model.parameters(), *model.buffers()]):
            sent = tensor.detach().contiguous()
            mesh.world.broadcast(sent)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())
