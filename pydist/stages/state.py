"""Parameters, buffers and optimizer state of a network whose stages hold parts of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pydist.stages.ranks import Stages
from pydist.stages.uses import Uses


class State:
    """The state of a network in stages. All methods are collective over the job.

    Args:
        model: the network.
        stages: the stages.
        uses: which stages use each parameter and buffer.
    """

    def __init__(self, model: nn.Module, stages: Stages, uses: Uses) -> None:
        self._model, self._stages, self._uses = model, stages, uses

    @torch.no_grad()
    def gather(self) -> None:
        """Makes parameters and buffers up to date on all ranks; see `Pipeline.gather`."""
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            used = self._uses.stages_of(name, tensor)
            if used and self._stages.count > 1:
                sent = tensor.detach().contiguous()
                self._stages.world.broadcast(sent, self._stages.all[min(used)].rank(0, 0))
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state for all parameters; see `Pipeline.optimizer_state`."""
        state: dict[str, Any] = optimizer.state_dict()
        names = {id(p): name for name, p in self._model.named_parameters()}
        groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
        for group, described in groups:
            for p, index in zip(group["params"], described["params"], strict=True):
                used = self._uses.stages_of(names.get(id(p), ""), p)
                if used:
                    root = self._stages.all[min(used)].rank(0, 0)
                    found = _broadcast_entries(state["state"].get(index, {}), self._stages, root)
                    if found:
                        state["state"][index] = found
        return state

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the norm of all stages' gradients; see `Pipeline.clip_grad_norm_`."""
        total = torch.zeros(1, dtype=torch.float64)
        own = [(n, p) for n, p in self._model.named_parameters() if p.grad is not None]
        if self._stages.world.rank == self._stages.own.rank(0, 0):
            for name, p in own:
                if min(self._uses.stages_of(name, p), default=0) == self._stages.index:
                    assert p.grad is not None
                    total += p.grad.detach().double().pow(2).sum().cpu()
        self._stages.world.all_reduce(total)
        norm = total.sqrt().squeeze()
        scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for _, p in own:
            assert p.grad is not None
            p.grad.mul_(scale)
        return norm.to(torch.get_default_dtype())

    def tied(self) -> list[tuple[nn.Parameter, set[int]]]:
        """Returns the trained parameters that several stages use, with these stages."""
        named = self._model.named_parameters()
        found = [(p, self._uses.stages_of(n, p)) for n, p in named if p.requires_grad]
        return [(p, used) for p, used in found if len(used) > 1]

    def reduce_tied(self, before: Mapping[int, Tensor]) -> None:
        """Adds the gradients that a parameter got on several stages.

        Args:
            before: the gradients before the step, by the ids of the parameters.
        """
        represents = self._stages.world.rank == self._stages.own.rank(0, 0)
        for parameter, used in self.tied():
            holds, old = self._stages.index in used, before.get(id(parameter))
            grad = parameter.grad if holds else None
            message = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype)
            if represents and grad is not None:  # the stage's other ranks have the same
                added = grad if old is None else grad - old
                message[:-1], message[-1] = added.detach().flatten(), 1
            self._stages.world.all_reduce(message)
            if holds and message[-1] > 0:
                total = message[:-1].view(parameter.shape).to(parameter.device)
                parameter.grad = total if old is None else old + total


def _broadcast_entries(mine: Mapping[str, Any], stages: Stages, root: int) -> dict[str, Any]:
    """Broadcasts an optimizer's state of one parameter: tensors, and numbers."""
    world, described = stages.world, {}
    if world.rank == root:
        for name, value in mine.items():
            is_tensor = isinstance(value, Tensor)
            kind = [str(value.dtype).removeprefix("torch."), list(value.shape)] if is_tensor else 0
            described[name] = [kind, None if is_tensor else value]
    found: dict[str, Any] = {}
    message = world.broadcast_bytes(json.dumps(described).encode(), root)
    for name, (kind, value) in json.loads(message).items():
        if not kind:
            found[name] = value
            continue
        dtype, shape = kind
        sent = torch.empty(shape, dtype=getattr(torch, dtype))
        if world.rank == root:
            sent = mine[name].detach().cpu().contiguous()
        world.broadcast(sent, root)
        found[name] = sent
    return found
