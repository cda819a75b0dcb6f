"""Manages models with compressed gradients: state, scale of the loss, average parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist.comm.consensus import together
from pydist.entry_hook import EntryHook, entry_hook_of
from pydist.errors import UsageError
from pydist.gradients.forms.local import LocalForm
from pydist.gradients.forms.stateful import LeafState, StatefulForm, SteppedForm
from pydist.mesh import Mesh
from pydist.watchdog import SPAN, phase


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Tells a compressed form by how much the loss of the next backward pass is scaled.

    What a form keeps for later steps has no loss scale, so that a `GradScaler` may change it. Call
    this before each `backward()` with `scaler.get_scale()`. Forms without state ignore it.

    Args:
        model: the parallelized model.
        scale: the scale, the same on all ranks.
    """
    for form in _forms(entry_hook_of(model)):
        if isinstance(form, StatefulForm):
            form.scale = float(scale)


def gradient_state(model: nn.Module) -> dict[str, Any]:
    """Returns what a compressed form of gradients keeps for later steps. Collective.

    Args:
        model: the parallelized model.

    Returns:
        On rank 0 of the mesh the state, with tensors on the CPU, for `load_gradient_state`: "form",
        "steps", "groups", and "parameters" by name. What each sample group has not sent has the
        groups as dim 0. An empty dict on other ranks, and for forms without state.
    """
    entry = entry_hook_of(model)
    with phase("gradient_state(), to be called on all ranks", SPAN):
        for form in _forms(entry):
            return _gathered(form, entry.mesh)
    return {}


def load_gradient_state(model: nn.Module, state: Mapping[str, Any], steps: int = 0) -> str:
    """Loads what `gradient_state` has returned on rank 0. Collective.

    With another number of sample groups each of them begins with the mean of what the saved ones
    have not sent, so that nothing of it is lost.

    Args:
        model: the parallelized model, with the same form of gradients.
        state: the state, the same on all ranks.
        steps: number of steps so far, for a state that does not have it, as that of one group.

    Returns:
        A line about what could not be restored as it was; "" if all of it was.

    Raises:
        UsageError: it is the state of another form or model; on all ranks.
    """
    entry = entry_hook_of(model)
    groups = entry.mesh.data_size
    forms = _forms(entry)
    if not forms:
        return (
            f'the state of gradients = "{state["form"]}" of {state["groups"]} sample groups is not '
            "used: this run sends no compressed gradients"
            if state.get("parameters")
            else ""
        )
    with together(entry.mesh.world, "loading the state of gradients"):
        (form,) = forms
        if state:
            _check(form, state)
        form.restart(int(state.get("steps", steps)))
        if isinstance(form, StatefulForm):
            for name, saved in state.get("parameters", {}).items():
                form.accept(name, saved, entry.mesh.data_index)
    if not state.get("parameters") or state["groups"] == groups:
        return ""
    return (
        f'gradients = "{form.name}": the state is of {state["groups"]} sample groups, and there '
        f"are {groups}: each begins with the mean of what those had not sent"
    )


@torch.no_grad()
def average_parameters(
    model: nn.Module, optimizer: Optimizer | None = None, *, always: bool = False
) -> bool:
    """Averages parameters over the sample groups, if `pydist.gradients.PostLocal` says so.

    Collective. Call it after each step of the optimizer. It does nothing for other forms.

    Args:
        model: the parallelized model.
        optimizer: its optimizer, whose state (of floating-point tensors with dims) is averaged as
            well.
        always: whether to average now, for example before a validation, if groups differ.

    Returns:
        Whether it has averaged, the same on all ranks.
    """
    entry = entry_hook_of(model)
    averaged = False
    for form in entry.forms:
        if not isinstance(form, LocalForm) or not (form.is_due or (always and form.differs)):
            continue
        averaged = True
        found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for each in _averaged(model, optimizer):
            found.setdefault((each.dtype, each.device), []).append(each)
        rows = [torch.cat([x.reshape(-1) for x in same]) for same in found.values()]
        with entry.mesh.session.timers.measure("gradients"):
            form.average(rows)
        for row, same in zip(rows, found.values(), strict=True):
            for x, mean in zip(same, row.split([x.numel() for x in same]), strict=True):
                x.copy_(mean.view(x.shape))
    return averaged


def _averaged(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """Returns a model's parameters, and their state in an optimizer, in one order on all ranks."""
    found: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.is_floating_point():
            found.append(parameter.detach())
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        found += [
            state[name] for name in sorted(state)
            if isinstance(state[name], Tensor) and state[name].is_floating_point()
            and state[name].dim()
        ]  # fmt: skip
    return found


def _forms(entry: EntryHook) -> list[SteppedForm]:
    return [form for form in entry.forms if isinstance(form, SteppedForm)]


def _check(form: SteppedForm, state: Mapping[str, Any]) -> None:
    if state.get("form") != form.name:
        raise UsageError(
            f"the state is of gradients = {state.get('form')!r}, and this model has {form.name!r}"
        )
    known = form.shapes if isinstance(form, StatefulForm) else {}
    unknown = [name for name in state["parameters"] if name not in known]
    if unknown:
        raise UsageError(
            f"the state of gradients has a parameter {unknown[0]}, which the model does not have"
        )


def _gathered(form: SteppedForm, mesh: Mesh) -> dict[str, Any]:
    found = _parameters(form, mesh) if isinstance(form, StatefulForm) else {}
    if mesh.rank != 0:
        return {}
    return {
        "form": form.name, "steps": form.steps, "groups": mesh.data_size, "parameters": found,
    }  # fmt: skip


def _parameters(form: StatefulForm, mesh: Mesh) -> dict[str, LeafState]:
    """Gathers the owners' states on rank 0, parameter by parameter."""
    names = list(form.shapes)
    exists = torch.tensor([name in form.state for name in names], dtype=torch.int32)
    mesh.world.all_reduce(exists, "max")
    found: dict[str, LeafState] = {}
    for name, has_state in zip(names, exists.tolist(), strict=True):
        if not has_state:
            continue
        owner, kept = form.owner_of(name), form.state.get(name)
        for quantity, shape in form.quantities(name).items():
            value = None if kept is None else kept[quantity].contiguous()
            if value is not None and quantity not in form.shared:
                value = mesh.data.all_gather(value)
            if mesh.data_index == 0:
                whole = shape if quantity in form.shared else (mesh.data_size, *shape)
                value = _on_rank_0(value, owner, torch.Size(whole), mesh, form.dtypes[name])
            if mesh.rank == 0:
                assert value is not None
                found.setdefault(name, {})[quantity] = value.cpu()
    return found


def _on_rank_0(
    value: Tensor | None, owner: int, shape: torch.Size, mesh: Mesh, dtype: torch.dtype
) -> Tensor | None:
    """Sends a tensor from its owner to the first rank of the sample group."""
    if owner == 0:
        return value
    if mesh.sample_index == owner:
        assert value is not None
        mesh.sample.send(value.cpu(), 0)
    if mesh.sample_index != 0:
        return None
    whole = torch.empty(shape, dtype=dtype)
    mesh.sample.recv(whole, owner)
    return whole
