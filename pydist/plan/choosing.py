"""Chooses the mesh of a job by its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pydist import memory
from pydist.errors import UsageError
from pydist.grid import OTHER_AXES, Grid
from pydist.hardware import PROFILES, Hardware, load_hardware, this_machine
from pydist.plan.estimate import Estimate, StepModel, Training
from pydist.plan.kept import KeptConvs
from pydist.plan.table import plan_meshes
from pydist.plan.trace import Trace, trace_network

_GIB = 2**30
_OTHER_DEVICE = "a100"
"""The profile for devices without one."""


def best_mesh(
    model: nn.Module,
    sample: Sequence[int],
    training: Training,
    criterion: Callable[[Any], Tensor] | None = None,
    hardware: Hardware | None = None,
) -> Callable[[int], Grid]:
    """Returns a function that chooses the mesh of a number of ranks, for `pydist.init`.

        mesh = pydist.init(mesh=pydist.plan.best_mesh(network, (4, 128, 128, 128), Training(8)))

    It cuts samples and batches only.

    Args:
        model: the plain network; unchanged.
        sample: shape of a sample, channels first.
        training: what is trained, and how.
        criterion: computes the loss from the output on the meta device; by default the mean.
        hardware: of a rank; by default that of `hardware_here`.

    Returns:
        The function. It raises `UsageError` if no mesh fits in the hardware's memory, and
        `NotSupported` as `trace_network` does.
    """

    def choose(ranks: int) -> Grid:
        found = hardware or hardware_here()
        trace = trace_network(model, sample, criterion)
        return choose_mesh(step_model(trace, training, found, ranks), ranks).grid

    return choose


def choose_mesh(
    model: StepModel,
    ranks: int,
    data: int | None = None,
    parts: Mapping[str, int] = MappingProxyType({}),
    accepts: Callable[[Grid], bool] = lambda grid: True,
) -> Estimate:
    """Returns the estimate of the fastest mesh that fits in the hardware's memory.

    Args:
        model: of the step.
        ranks: number of ranks.
        data: number of sample groups; by default any, up to a sample of a pass for each.
        parts: number of ranks along axes besides data and space, by name; others have one.
        accepts: whether a mesh is possible otherwise.

    Raises:
        UsageError: no mesh fits, or has these parts.
    """
    wanted = {axis: parts.get(axis, 1) for axis in OTHER_AXES}

    def allowed(grid: Grid) -> bool:
        fits = data is None or grid.size(("data",)) == data
        fits = fits and all(grid.size((axis,)) == size for axis, size in wanted.items())
        return fits and accepts(grid)

    found = plan_meshes(model, ranks, allowed=allowed)
    if not found:
        of_data = f"at most {model.training.most_groups} sample groups"
        if data is not None:
            of_data = f"data {data}, {of_data}"
        of_others = ", ".join(f"{axis} {size}" for axis, size in wanted.items())
        raise UsageError(f"no mesh of {ranks} ranks has {of_others} and {of_data}")
    best, limit = found[0], model.hardware.memory
    if best.peak > limit:
        raise UsageError(
            f"no mesh of {ranks} ranks fits in {limit / _GIB:.3g} GiB per rank: {best} needs "
            f"{best.peak / _GIB:.3g} GiB; take more ranks, or a smaller batch"
        )
    return best


def step_model(trace: Trace, training: Training, hardware: Hardware, ranks: int) -> StepModel:
    """Returns the model of a step, with measured convolutions where that is possible.

    On the machine on which the hardware was measured, the times of convolutions are those that the
    autotuner has kept; on as few ranks as a node has, missing ones are measured.

    Args:
        trace: of the network.
        training: what is trained, and how.
        hardware: of a rank.
        ranks: number of ranks.
    """
    if hardware.machine != this_machine():
        return StepModel(trace, training, hardware)
    memory.keep_freed_memory()  # as in a run: what is kept depends on it
    kept = KeptConvs(hardware.threads, measures=ranks <= hardware.ranks_per_node)
    return StepModel(trace, training, hardware, kept)


def hardware_here(device: bool = True) -> Hardware:
    """Returns the profile of this machine: of its CUDA device, or `load_hardware("auto")`.

    Args:
        device: whether ranks use CUDA devices, if there are any.
    """
    if not device or not torch.cuda.is_available():
        return load_hardware("auto")
    properties = torch.cuda.get_device_properties(0)
    words = properties.name.lower()
    name = next((name for name in PROFILES if name in words), _OTHER_DEVICE)
    return replace(PROFILES[name], memory=properties.total_memory)
