"""Parameters, buffers and optimizer state of a network whose stages hold parts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pydist.errors import CheckpointError
from pydist.exchange.own_slice import own_slice
from pydist.nested_state import flatten_state, unflatten_state
from pydist.slices.state import gathered, layout_of_slices, own_part
from pydist.stages.parameters import StagedParameters
from pydist.stages.ranks import Stages
from pydist.tensor import ShardedTensor


class StagedState:
    """State that a network in stages has, with methods that are collective over the job.

    Args:
        model: the network.
        stages: the stages.
        owner: returns the mesh that has a named parameter or buffer up to date, if any has.
        parameters: all that the passes train.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        owner: Callable[[str], int | None],
        parameters: StagedParameters,
    ) -> None:
        self._model, self._stages, self._owner = model, stages, owner
        self._parameters = parameters

    @torch.no_grad()
    def gather(self) -> None:
        """Makes parameters and buffers up to date on all ranks; see `Pipeline.gather`."""
        for name, tensor in (*self._parameters.named(), *self._model.named_buffers()):
            owner = self._owner(name)
            if owner is None or len(self._stages.meshes) == 1:
                continue
            is_mine, layout = owner == self._stages.index, layout_of_slices(tensor)
            sent = _whole(tensor) if is_mine or layout is None else _like_whole(tensor)
            self._stages.world.broadcast(sent, self._stages.meshes[owner].rank(0, 0))
            if layout is not None:
                own_slice(tensor).copy_(own_part(sent, layout))
            elif sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state for all parameters; see `Pipeline.optimizer_state`."""
        state: dict[str, Any] = optimizer.state_dict()
        names = {id(p): name for name, p in self._parameters.named()}
        groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
        for group, described in groups:
            for p, index in zip(group["params"], described["params"], strict=True):
                owner = self._owner(names.get(id(p), ""))
                if owner is not None:
                    root = self._stages.meshes[owner].rank(0, 0)
                    found = _broadcast_entries(state["state"].get(index, {}), self._stages, root)
                    if found:
                        state["state"][index] = found
        return state


def _whole(tensor: Tensor) -> Tensor:
    """Returns a tensor's value, on rank 0 of its mesh at least; collective over the mesh."""
    value = tensor.detach()
    found = gathered(value) if isinstance(value, ShardedTensor) else value.contiguous()
    return _like_whole(tensor) if isinstance(found, ShardedTensor) else found


def _like_whole(tensor: Tensor) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=own_slice(tensor).device)


def _broadcast_entries(mine: Mapping[str, Any], stages: Stages, root: int) -> dict[str, Any]:
    """Broadcasts an optimizer's state of one parameter: tensors, plain values, and containers.

    Raises:
        CheckpointError: on all ranks; it has a value that is none of these.
    """
    world, described, tensors = stages.world, None, dict[str, Tensor]()
    if world.rank == root:
        try:
            skeleton, tensors = flatten_state(dict(mine))
            kinds = {n: [str(x.dtype).removeprefix("torch."), x.shape] for n, x in tensors.items()}
            described = [skeleton, kinds, ""]
        except CheckpointError as error:
            described = [None, {}, str(error)]
    skeleton, kinds, reason = world.broadcast_json(described, root)
    if reason:
        raise CheckpointError(reason)
    for name, (dtype, shape) in kinds.items():
        sent = tensors.setdefault(name, torch.empty(shape, dtype=getattr(torch, dtype)))
        world.broadcast(sent, root)
    found: dict[str, Any] = unflatten_state(skeleton, tensors)
    return found
