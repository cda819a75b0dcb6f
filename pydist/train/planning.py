"""Plans the training step of a configuration, and compares it with measurements."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.data import Manifest
from pydist.data.axes import without_flat
from pydist.errors import NotSupported, PydistError, UsageError
from pydist.grid import SPATIAL_AXES, Grid
from pydist.optim.partitioned import WORTHWHILE
from pydist.plan import InStages, StepModel, Training, estimate_step, trace_network
from pydist.plan.choosing import choose_mesh, hardware_here, step_model
from pydist.plan.in_stages import estimate_in_stages
from pydist.stages import Stages
from pydist.tensor.wrapper import tensors_of
from pydist.train.config import MeshConfig
from pydist.train.datasets import shape_in_training
from pydist.train.device import AMP_DTYPES
from pydist.train.parts import WARMUP
from pydist.train.ranks import check_ranks, check_settings, mistakes_with_groups
from pydist.train.tasks import task_of

if TYPE_CHECKING:
    from pydist.hardware import Hardware
    from pydist.mesh import Mesh
    from pydist.plan import Estimate
    from pydist.train.config import Config
    from pydist.train.log import Event
    from pydist.train.tasks import Task

_STEPS = 5
"""Steps that are measured."""
_MANY = 1 << 30
"""Ranks for which no convolution is measured here."""
_MS = 1e3
_GIB = 2**30


def model_of(config: Config, hardware: Hardware, ranks: int) -> StepModel:
    """Returns the model of a configuration's training step.

    Args:
        config: as for `pydist train`; the parts of its table "mesh" do not matter.
        hardware: of a rank; see `pydist.plan.step_model`.
        ranks: number of ranks.

    Raises:
        UsageError: the network does not suit the data set or its crops.
        DataError: there is no data set.
        NotSupported: as `trace_network` does.
    """
    check_settings(config)
    manifest = Manifest.load(config.data.path)
    task = task_of(config)
    shape = shape_in_training(config, task, manifest)
    try:
        with torch.device("meta"):  # without memory
            network = task.network(manifest)
    except UsageError:  # its factory needs values
        network = task.network(manifest)
    trace = trace_network(network, without_flat(shape, manifest.dims), _criterion(task))
    parameters = sum(p.numel() for p in network.parameters())
    partitioned = config.optimizer.sharded == "always" or (
        config.optimizer.sharded == "auto"
        and parameters >= WORTHWHILE
        and config.train.gradients == "dense"
    )
    training = Training(
        batch=config.train.batch,
        passes=config.train.accumulate,
        state=config.optimizer.at(config.train.batch).state(),
        dtype=AMP_DTYPES[config.train.amp],
        partitioned=partitioned,
        prefetch=max(config.data.prefetch, config.data.readers),
        file_bytes=math.prod(shape) * np.dtype(manifest.dtype).itemsize,
    )
    return step_model(trace, training, hardware, ranks)


def numbers_of_stages(config: Config) -> tuple[int, ...]:
    """Returns the numbers of stages that a plan compares: the configuration's, or 1, 2 and 4.

    Raises:
        UsageError: the configuration gives each stage a mesh of its own.
    """
    given = config.mesh.stages
    if isinstance(given, tuple):
        raise UsageError(
            "a plan compares equal meshes, and mesh.stages is a list: give it as a number, or "
            "leave it out"
        )
    if given is not None:
        return (given,)
    try:
        check_settings(replace(config, mesh=MeshConfig(stages=2)))
    except UsageError:
        return (1,)  # another setting needs the whole network
    return (1, 2, 4)


def accepted_meshes(config: Config, ranks: int) -> Callable[[Grid], bool]:
    """Returns a function that tells whether a run of a configuration accepts a mesh.

    Args:
        config: of the run; its table "mesh" does not matter.
        ranks: number of ranks, in meshes of one stage or of several; stages accept any.
    """

    def accepts(grid: Grid) -> bool:
        in_stages = grid.size() < ranks
        return in_stages or not any(mistakes_with_groups(config, grid.size(("data",)), ranks))

    return accepts


def chooser(config: Config, tell: Callable[[str], object] = print) -> Callable[[int], Grid]:
    """Returns a function that chooses the mesh of a configuration, for `pydist.init`.

    Args:
        config: its numbers of parts along other axes than those of space are kept, if given.
        tell: receives a line about the choice.
    """

    def choose(ranks: int) -> Grid:
        check_ranks(config, ranks)
        hardware = hardware_here(config.train.device != "cpu")
        wanted = config.mesh
        model = model_of(config, hardware, ranks)
        found = choose_mesh(model, ranks, wanted.data, wanted.axes, accepted_meshes(config, ranks))
        tell(f'mesh.spatial = "auto": {found.grid}, predicted {_told(found, hardware)}')
        return found.grid

    return choose


def on_grid(config: Config, grid: Grid) -> Config:
    """Returns the configuration with the numbers of parts of a mesh."""
    depth, height, width = (grid.size((axis,)) for axis in SPATIAL_AXES)
    mesh = replace(config.mesh, data=grid.size(("data",)), spatial=(depth, height, width))
    return replace(config, mesh=mesh)


def beside_measurement(config: Config, ranks: Mesh | Stages, events: Sequence[Event]) -> str:
    """Compares a run's steps with their prediction.

    Args:
        config: of the run.
        ranks: its mesh, or its stages.
        events: "step" of the run on this rank.

    Returns:
        A line; "" if there are too few steps.
    """
    taken = [event["seconds"] for event in events][WARMUP:]
    if len(taken) < _STEPS:
        return ""
    measured = f"measured {_MS * median(taken):.4g} ms (median of {len(taken)}), {_peak()}"
    try:
        found, hardware = _predicted(config, ranks)
    except Exception as error:  # the run is complete, whatever its plan meets
        reason = str(error) if isinstance(error, PydistError) else repr(error)
        return f"a step: {measured}; no prediction: {reason}"
    return f"a step: predicted {_told(found, hardware)}; {measured}"


def _predicted(config: Config, ranks: Mesh | Stages) -> tuple[Estimate, Hardware]:
    hardware = hardware_here(ranks.world.device is not None)
    model = model_of(config, hardware, _MANY)  # measures nothing
    if not isinstance(ranks, Stages):
        return estimate_step(model, ranks.grid), hardware
    mesh = config.mesh
    grids = {each.grid for each in ranks.meshes}
    if len(grids) > 1 or mesh.order is not None or mesh.recompute:
        raise NotSupported("only equal stages in the order of their meshes are planned")
    given = InStages(ranks.count, mesh.micro_batches, mesh.schedule)
    found = estimate_in_stages(model, grids.pop(), given)
    if found is None:
        raise NotSupported(f"the plan finds no cuts for {ranks.count} stages")
    return found, hardware


def _told(found: Estimate, hardware: Hardware) -> str:
    return f"{_MS * found.step:.4g} ms and {found.peak / _GIB:.3g} GiB per rank ({hardware.name})"


def _peak() -> str:
    """Returns the most memory that this rank has used."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return f"{torch.cuda.max_memory_reserved() / _GIB:.3g} GiB of the device"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _GIB:.3g} GiB"


def _criterion(task: Task) -> Callable[[object], Tensor]:
    """Returns a loss of as many calls as the task's, on shapes alone."""

    def loss(output: object) -> Tensor:
        scores = tensors_of(output)[0]
        if task.multiple is None:
            return scores.square().mean()
        labels = torch.zeros(scores.shape[0], *scores.shape[2:], dtype=torch.int64)
        return F.cross_entropy(scores, labels)

    return loss
