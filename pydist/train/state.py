"""Describes the state of a run, saves it to checkpoints and loads it, collectively.

Nothing in it depends on the layout: parameters are equal on all ranks or gathered from stages, the
state of a partitioned optimizer is gathered, the order of the samples follows from seed and epoch,
and random numbers are keyed by position, except those that a network draws as plain numbers: their
state is kept for each rank. So a run resumes with any number of ranks or stages, and
bit-identically with the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pydist.backend.autotuner import autotuner_of
from pydist.comm.consensus import together
from pydist.data.loader import Loader
from pydist.data.lock import FolderLock
from pydist.errors import CheckpointError, PydistError, out_of_memory
from pydist.mesh import Mesh
from pydist.ops.pointwise.keyed import draws_of
from pydist.optim import (
    SampleLR,
    average_parameters,
    gradient_state,
    load_gradient_state,
)
from pydist.optim.fused import match_parameter_formats
from pydist.slices import state_on_rank_0
from pydist.slices.steps import shard_state
from pydist.train import checkpoint
from pydist.train.job import Job
from pydist.train.layer_log import LayerLog
from pydist.train.metadata import differences
from pydist.train.network import Network
from pydist.train.noise import AdaptiveBatch
from pydist.train.rank_states import gather_rank_states, own_state
from pydist.watchdog import phase

_DOES_NOT_MATCH = (
    RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
)  # fmt: skip
"""The errors of torch for the state of another network, optimizer or schedule."""


@dataclass
class RunState:
    """State that determines how a run continues."""

    job: Job
    network: Network
    optimizer: Optimizer
    scheduler: SampleLR
    scaler: GradScaler
    loader: Loader
    """The training batches; the sampler determines the next one."""
    metadata: Mapping[str, str]
    """The information for prediction besides the weights; see `pydist.train.metadata`."""
    step: int = 0
    """Number of optimizer steps done."""
    layers: LayerLog | None = None
    """Records norms and trust ratios, if they are logged."""
    adaptive: AdaptiveBatch | None = None
    """The batch that follows the gradient noise scale, if it does."""

    @property
    def mesh(self) -> Mesh:
        """Mesh that this rank belongs to."""
        return self.job.mesh

    @property
    def model(self) -> nn.Module:
        """Module that the network trains."""
        return self.network.model

    def save(self, folder: Path, keep: int, lock: FolderLock | None = None) -> Path:
        """Writes a checkpoint. Collective: one rank writes, and all ranks raise its error.

        Args:
            folder: the folder of checkpoints.
            keep: number of latest checkpoints to keep.
            lock: the writer's lock on the run's folder.

        Raises:
            DiskError: see `pydist.train.checkpoint.write`.
            CheckpointError: another process has taken the folder.
        """
        parts = network_parts(self.network, self.optimizer, self.mesh) | self._own_parts()
        parts["ranks"] = gather_rank_states(self.job, {"random": random_state()})
        with together(self.job.world, "saving a checkpoint"):
            if self.job.writes:
                if lock is not None:
                    lock.check()
                checkpoint.write(folder, self.step, parts, keep)
        return folder / f"step-{self.step:06d}"

    def load(self, path: Path) -> None:
        """Restores a checkpoint. Collective: every rank reads it.

        Raises:
            CheckpointError: it is damaged, or belongs to another model, optimizer, data set, batch
                size or seed.
            UsageError: its batches change elsewhere.
        """
        with together(self.job.world, "reading a checkpoint"):
            parts = checkpoint.read(path)
            self._require_same_settings(path, parts)
            with matching(path):
                restore(self.network, self.optimizer, self.mesh, parts)
                self.scheduler.load_state_dict(parts["scheduler"])
                self.scaler.load_state_dict(parts["scaler"])
                self.loader.load_state_dict(parts["sampler"])
                if self.adaptive is not None and "noise_scale" in parts:
                    self.adaptive.load_state_dict(parts["noise_scale"])
                self.step = parts["step"]
                set_random_state(own_state(self.job, parts["ranks"])["random"])
        if line := load_gradient_state(self.model, parts.get("gradients", {}), self.step):
            self.network.notices = [*self.network.notices, line]

    def _require_same_settings(self, path: Path, parts: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` if a checkpoint was written with other settings than this run's.

        The optimizer's settings are part of the saved state, and would silently overwrite this
        run's.
        """
        found = differences(parts.get("about", {}), self.metadata)
        for name, mine in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            found = found or _kinds(name, parts.get(name), mine.state_dict())
        if self.scaler.is_enabled() and not parts.get("scaler"):
            found = found or 'train.amp is not "fp16" there and "fp16" here'
        if found:
            raise CheckpointError(
                f"checkpoint {path} does not match this run: {found}; set it back, or choose "
                "another output.folder"
            )

    def _own_parts(self) -> dict[str, object]:
        adaptive = self.adaptive
        return {
            **({} if adaptive is None else {"noise_scale": adaptive.state_dict()}),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": self.loader.state_dict(),
            "about": dict(self.metadata),
        }


def network_parts(network: Network, optimizer: Optimizer, mesh: Mesh) -> dict[str, object]:
    """Gathers the parts of a checkpoint that a network and its optimizer have. Collective.

    Returns:
        The parts by name, whole on the rank that writes. Buffers that differ between ranks are
        averaged, and the state of a partitioned optimizer, or of stages, is gathered on all ranks;
        sharded weights on rank 0 alone.
    """
    with phase("saving a checkpoint"), state_on_rank_0():
        average_parameters(network.model, optimizer, always=True)
        model, state = network.state(optimizer)
        parts: dict[str, object] = {
            "model": model,
            "optimizer": state,
            "mesh": {"forwards": mesh.session.forwards},
            "tuning": network.tuning(),
        }
        if found := gradient_state(network.model):
            parts["gradients"] = found
    return parts


def restore(
    network: Network, optimizer: Optimizer | None, mesh: Mesh, parts: Mapping[str, Any]
) -> None:
    """Restores what `network_parts` has returned, except "gradients", which is collective."""
    network.model.load_state_dict(parts["model"])
    if optimizer is not None:
        optimizer.load_state_dict(parts["optimizer"])
        shard_state(optimizer)
        match_parameter_formats(optimizer)
    mesh.session.forwards = forwards = parts["mesh"]["forwards"]
    draws_of(mesh).rewind(forwards)  # of steps after it, which this process may have taken
    if "tuning" in parts:
        autotuner_of(mesh).load(parts["tuning"], network.own_tuning)


@contextmanager
def matching(path: Path) -> Iterator[None]:
    """Converts torch's errors in the `with` block, for the state of something else.

    Raises:
        CheckpointError: one was raised.
    """
    try:
        yield
    except PydistError:
        raise
    except _DOES_NOT_MATCH as error:
        if out_of_memory(error):
            raise
        # Shortened, as torch may name every parameter.
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(
            f"checkpoint {path} does not match this model and optimizer: {reason}"
        ) from error


def _kinds(name: str, theirs: Any, mine: Mapping[str, Any]) -> str:
    """Describes how the saved state is of another kind of optimizer or scheduler; "" if it is not.

    Each kind has settings that the others lack; a version of torch may only add or drop some.
    """
    there, here = _names(theirs), _names(mine)
    if there <= here or here <= there:
        return ""
    return (
        f"the {name} has {', '.join(sorted(there - here))} there and "
        f"{', '.join(sorted(here - there))} here"
    )


def _names(state: Any) -> set[str]:
    groups = state.get("param_groups", [state]) if isinstance(state, Mapping) else []
    return {str(key) for group in groups if isinstance(group, Mapping) for key in group}


def seed_everything(seed: int) -> None:
    """Seeds the random numbers of Python, NumPy and torch identically on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Returns the state of the random numbers of Python, NumPy and torch."""
    numpy: Any = np.random.get_state()
    kind, keys, *rest = numpy
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets what `random_state` has returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
