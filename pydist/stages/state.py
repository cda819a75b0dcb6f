"""Parameters, buffers and optimizer state of a network whose stages hold parts of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pydist.errors import UsageError
from pydist.exchange.own_slice import is_sharded_weight, own_slice
from pydist.layout import Layout
from pydist.slices.state import gathered, own_part
from pydist.stages.ranks import Stages, device_of
from pydist.stages.uses import Uses
from pydist.tensor import ShardedTensor, local_of


class StagedState:
    """State that a network in stages has, with methods that are collective over the job.

    Args:
        model: the network.
        stages: the stages.
        uses: which meshes use each parameter and buffer.
    """

    def __init__(self, model: nn.Module, stages: Stages, uses: Uses) -> None:
        self._model, self._stages, self._uses = model, stages, uses
        self._holders: dict[int, set[int]] = {}  # meshes with a gradient so far, by parameter

    @torch.no_grad()
    def gather(self) -> None:
        """Makes parameters and buffers up to date on all ranks; see `Pipeline.gather`."""
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            owner = self._owner(name, tensor)
            if owner is None or len(self._stages.meshes) == 1:
                continue
            is_mine, layout = owner == self._stages.index, _layout_of_slices(tensor)
            sent = _whole(tensor) if is_mine or layout is None else _like_whole(tensor)
            self._stages.world.broadcast(sent, self._stages.meshes[owner].rank(0, 0))
            if layout is not None:
                own_slice(tensor).copy_(own_part(sent, layout))
            elif sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state for all parameters; see `Pipeline.optimizer_state`."""
        state: dict[str, Any] = optimizer.state_dict()
        names = {id(p): name for name, p in self._model.named_parameters()}
        groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
        for group, described in groups:
            for p, index in zip(group["params"], described["params"], strict=True):
                owner = self._owner(names.get(id(p), ""), p)
                if owner is not None:
                    root = self._stages.meshes[owner].rank(0, 0)
                    found = _broadcast_entries(state["state"].get(index, {}), self._stages, root)
                    if found:
                        state["state"][index] = found
        return state

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the norm of all stages' gradients; see `Pipeline.clip_grad_norm_`."""
        total = torch.zeros(1, dtype=torch.float64)
        own = [(n, p) for n, p in self._model.named_parameters() if p.grad is not None]
        for name, p in own:
            if self._owner(name, p) == self._stages.index:
                assert p.grad is not None
                total += p.grad.detach().double().pow(2).sum().cpu()  # of slices: over the mesh
        if self._stages.world.rank != self._stages.own.rank(0, 0):
            total.zero_()  # another rank of the mesh has the same
        self._stages.world.all_reduce(total)
        norm = total.sqrt().squeeze()
        scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for _, p in own:
            assert p.grad is not None
            p.grad.mul_(scale)
        return norm.to(torch.get_default_dtype())

    def unscale_(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Unscales gradients; an overflow counts on all stages. See `Pipeline.unscale_`."""
        scaler.unscale_(optimizer)
        if not scaler.is_enabled():
            return
        # As torch's own scaler for sharded gradients does; there is no public way.
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        overflows = torch.zeros(1, dtype=torch.float32)
        for each in found.values():
            overflows += float(each)
        self._stages.world.all_reduce(overflows, "max")
        device = device_of(self._stages.mesh)
        none = torch.zeros((), dtype=torch.float32, device=device)
        found.setdefault(device, none)  # a stage without gradients
        for each in found.values():
            each.fill_(float(overflows))

    def compare_factors(self, factors: Sequence[float]) -> None:
        """Compares the numbers with which all ranks have scaled the loss of a step.

        Raises:
            UsageError: they differ, as after an overflow that one stage alone has noticed.
        """
        stages = self._stages
        rows = stages.world.all_gather(torch.tensor([crc32(repr(list(factors)).encode())]))
        for d in range(stages.mesh.data_size):
            found = {
                int(rows[mesh.rank(d, i)])
                for mesh in stages.meshes for i in range(mesh.sample_size)
            }  # fmt: skip
            if len(found) > 1:
                raise UsageError(
                    f"the criterion scales the loss by {list(factors)} on mesh {stages.index}, and "
                    "by other numbers on another one. With a GradScaler call "
                    "pipe.unscale_(scaler, optimizer) before scaler.step(optimizer), so that an "
                    "overflow counts on all stages; a criterion that counts its calls is called "
                    "as often as a rank passes over a micro-batch"
                )

    def shared_gradients(self) -> dict[int, Tensor]:
        """Returns copies of the gradients that several meshes have had, by parameter."""
        shared = (p for p in self._model.parameters() if len(self._holders.get(id(p), ())) > 1)
        return {id(p): p.grad.detach().clone() for p in shared if p.grad is not None}

    @torch.no_grad()
    def reduce_shared(self, before: Mapping[int, Tensor]) -> None:
        """Adds the gradients that a parameter got on several meshes in a step, for all its users.

        Which meshes these are is seen by the gradients: a parameter may reach a call through others
        on plain tensors, as a transposed weight does, or be part of the criterion.

        Args:
            before: `shared_gradients` before the step.
        """
        stages = self._stages
        parameters = list(self._model.named_parameters())  # also frozen, as ranks may differ in it
        mine = torch.tensor([p.grad is not None for _, p in parameters], dtype=torch.uint8)
        rows = stages.world.all_gather(mine)
        for i, (name, p) in enumerate(parameters):
            found = {s for s, each in enumerate(stages.meshes) if rows[each.rank(0, 0), i]}
            if found:  # and meshes that use it without a gradient, or they would keep old values
                found |= self._uses.meshes_of(name, p)
            self._holders.setdefault(id(p), set()).update(found)
            if len(found) < 2:
                continue
            old = before.get(id(p))
            message = torch.zeros(p.numel(), dtype=p.dtype)
            if p.grad is not None:
                new = _whole(p.grad if old is None else p.grad - old)
                if stages.world.rank == stages.own.rank(0, 0):
                    message += new.flatten().cpu()  # the mesh's other ranks have the same
            stages.world.all_reduce(message)
            if p.grad is not None or (stages.index in found and p.requires_grad):
                total, layout = message.view(p.shape).to(p.device), _layout_of_slices(p)
                if layout is not None:
                    total = own_part(total, layout)
                before_it = local_of(old) if isinstance(old, ShardedTensor) else old
                own_slice(p).grad = total if before_it is None else before_it + total

    def _owner(self, name: str, tensor: Tensor) -> int | None:
        """Returns the first mesh that trains a parameter or else uses it, if any."""
        used = self._holders.get(id(tensor)) or self._uses.meshes_of(name, tensor)
        return min(used, default=None)


def _layout_of_slices(tensor: Tensor) -> Layout | None:
    """Returns the layout of a sharded weight on this rank's mesh; `None` for other tensors."""
    return tensor.layout if is_sharded_weight(tensor) else None  # type: ignore[return-value]


def _whole(tensor: Tensor) -> Tensor:
    """Returns a tensor's value, on rank 0 of its mesh at least; collective over the mesh."""
    value = tensor.detach()
    found = gathered(value) if isinstance(value, ShardedTensor) else value.contiguous()
    return _like_whole(tensor) if isinstance(found, ShardedTensor) else found


def _like_whole(tensor: Tensor) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=own_slice(tensor).device)


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
