"""A few steps of a configured run that write nothing, for measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import torch

from pydist.comm.consensus import together
from pydist.errors import PydistError, Stopped
from pydist.train.datasets import make_loader, open_datasets
from pydist.train.device import own_stream
from pydist.train.job import Job
from pydist.train.log import Event, EventLog
from pydist.train.loop import Trainer
from pydist.train.parts import WARMUP
from pydist.train.run import make_state, require_same_settings
from pydist.train.tasks import task_of

if TYPE_CHECKING:
    from pydist.data import ShardDataset
    from pydist.data.loader import Loader
    from pydist.mesh import Mesh
    from pydist.stages import Stages
    from pydist.train.config import Config
    from pydist.train.state import RunState

_STEPS = 5
"""Steps that `measured_step` measures."""

MakeLoader = Callable[["Config", "ShardDataset", Job], "Loader"]
"""Makes the loader of a run's training set. Collective."""

StepListener = Callable[[Event], None]
"""Receives the event "step" of each step, with the parts of this rank's time."""


class _Unsaved(Trainer):
    reads_late = False

    def _save(self) -> None:
        """Saves no checkpoint."""


def take_steps(
    config: Config,
    ranks: Mesh | Stages,
    steps: int,
    measured: Callable[[RunState], AbstractContextManager[StepListener]],
    make: MakeLoader = make_loader,
) -> None:
    """Trains for some steps without writing anything. Collective.

    Args:
        config: as for `pydist train`; its settings of length, checkpoints and validation are
            ignored.
        ranks: the mesh, or the stages.
        steps: number of steps.
        measured: returns a context, around the steps, with the listener to their events.
        make: makes the loader; by default without a store.

    Raises:
        PydistError: a signal ended it, or an error as for `pydist.train.run.train`.
    """
    job = Job.of(ranks)
    require_same_settings(config, job.world)
    length = replace(config.train, epochs=steps, steps=steps, validate_every=0)
    task = task_of(config)
    with together(job.world, "opening the data"):
        data, _ = open_datasets(config, task)
        loader = make(config, data, job)
    with loader, own_stream(loader.device):
        state = make_state(config, task, job, data, loader)
        with measured(state) as at_step:

            def listen(event: Event) -> None:
                if event["event"] == "step":
                    at_step(event)

            log = EventLog(None, [listen])
            trainer = _Unsaved(
                state, task, None, log, length, config.checkpoint, config.output.folder
            )
            try:
                trainer.fit()
            except Stopped:
                raise PydistError("stopped by a signal before the end of the measurement") from None


def recorded_steps(
    config: Config,
    ranks: Mesh | Stages,
    steps: int,
    warmup: int,
    make: MakeLoader = make_loader,
) -> list[Event]:
    """Trains for some steps without writing anything, and returns their events. Collective.

    Args:
        config: see `take_steps`.
        ranks: the mesh, or the stages.
        steps: number of recorded steps.
        warmup: number of steps before them.
        make: see `take_steps`.

    Raises:
        PydistError: see `take_steps`.
    """
    recorded: list[Event] = []

    @contextmanager
    def recording(_: RunState) -> Iterator[StepListener]:
        yield recorded.append

    take_steps(config, ranks, warmup + steps, recording, make)
    return recorded[warmup:]


def measured_step(config: Config, ranks: Mesh | Stages) -> float:
    """Returns the seconds of a training step on the slowest rank. Collective.

    Args:
        config: as for `pydist train`.
        ranks: the mesh or the stages, made from the configuration.
    """
    events = recorded_steps(config, ranks, _STEPS, WARMUP)
    seconds = torch.tensor(median(event["seconds"] for event in events)).double()
    return float(ranks.world.all_gather(seconds).max())
