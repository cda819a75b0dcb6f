"""Gradients of a network whose stages hold parts of them, whole or partitioned (ZeRO-1)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from enum import IntFlag
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pydist.entry_hook import entry_hook_of
from pydist.errors import NotSupported, UsageError
from pydist.exchange.own_slice import own_slice
from pydist.gradients.leaf import leaf_of
from pydist.gradients.partitioned import PartitionedGradient, refuse_pending
from pydist.gradients.partitioned_bucket import ParameterPartition
from pydist.gradients.rows import in_memory_order_of, shaped_like
from pydist.slices.state import gathered, layout_of_slices, own_part
from pydist.stages.parameters import StagedParameters, is_of_criterion
from pydist.stages.ranks import Stages, device_of
from pydist.stages.sources import ValueRead, version_of
from pydist.stages.uses import Uses
from pydist.tensor import ShardedTensor, local_of


class _Seen(IntFlag):
    """What a mesh knows of a parameter after a step."""

    NOTHING = 0
    GRADIENT = 1
    """The step has added to its gradient."""
    CHANGED = 2
    """The step has changed it, and dropped its gradient."""
    UNKNOWN = 4
    """It had a gradient before, which was not kept."""
    HOOKS = 8
    """Users' hooks have seen the mesh's part of the gradient."""


class StagedGradients:
    """Gradients of all stages, with methods that are collective over the job.

    Args:
        model: the network.
        stages: the stages.
        uses: which meshes use each parameter and buffer.
        parameters: all that the passes train.
        ends: the meshes that may run the last stage, and the criterion.

    Attributes:
        inputs: of the running step: plain leaves, with their gradients before it.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        uses: Uses,
        parameters: StagedParameters,
        ends: set[int],
    ) -> None:
        self._model, self._stages, self._uses = model, stages, uses
        self._parameters, self._ends = parameters, ends
        self._warned = set[str]()
        self._holders: dict[str, set[int]] = {}  # meshes with a gradient so far, by parameter
        self.inputs: Sequence[tuple[Tensor, Tensor | None]] = ()
        # Before a step, by the ids of parameters: their versions, and their gradients with states.
        self._versions: dict[int, int] = {}
        self._known: dict[int, tuple[Tensor | None, tuple[object, ...]]] = {}

    def owner(self, name: str) -> int | None:
        """Returns the first mesh that trains a parameter or else uses it, if any."""
        used = self._holders.get(name) or (
            () if is_of_criterion(name) else self._uses.meshes_of(name)
        )
        return min(used, default=None)

    @torch.no_grad()
    def clip_norm(self, max_norm: float) -> Tensor:
        """Clips the norm of all stages' gradients; see `Pipeline.clip_grad_norm_`."""
        total = torch.zeros(1, dtype=torch.float64)
        own = [(n, p) for n, p in self._model.named_parameters() if p.grad is not None]
        for name, p in own:
            assert p.grad is not None
            if self.owner(name) != self._stages.index:
                continue
            if isinstance(p.grad, PartitionedGradient):
                refuse_pending(p.grad)
                total += _squares(p.grad.piece).cpu()
                continue
            squares = _squares(p.grad.detach())  # of slices: over the mesh
            if self._is_first:  # other ranks of the mesh have the same
                total += squares.cpu()
        self._stages.world.all_reduce(total)
        norm = total.sqrt().squeeze()
        scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for _, p in own:
            assert p.grad is not None
            p.grad.mul_(scale)
        dtypes = {p.dtype for p in self._model.parameters()}
        is_double = not dtypes.isdisjoint({torch.float64, torch.complex128})
        return norm.to(torch.float64 if is_double else torch.get_default_dtype())

    def unscale(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
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

    def compare_values(
        self, factors: Sequence[float], reads: Sequence[ValueRead], given: str
    ) -> None:
        """Compares the numbers with which all ranks have scaled the loss, and values of weights.

        A rank has old values of other stages' weights. Where what a network reads of them is the
        same on all ranks, such as whether they are finite, it is right on all.

        Args:
            factors: of the loss.
            reads: the values that the network has read on this rank.
            given: describes what else ranks exchange for the step.

        Raises:
            UsageError: the factors differ, as after an overflow that one stage alone has noticed;
                or ranks were given another criterion or other inputs.
            NotSupported: a rank has read an old value, and not all have read the same.
        """
        stages = self._stages
        values = [(each.what, each.checksum) for each in reads]
        said = [crc32(repr(each).encode()) for each in (list(factors), values, given)]
        rows = stages.world.all_gather(torch.tensor([*said, any(r.is_old for r in reads)]))
        if len(set(rows[:, 2].tolist())) > 1:
            raise UsageError(
                f"pipe.step has {given} on rank {stages.world.rank}, and others on another rank: "
                "give all ranks the same criterion, and inputs of which the same require a gradient"
            )
        for d in range(stages.mesh.data_size):
            ranks = [mesh.rank(d, i) for mesh in stages.meshes for i in range(mesh.sample_size)]
            is_old = any(bool(rows[rank, 3]) for rank in ranks)
            if is_old and len({int(rows[rank, 1]) for rank in ranks}) > 1:
                names = "; ".join(sorted({what for what, _ in values})) or "nothing on this rank"
                raise NotSupported(
                    "the network or its criterion reads a value of weights that another stage "
                    f"trains, and it differs between ranks: {names}. Compute with tensors instead, "
                    "or read it between steps, after pipe.gather()"
                )
            if len({int(rows[rank, 0]) for rank in ranks}) > 1:
                raise UsageError(
                    f"the criterion scales the loss by {list(factors)} on mesh {stages.index}, and "
                    "by other numbers on another one. With a GradScaler call "
                    "pipe.unscale_(scaler, optimizer) before scaler.step(optimizer), so that an "
                    "overflow counts on all stages; a criterion that counts its calls is called "
                    "as often as a rank passes over a micro-batch"
                )

    @torch.no_grad()
    def of_shared(self) -> dict[int, Tensor]:
        """Returns the whole gradients that several meshes may add to, by parameter.

        Raises:
            NotSupported: the ranks of a mesh have not averaged one of them.
        """
        named = list(self._parameters.named())
        self._versions = {id(p): version_of(own_slice(p)) for _, p in named}
        grads = ((id(p), own_slice(p).grad) for _, p in named)
        self._known = {key: (grad, grad_state_of(grad)) for key, grad in grads}
        found = {}
        for name, p in named:
            if p.grad is not None and self._may_be_shared(name):
                leaf = leaf_of(own_slice(p))
                if leaf is not None and leaf.has_part(own_slice(p)):
                    raise NotSupported(
                        f"a step of stages after a backward pass under no_sync, or one that "
                        f"raised, which has added to {name}, a parameter of several meshes: end "
                        "that accumulation before; after an error call zero_grad()"
                    )
                found[id(p)] = self._whole(p)
        return found

    @torch.no_grad()
    def spoil(self) -> None:
        """Fills with NaN the gradients to which a step has added that ends by an exception.

        So nothing takes them for gradients, however they are scaled, added to or gathered, until
        they are cleared. Inputs get back the gradients that they had.
        """
        for x, old in self.inputs:
            x.grad = old
        for _, p in self._parameters.named():
            own = own_slice(p)
            grad = own.grad
            if grad is None or id(p) not in self._known or not self._has_added(p):
                continue
            if grad.is_sparse:
                own.grad = torch.full_like(own, torch.nan)
                continue
            own_part_of(grad).fill_(torch.nan)
            if isinstance(grad, PartitionedGradient):
                grad.spoiled = True
        self._known, self.inputs = {}, ()  # the next step may raise before it knows them

    @torch.no_grad()
    def reduce_shared(self, before: Mapping[int, Tensor]) -> None:
        """Adds the gradients that a parameter got on several meshes in a step, for all its users.

        Which meshes these are is seen by the gradients that have changed: a parameter may reach a
        call through others on plain tensors, as a transposed weight does, or be part of the
        criterion. On other meshes a gradient may be there before, as of a penalty.

        Args:
            before: `of_shared` before the step.

        Raises:
            NotSupported: the backward pass has changed a parameter and dropped its gradient; or
                several meshes have added to one that no earlier step showed to be shared, and that
                had a gradient before.
        """
        stages = self._stages
        parameters = list(self._parameters.named())  # also frozen, as ranks may differ in it
        rows = stages.world.all_gather(
            torch.tensor([self._knowledge(p, before) for _, p in parameters], dtype=torch.uint8)
        )
        for i, (name, p) in enumerate(parameters):
            seen = [int(rows[each.rank(0, 0), i]) for each in stages.meshes]
            found = {s for s, each in enumerate(seen) if each & _Seen.GRADIENT}
            if not found and _Seen.CHANGED in seen:
                raise NotSupported(
                    f"{name} was changed in the backward pass, and has no gradient: an optimizer "
                    "in a hook is not possible, as stages share gradients after that pass; call "
                    "optimizer.step() after pipe.step()"
                )
            # And meshes that use it without a gradient, or they would keep old values.
            if found:
                found |= self._users(name)
            if found and not is_of_criterion(name):
                self._uses.note_gradient(name)
            self._holders.setdefault(name, set()).update(found)
            if len(found) < 2:
                continue
            if any(each & _Seen.UNKNOWN for each in seen):
                raise NotSupported(
                    f"{name} was used on one mesh of the stages before, and is on several now; it "
                    "has an earlier gradient, from which theirs can't be told: call zero_grad() "
                    "before this step"
                )
            if any(each & _Seen.HOOKS for each in seen):
                self._warn_of_hooks(name)
            message, old = torch.zeros(p.numel(), dtype=p.dtype), None
            if seen[stages.index] & _Seen.GRADIENT:
                old = before.get(id(p))
                message += self._addend(p).flatten().cpu()
                if old is not None and self._is_first:
                    message -= old.flatten().cpu()
            elif p.grad is not None:
                old = self._whole(p)
            stages.world.all_reduce(message)
            if stages.index in found and p.requires_grad:
                total = message.view(p.shape).to(own_slice(p).device)
                self._assign(p, total if old is None else old + total)
        self._known = {}  # which keeps gradients alive

    @torch.no_grad()
    def reduce_inputs(self) -> None:
        """Adds the gradients of inputs over all meshes, which compute with them; for each group."""
        stages = self._stages
        mesh = stages.mesh
        for x, old in self.inputs:
            sizes = stages.world.all_gather(torch.tensor([x.numel()]))  # groups may differ
            ranks = [stages.meshes[0].rank(d, 0) for d in range(mesh.data_size)]
            rows = torch.zeros(int(sizes[ranks].sum()), dtype=x.dtype)
            own = rows.split(sizes[ranks].flatten().tolist())[mesh.data_index]
            if x.grad is not None and mesh.sample_index == 0:  # other ranks have the same
                own += x.grad.flatten().cpu()
                if old is not None:
                    own -= old.flatten().cpu()
            stages.world.all_reduce(rows)
            total = own.clone().view(x.shape).to(x.device)
            x.grad = total if old is None else old + total
        self.inputs = ()

    def _users(self, name: str) -> set[int]:
        """Returns the meshes that compute with a parameter, or have had a gradient of it."""
        held = self._holders.get(name, set())
        return held | (self._ends if is_of_criterion(name) else self._uses.meshes_of(name))

    def _may_be_shared(self, name: str) -> bool:
        """Returns whether several meshes may add to a gradient, as far as earlier steps tell."""
        return name not in self._holders or len(self._users(name)) > 1

    def _warn_of_hooks(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"hooks of {name}, a parameter of several meshes: each has seen the gradient of "
                "its own mesh, and the sum is formed after the step. What is not linear, such as "
                "clamping, gives another number: do it after pipe.step()",
                stacklevel=2,
            )

    def _has_added(self, parameter: Tensor) -> bool:
        """Returns whether the step has added to a gradient."""
        grad = own_slice(parameter).grad
        _, old = self._known.get(id(parameter), (None, ()))
        return grad is not None and grad_state_of(grad) != old

    def _knowledge(self, parameter: Tensor, before: Mapping[int, Tensor]) -> _Seen:
        """Returns what this rank knows of a parameter after a step."""
        own = own_slice(parameter)
        earlier, _ = self._known.get(id(parameter), (None, ()))
        if self._has_added(parameter):
            is_unknown = earlier is not None and id(parameter) not in before
            found = _Seen.UNKNOWN if is_unknown else _Seen.NOTHING
            return _Seen.GRADIENT | found | (_Seen.HOOKS if _has_hooks(own) else _Seen.NOTHING)
        has_changed = self._versions.get(id(parameter), version_of(own)) != version_of(own)
        is_lost = own.grad is None and parameter.requires_grad and has_changed
        return _Seen.CHANGED if is_lost else _Seen.NOTHING

    @property
    def _is_first(self) -> bool:
        """Whether this is the first rank of its mesh."""
        return self._stages.world.rank == self._stages.own.rank(0, 0)

    def _part(self, parameter: Tensor) -> ParameterPartition:
        part = entry_hook_of(self._model).reducer.members.part_of(parameter)
        assert part is not None
        return part

    def _addend(self, parameter: Tensor) -> Tensor:
        """Returns a tensor whose sum over the ranks of this mesh is the whole gradient."""
        grad, whole = parameter.grad, _zeros_like_whole(parameter)
        assert grad is not None
        if not isinstance(grad, PartitionedGradient):
            found = gathered(grad) if isinstance(grad, ShardedTensor) else grad
            return found if self._is_first else whole  # other ranks of the mesh have the same
        refuse_pending(grad)
        part, own = self._part(parameter), own_slice(parameter)
        row = torch.zeros(own.numel(), dtype=own.dtype, device=own.device)
        row[part.start : part.stop] = grad.piece
        layout = layout_of_slices(parameter)
        place = whole if layout is None else whole[layout.box.slices]
        place.copy_(shaped_like(row, own))
        return whole

    def _whole(self, parameter: Tensor) -> Tensor:
        """Returns a copy of the whole gradient; collective over the mesh."""
        if isinstance(parameter.grad, PartitionedGradient):
            found = self._addend(parameter)
            self._stages.mesh.world.all_reduce(found)
            return found
        grad = parameter.grad
        assert grad is not None
        return gathered(grad) if isinstance(grad, ShardedTensor) else grad.detach().clone()

    def _assign(self, parameter: Tensor, whole: Tensor) -> None:
        """Makes this rank's part of a whole gradient the parameter's, in the form that it has."""
        own, layout = own_slice(parameter), layout_of_slices(parameter)
        if layout is not None:
            whole = own_part(whole, layout)
        if isinstance(own.grad, PartitionedGradient):
            part = self._part(parameter)
            own.grad.piece.copy_(in_memory_order_of(own, whole)[part.start : part.stop])
            own.grad.gradient_set.forget_norms()
        else:
            own.grad = whole


def own_part_of(grad: Tensor) -> Tensor:
    """Returns this rank's part of a gradient, in its own memory."""
    if isinstance(grad, PartitionedGradient):
        return grad.piece
    return local_of(grad) if isinstance(grad, ShardedTensor) else grad


def is_spoiled(grad: Tensor) -> bool:
    """Returns whether a gradient may be one of `StagedGradients.spoil`: it has NaN."""
    if isinstance(grad, PartitionedGradient):
        return grad.spoiled
    return bool(own_part_of(grad).isnan().any())


def grad_state_of(grad: Tensor | None) -> tuple[object, ...]:
    """Returns what changes with this rank's part of a gradient, while that is alive."""
    if grad is None:
        return ()
    own = own_part_of(grad)
    state = id(own), version_of(own)
    if isinstance(grad, PartitionedGradient):
        return (*state, *grad_state_of(grad.pending), grad.arriving)
    return state


def _has_hooks(own: Tensor) -> bool:
    """Returns whether users have registered hooks on a parameter."""
    leaf, tensor = leaf_of(own), cast("Any", own)
    if leaf is not None:
        return leaf.is_hooked
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _squares(grad: Tensor) -> Tensor:
    return grad.abs().double().pow(2).sum()  # abs, as a gradient may be complex


def _zeros_like_whole(parameter: Tensor) -> Tensor:
    device = own_slice(parameter).device
    return torch.zeros(tuple(parameter.shape), dtype=parameter.dtype, device=device)
