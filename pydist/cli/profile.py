"""`pydist profile`: measures a training step by layer and part."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydist.cli.own_options import RunOptions, arguments_of_ranks
from pydist.cli.train import joined_ranks, load_config
from pydist.errors import DiskError, UsageError

if TYPE_CHECKING:
    from pydist.mesh import Mesh
    from pydist.profile import Profiler
    from pydist.stages import Stages
    from pydist.train.config import Config
    from pydist.train.state import RunState
    from pydist.train.trial import StepListener

PROG = (
    "pydist profile CONFIG [-n RANKS] [--mpi NAME] [--steps N] [--warmup N] [--trace FILE] "
    "[--picture FILE]"
)


def profile(arguments: Sequence[str]) -> int:
    """Runs `pydist profile`; see `pydist profile --help`."""
    options, overrides = _parse(arguments)
    config = load_config(options.config, overrides, PROG)
    for file in (options.trace, options.picture):
        if file is not None and not file.parent.is_dir():
            raise DiskError(f"{file.parent}: no such folder")
        if file is not None and file.is_dir():
            raise DiskError(f"{file}: it is a folder, and a file is needed")
    if options.picture is not None and options.picture.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(
            f"--picture {options.picture}: expected a name that ends with .png, .pdf or .svg"
        )
    if options.picture is not None and config.mesh.stages is None:
        raise UsageError("--picture draws the schedule of stages, and mesh.stages is not set")
    if options.ranks is None:
        return _profile_here(config, options)
    from pydist.launch.supervisor import launch
    from pydist.train.ranks import check_ranks

    check_ranks(config, options.ranks)
    argv = ["-m", "pydist", "profile", *arguments_of_ranks(arguments)]
    return launch(options.ranks, argv, options.mpi)


def profile_training(config: Config, ranks: Mesh | Stages, steps: int, warmup: int) -> Profiler:
    """Trains for some steps without writing anything. Collective.

    Args:
        config: as for `pydist train`; its settings of length, checkpoints and validation are
            ignored.
        ranks: the mesh, or the stages.
        steps: number of measured steps.
        warmup: number of steps before them.

    Raises:
        PydistError: a signal ended it, or an error as for `pydist.train.run.train`.
    """
    from pydist.profile import Profiler
    from pydist.train.trial import take_steps

    profilers = []

    @contextmanager
    def profiled(state: RunState) -> Iterator[StepListener]:
        with Profiler(ranks, state.model, warmup) as profiler:
            profilers.append(profiler)
            yield lambda _: profiler.step()

    take_steps(config, ranks, warmup + steps, profiled)
    return profilers[0]


def _profile_here(config: Config, options: argparse.Namespace) -> int:
    """Profiles in this process, which is one rank of a job, or the only one."""
    from pydist.comm.consensus import together

    config, ranks = joined_ranks(config)
    world = ranks.world
    profiler = profile_training(config, ranks, options.steps, options.warmup)
    if world.rank == 0:
        print(profiler.table())
    if options.trace is not None:
        with together(world):
            profiler.write_trace(options.trace)
        if world.rank == 0:
            print(f"trace      {options.trace}, for chrome://tracing or ui.perfetto.dev")
    if options.picture is not None:
        with together(world):
            profiler.draw_schedule(options.picture)
        if world.rank == 0:
            print(f"picture    {options.picture}: the schedule of a step, beside the ideal one")
    world.barrier()
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = RunOptions("pydist profile", f"{PROG} [--train.batch 8 ...]")
    parser.add_argument("--steps", type=int, default=10, help="steps to measure (10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (3)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the schedule of stages")
    options, overrides = parser.parse(arguments)
    if options.steps < 1 or options.warmup < 0:
        raise UsageError(
            f"--steps {options.steps} --warmup {options.warmup}: at least 1 step and 0 for "
            "warm-up are possible"
        )
    return options, overrides
