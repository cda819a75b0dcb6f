"""Saves and resumes a training loop of the user's own, as `pydist train` does with its own.

A checkpoint is published atomically, verified by checksums, and holds no code (see
`pydist.train.checkpoint`). It describes the whole network: a loop resumes on any number of ranks or
stages, and bit-identically on the same.

    loader = checkpoint.Resumable(torch.utils.data.DataLoader(...))   # or a pydist.data.Loader
    state = dict(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    found = checkpoint.load("ckpt", **state)
    step = 0 if found is None else found.step
    ...
        checkpoint.save("ckpt", step, **state)
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pydist import nested_state, owner
from pydist.comm import Transport
from pydist.comm.consensus import together
from pydist.errors import CheckpointError, UsageError
from pydist.optim import load_gradient_state
from pydist.optim.partitioned import optimizer_kind
from pydist.train import checkpoint
from pydist.train.network import network_of
from pydist.train.rank_states import gather_rank_states, own_state
from pydist.train.resumable import Resumable
from pydist.train.state import (
    matching,
    network_parts,
    random_state,
    restore,
    set_random_state,
)

__all__ = ["Resumable", "Resumed", "latest", "load", "save"]


class Stateful(Protocol):
    """Object that has a state of plain values and tensors, such as a learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continues from a state."""
        ...


@dataclass(frozen=True)
class Resumed:
    """Progress of the loop from which another one continues."""

    step: int
    """Number of steps done, as given to `save`."""
    extra: Any
    """As given to `save`."""


def save(
    folder: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Stateful | None = None,
    scaler: GradScaler | None = None,
    loader: Stateful | None = None,
    extra: object = None,
    keep: int = 2,
) -> Path:
    """Writes a checkpoint. Collective: one rank writes, and all ranks raise its error.

    The random numbers of Python, NumPy and torch's CPU generator are saved, too, of each rank.

    Args:
        folder: folder of the loop's checkpoints; created if missing.
        step: number of steps done, at least 0.
        model: the parallelized network, or one in stages.
        optimizer: its optimizer, partitioned or not.
        scheduler: the learning-rate schedule.
        scaler: scales the loss in fp16.
        loader: a `pydist.data.Loader`, a `Resumable`, or another one with a state.
        extra: anything else on the rank that writes: nested dicts, lists and tuples of tensors,
            numbers, texts and `None`.
        keep: number of latest checkpoints to keep, at least 1.

    Returns:
        The checkpoint, `folder/step-000120`. `folder/last` links to it.

    Raises:
        UsageError: the model is not parallelized, the loader has no position, a number is out of
            range, or the folder has checkpoints of another run, which has done as many steps.
        CheckpointError: a state holds something else than these values.
        DiskError: the disk is full or fails; earlier checkpoints are unchanged.
    """
    if isinstance(loader, DataLoader):
        raise UsageError(
            "loader: a torch DataLoader does not know its position; iterate over "
            "pydist.checkpoint.Resumable(loader), and save that"
        )
    job, network = network_of(model)
    own = {"random": random_state()}
    if loader is not None:
        own["loader"] = loader.state_dict()
    parts = network_parts(network, optimizer, job.mesh)
    for name, each in (("scheduler", scheduler), ("scaler", scaler)):
        if each is not None:
            parts[name] = each.state_dict()
    with together(job.world, "checking the arguments of save"):
        step = _whole_number("step", step, 0)
        keep = _whole_number("keep", keep, 1)
    parts["ranks"] = gather_rank_states(job, own)
    parts["extra"] = extra
    parts["kinds"] = {"optimizer": optimizer_kind(optimizer)}
    path = Path(folder)
    with together(job.world, "saving a checkpoint"):
        if job.writes:
            _refuse_other_run(path, step, parts["model"])
            owner.remove_temporaries(path)  # of a loop that was killed
            checkpoint.write(path, step, parts, keep)
    return path / f"step-{step:06d}"


def load(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: GradScaler | None = None,
    loader: Stateful | None = None,
) -> Resumed | None:
    """Restores the latest checkpoint of a folder, or a given one. Collective.

    What is not given is not restored. On another mesh the random numbers of a rank, and the state
    of its loader, are those of its sample group; more groups than were saved take them in turn.

    Args:
        folder: folder of checkpoints, or one of them.
        model: the parallelized network, or one in stages.
        optimizer: as of `save`, as the following ones.
        scheduler: see above.
        scaler: see above.
        loader: see above.

    Returns:
        The progress; `None` if there is no checkpoint.

    Raises:
        UsageError: the model is not parallelized.
        CheckpointError: it is damaged, or of another model or optimizer.
    """
    job, network = network_of(model)
    path = _chosen(Path(folder), job.world, job.writer)
    if path is None:
        return None
    with together(job.world, "reading a checkpoint"):
        parts = checkpoint.read(path)
        with matching(path):
            parts |= own_state(job, parts["ranks"])
            others = {"scheduler": scheduler, "scaler": scaler, "loader": loader}
            for name, each in {"optimizer": optimizer, **others}.items():
                if each is not None and name not in parts:
                    raise CheckpointError(f"checkpoint {path} has no state of a {name}")
            if optimizer is not None:
                _require_kind(path, parts, optimizer)
            restore(network, optimizer, job.mesh, parts)
            for name, other in others.items():
                if other is not None:
                    other.load_state_dict(parts[name])
            set_random_state(parts["random"])
    if line := load_gradient_state(network.model, parts.get("gradients", {}), parts["step"]):
        warnings.warn(line, stacklevel=2)
    return Resumed(parts["step"], parts["extra"])


def latest(folder: str | Path) -> Path | None:
    """Returns the latest complete checkpoint in a folder, or `None`.

    Ranks may see different ones in a folder that changes: give `load` the folder, and all ranks
    load the one that the first rank sees.
    """
    return next(reversed(checkpoint.complete(Path(folder))), None)


def _chosen(path: Path, world: Transport, writer: int) -> Path | None:
    """Returns the checkpoint that one rank sees. Collective."""
    with together(world, "looking for a checkpoint"):
        found = path if checkpoint.is_checkpoint(path) else latest(path)
        if found is None and world.rank == writer and checkpoint.is_named(path):
            raise CheckpointError(f"checkpoint {path} is missing or incomplete")
    message = b"" if found is None else str(found.resolve()).encode()
    chosen = world.broadcast_bytes(message, writer).decode()
    return Path(chosen) if chosen else None


def _refuse_other_run(folder: Path, step: int, model: object) -> None:
    """Checks that the latest checkpoint is of fewer steps, or of the same step and weights."""
    last = latest(folder)
    number = -1 if last is None else int(last.name.removeprefix("step-"))
    if last is None or number < step:
        return
    if number == step:
        there, here = (
            nested_state.flatten_state(each)[1] for each in (checkpoint.read(last)["model"], model)
        )
        if there.keys() == here.keys() and all(_same_bits(there[k], here[k]) for k in here):
            return
    raise UsageError(
        f"{folder} has a checkpoint of step {number} of another run, and this one is at step "
        f"{step}: load it before training, delete it, or choose another folder"
    )


def _whole_number(name: str, value: Any, least: int) -> int:
    """Returns a whole number, of any type that is one; raises `UsageError` if it is none."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise UsageError(f"{name} = {value!r}: a whole number of at least {least} is needed")
    return number


def _require_kind(path: Path, parts: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raises `CheckpointError` if a checkpoint has the state of another kind of optimizer."""
    there, here = parts["kinds"]["optimizer"], optimizer_kind(optimizer)
    if there != here:
        raise CheckpointError(
            f"checkpoint {path} has the state of the optimizer {there}, and this one is {here}: "
            "call load without it to restore the rest"
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are equal, also where they are NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    mine, theirs = (each.contiguous().flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(mine, theirs)
