"""What to do when a training step does not fit into memory: the smallest split that would."""

from __future__ import annotations

import gc
import math
import re
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pydist.errors import DoesNotFit, PydistError, UsageError, out_of_memory, wanted_bytes
from pydist.grid import OTHER_AXES, SPATIAL_AXES, Grid
from pydist.hardware import mapped_and_resident, memory_limit
from pydist.launch import launcher_env
from pydist.plan import Estimate, estimate_step, legal_meshes, load_hardware
from pydist.train.config import MeshConfig
from pydist.train.planning import model_of
from pydist.train.ranks import check_ranks, check_settings

if TYPE_CHECKING:
    from pydist.train.config import Config

_MOST_RANKS = 256
"""Ranks up to which a split is searched, in powers of two."""
_LESS = 0.95
"""Most memory that a split needs, of the memory predicted for the mesh that did not fit."""
_GAIN = 0.999
"""Memory on twice the ranks, of that before, from which on more ranks are not tried."""
_GIB = 2**30
_OF_CUDA = re.compile("CUDA|CUBLAS|CUDNN")


def with_advice(error: Exception, config: Config, grid: Grid) -> DoesNotFit:
    """Returns the error that names bytes wanted and held, and the smallest split that would fit.

    Args:
        error: for which `out_of_memory` is true. The values of its frames are released, as the
            search for a split needs memory, too.
        config: of the run.
        grid: the mesh on which memory is missing, whatever is predicted.
    """
    device = "cuda" if torch.cuda.is_available() and _OF_CUDA.search(str(error)) else "cpu"
    place = launcher_env.detect()
    ranks = 1 if place is None else place.size
    wanted, held, limit = wanted_bytes(error), held_bytes(device), limit_bytes(device, ranks)
    said = "the training step does not fit into memory: "
    if isinstance(error, DoesNotFit):
        said = f"{error}: "
    said += "more memory" if wanted is None else _size(wanted)
    said += f" wanted, {_size(held)} held, of {_size(limit)}"
    traceback.clear_frames(error.__traceback__)
    error.__cause__ = error.__context__ = None
    gc.collect()
    return DoesNotFit(f"{said}; {_advice(config, grid, device)}")


def held_bytes(device: str) -> int:
    """Returns the memory that this process holds: of the current CUDA device, or resident."""
    if device == "cuda":
        return torch.cuda.memory_reserved()
    return mapped_and_resident()[1]


def limit_bytes(device: str, ranks: int) -> int:
    """Returns the memory that this process could have at most among a number of ranks.

    Of a CUDA device all of it; of the host `pydist.hardware.memory_limit`.

    Args:
        device: "cuda" or "cpu".
        ranks: number of ranks, on the nodes of this job.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    place = launcher_env.detect()
    of_node = ranks
    if place is not None:
        of_node = min(ranks, math.ceil(ranks * place.local_size / place.size))
    return memory_limit(of_node)


def _advice(config: Config, grid: Grid, device: str) -> str:
    """Returns a sentence about the smallest split that is predicted to fit."""
    try:
        found, ranks = _smallest_that_fits(config, grid, device)
    except PydistError as error:
        return f"no split can be predicted: {error}"
    except Exception as error:  # the search itself may not fit
        if not out_of_memory(error):
            raise
        return "`pydist plan` predicts which split fits"
    if found is None:
        return "no split is predicted to fit: choose a smaller batch, or more of train.accumulate"
    mesh = _mesh_of(found.grid, config)
    spatial = " ".join(map(str, mesh.spatial))
    others = [f"mesh.{k}" for k, v in vars(config.mesh).items()
              if k not in ("data", "spatial") and v != getattr(mesh, k)]  # fmt: skip
    without = f" without {', '.join(others)}" if others else ""
    return (
        f"the smallest split that is predicted to fit: {ranks} rank{'s' if ranks > 1 else ''}, "
        f"-n {ranks} --mesh.data {mesh.data} --mesh.spatial {spatial}{without}, "
        f"{_size(int(found.peak))} for each; `pydist plan` shows others"
    )


def _mesh_of(grid: Grid, config: Config) -> MeshConfig:
    """Returns the configuration of a mesh that has a split, and nothing else of the run's mesh."""
    depth, height, width = (grid.size((axis,)) for axis in SPATIAL_AXES)
    return MeshConfig(
        spatial=(depth, height, width),
        data=grid.size(("data",)),
        transport=config.mesh.transport,
    )


def _smallest_that_fits(config: Config, grid: Grid, device: str) -> tuple[Estimate | None, int]:
    """Returns the estimate of the fastest mesh of the fewest ranks that fits; None if none does."""
    hardware = load_hardware("h100" if device == "cuda" else "cpu")
    model = model_of(config, hardware, _MOST_RANKS)
    less = _LESS * estimate_step(model, grid).peak
    ranks, least = 1, math.inf
    while ranks <= _MOST_RANKS:
        legal = legal_meshes(ranks, model.trace.dims)
        possible = (each for each in legal if _possible(each, config, ranks))
        found = [estimate_step(model, each) for each in possible]
        limit = min(limit_bytes(device, ranks), less)
        fits = [each for each in found if each.peak <= limit]
        if fits:
            return min(fits, key=lambda each: each.step), ranks
        before, least = least, min((each.peak for each in found), default=least)
        if least > _GAIN * before:
            break  # what is left is not divided, such as weights
        ranks *= 2
    return None, _MOST_RANKS


def _possible(grid: Grid, config: Config, ranks: int) -> bool:
    """Returns whether the run can have a mesh, whose memory is known."""
    if any(grid.size((axis,)) > 1 for axis in OTHER_AXES):
        return False
    wanted = replace(config, mesh=_mesh_of(grid, config))
    try:
        check_settings(wanted)
        check_ranks(wanted, ranks)
    except UsageError:
        return False
    return True


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB / 10 else f"{nbytes / 2**20:.1f} MiB"
