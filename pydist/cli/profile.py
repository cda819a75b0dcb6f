"""`pydist profile`: measures a training step by layer and part."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydist.cli.own_options import RunOptions
from pydist.cli.train import load_config, mesh_of
from pydist.errors import DiskError, UsageError

if TYPE_CHECKING:
    from pydist.mesh import Mesh
    from pydist.profile import Profiler
    from pydist.train.config import Config
    from pydist.train.state import State
    from pydist.train.trial import StepListener

PROG = "pydist profile CONFIG [-n RANKS] [--mpi NAME] [--steps N] [--warmup N] [--trace FILE]"


def profile(arguments: Sequence[str]) -> int:
    """Runs `pydist profile`; see `pydist profile --help`."""
    options, overrides = _parse(arguments)
    config = load_config(options.config, overrides, PROG)
    if options.trace is not None and not options.trace.parent.is_dir():
        raise DiskError(f"{options.trace.parent}: no such folder")
    if options.ranks is None:
        return _profile_here(config, options)
    from pydist.launch import launch

    own = ["--steps", str(options.steps), "--warmup", str(options.warmup)]
    if options.trace is not None:
        own += ["--trace", str(options.trace)]
    argv = ["-m", "pydist", "profile", str(options.config), *own, *overrides]
    return launch(options.ranks, argv, options.mpi)


def profile_training(config: Config, mesh: Mesh, steps: int, warmup: int) -> Profiler:
    """Trains for some steps without writing anything. Collective.

    Args:
        config: as for `pydist train`; its settings of length, checkpoints and validation are
            ignored.
        mesh: the mesh.
        steps: number of measured steps.
        warmup: number of steps before them.

    Raises:
        PydistError: a signal ended it, or an error as for `pydist.train.run.train`.
    """
    from pydist.profile import Profiler
    from pydist.train.trial import take_steps

    profilers = []

    @contextmanager
    def profiled(state: State) -> Iterator[StepListener]:
        with Profiler(mesh, state.model, warmup) as profiler:
            profilers.append(profiler)
            yield lambda _: profiler.step()

    take_steps(config, mesh, warmup + steps, profiled)
    return profilers[0]


def _profile_here(config: Config, options: argparse.Namespace) -> int:
    """Profiles in this process, which is one rank of a job, or the only one."""
    from pydist.comm.consensus import together

    mesh = mesh_of(config)
    profiler = profile_training(config, mesh, options.steps, options.warmup)
    if mesh.rank == 0:
        print(profiler.table())
    if options.trace is not None:
        with together(mesh.world):
            profiler.write_trace(options.trace)
        if mesh.rank == 0:
            print(f"trace      {options.trace}, for chrome://tracing or ui.perfetto.dev")
    mesh.world.barrier()
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = RunOptions("pydist profile", f"{PROG} [--train.batch 8 ...]")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--trace", type=Path)
    options, overrides = parser.parse(arguments)
    if options.steps < 1 or options.warmup < 0:
        raise UsageError(
            f"--steps {options.steps} --warmup {options.warmup}: at least 1 step and 0 for "
            "warm-up are possible"
        )
    return options, overrides
