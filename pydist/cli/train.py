"""`pydist train`: trains as a single process, as a rank of a job, or as the job's launcher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydist.cli.own_options import RunOptions

if TYPE_CHECKING:
    from pydist.cli.progress import ProgressView
    from pydist.mesh import Mesh
    from pydist.stages import Stages
    from pydist.train.config import Config

_SECONDS_TO_SAVE = 600.0
"""Time after Ctrl-C to finish the step and write a checkpoint; a second one ends the run."""

PROG = "pydist train CONFIG [-n RANKS] [--mpi NAME]"


def train(arguments: Sequence[str]) -> int:
    """Runs `pydist train`; see `pydist train --help`."""
    options, overrides = RunOptions("pydist train", f"{PROG} [--train.steps 20 ...]").parse(
        arguments
    )
    if options.ranks is not None:
        from pydist.cli.progress import ProgressView

        config = load_config(options.config, overrides, PROG)
        _check(config, options.ranks, options.mpi)
        view = ProgressView(verbose=True)
        return launch_training(options.config, overrides, options.ranks, options.mpi, view)
    from pydist.train.signals import ending_at_once

    with ending_at_once():
        return _train_here(load_config(options.config, overrides, PROG))


def _check(config: Config, ranks: int, mpi: str) -> None:
    """Raises the errors that can be known before ranks start; they report the others."""
    from pydist.data.manifest import Manifest
    from pydist.data.mpi_io import MpiIo
    from pydist.launch.backends import backend_named
    from pydist.train.data_folder import refuse_data_folder
    from pydist.train.ranks import check_ranks

    check_ranks(config, ranks)
    backend_named(mpi)
    if config.data.mpi_io:
        MpiIo()  # refuses an h5py without it
    if ranks > 0:  # else the launcher says what is possible
        Manifest.load(config.data.path)
        refuse_data_folder(config.output.folder, config.data.path)


def launch_training(
    config: Path, overrides: Sequence[str], ranks: int, mpi: str, view: ProgressView
) -> int:
    """Trains on several ranks of this machine; this process draws the events of the run.

    Args:
        config: the configuration file.
        overrides: options such as ``--train.steps 20``.
        ranks: number of ranks.
        mpi: see `pydist.launch.launch`.
        view: draws progress.

    Returns:
        The exit code.
    """
    from pydist.cli.events import followed
    from pydist.launch.supervisor import launch

    with followed(view):
        argv = ["-m", "pydist", "train", str(config), *overrides]
        code = launch(ranks, argv, mpi, patience=_SECONDS_TO_SAVE)
    view.close()
    return code


def _train_here(config: Config) -> int:
    """Trains in this process, which is one rank of a job, or the only one."""
    from pydist.cli.progress import ProgressView
    from pydist.comm.consensus import together
    from pydist.train.job import Job
    from pydist.train.log import PIPE_VARIABLE, Event, Listener, to_pipe
    from pydist.train.planning import beside_measurement
    from pydist.train.run import train as run

    config, ranks = joined_ranks(config)
    job = Job.of(ranks)
    pipe = os.environ.get(PIPE_VARIABLE)
    steps = list[Event]()

    def keep(event: Event) -> None:
        if event["event"] == "step":
            steps.append(event)

    listeners: list[Listener] = [keep]
    with together(job.world):
        if job.writes and pipe is not None:
            listeners.append(to_pipe(Path(pipe)))
    if not job.writes or pipe is not None:
        run(config, ranks, listeners)
    else:
        view = ProgressView(verbose=True)
        try:
            run(config, ranks, [view, *listeners])
        finally:
            view.close()
    if steps and (line := beside_measurement(config, ranks, steps)):
        print(line, flush=True)
    job.world.barrier()
    return 0


def joined_ranks(config: Config) -> tuple[Config, Mesh | Stages]:
    """Joins the job and makes the ranks of a configuration; chooses a mesh that is "auto".

    Returns:
        The configuration with the numbers of parts, and the mesh or the stages.
    """
    ranks = ranks_of(config)
    if config.mesh.spatial != "auto":
        return config, ranks
    from pydist.train.job import Job
    from pydist.train.planning import on_grid

    return on_grid(config, Job.of(ranks).mesh.grid), ranks


def ranks_of(config: Config) -> Mesh | Stages:
    """Joins the job and makes the stages of a configuration, or without stages its mesh."""
    if config.mesh.stages is None:
        return mesh_of(config)
    from pydist.setup import join
    from pydist.stages import Stages
    from pydist.train.ranks import check_ranks, stage_arguments

    facts = {"the stages": str(config.mesh), "the seed": config.train.seed}
    world = join(_transport(config), lambda _: facts, keep_freed_memory=True)
    check_ranks(config, world.size)
    return Stages(
        world, stage_arguments(config.mesh, world.size), config.train.seed, config.mesh.order
    )


def mesh_of(config: Config) -> Mesh:
    """Joins the job and makes the mesh of a configuration; see `pydist.init`."""
    from pydist.setup import init

    wanted = config.mesh
    if wanted.spatial == "auto":
        from pydist.train.planning import chooser

        return init(
            transport=_transport(config), seed=config.train.seed, mesh=chooser(config, _tell)
        )
    return init(
        wanted.data,
        wanted.spatial,
        _transport(config),
        seed=config.train.seed,
        shares=wanted.shares.given,
        **wanted.axes,
    )


def _tell(line: str) -> None:
    print(line, flush=True)


def _transport(config: Config) -> str:
    # A run that uses no devices needs no transport for them.
    on_host = config.mesh.transport == "auto" and config.train.device == "cpu"
    return "host" if on_host else config.mesh.transport


def load_config(path: Path | None, overrides: Sequence[str], prog: str) -> Config:
    """Loads a configuration and applies options such as ``--train.steps 20``.

    Args:
        path: the file; None if only help is requested.
        overrides: the options. ``--help`` prints them all and exits.
        prog: the command's name in help.

    Raises:
        UsageError: an unknown key or option, or an invalid value.
    """
    from pydist.cli.options import override
    from pydist.train import config_io
    from pydist.train.config import Config

    config = Config() if path is None else config_io.load(path)
    return override(config, overrides, prog) if overrides else config
