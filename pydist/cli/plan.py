"""`pydist plan`: predicts time and memory of a training step on every mesh of some ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydist.cli.own_options import RunOptions, size_of
from pydist.cli.train import joined_ranks, load_config
from pydist.errors import UsageError
from pydist.grid import AXES, OTHER_AXES, SPATIAL_AXES
from pydist.launch import launcher_env

if TYPE_CHECKING:
    from pydist.plan import Estimate, StepModel
    from pydist.train.config import Config

PROG = (
    "pydist plan CONFIG --ranks N [--memory 16GB] [--hardware NAME|FILE] [--rows N] [--measure] "
    "[--chart FILE.png] [--json]"
)
_MEASURED = 3
"""Meshes that `--measure` runs."""


def plan(arguments: Sequence[str]) -> int:
    """Runs `pydist plan`; see `pydist plan --help`."""
    options, overrides = _parse(arguments)
    config = load_config(options.config, overrides, PROG)
    who = launcher_env.detect()
    # One rank with --ranks may be the shell of the user, as in `srun --pty bash`.
    if options.measure and who is not None and (who.size > 1 or options.ranks is None):
        return _measure(config)
    if options.ranks is None:
        raise UsageError("--ranks N is missing: the number of ranks to plan for")
    for name in ("ranks", "rows"):
        if (given := getattr(options, name)) < 1:
            raise UsageError(f"--{name} {given}: 1 or more are possible")
    from pydist.grid import Grid
    from pydist.plan import estimate_step, load_hardware, plan_meshes
    from pydist.plan.table import mesh_table
    from pydist.train.config import MeshConfig
    from pydist.train.planning import accepted_meshes, model_of, numbers_of_stages
    from pydist.train.ranks import check_ranks

    hardware = load_hardware(options.hardware)
    asked = options.memory
    memory = hardware.memory if asked is None else size_of("--memory", asked)
    model = model_of(config, hardware, options.ranks)
    accepts = accepted_meshes(config, options.ranks)
    found = plan_meshes(model, options.ranks, memory, numbers_of_stages(config), accepts)
    if not found:
        if config.mesh.stages is None:  # the run says what it does not accept
            one_group = MeshConfig(data=1, spatial=(options.ranks, 1, 1))
            check_ranks(replace(config, mesh=one_group), options.ranks)
        raise UsageError(
            f"--ranks {options.ranks}: mesh.stages = {config.mesh.stages} does not divide them, or "
            "the network has fewer calls"
        )
    alone = estimate_step(model, Grid.of({}))
    if options.json:
        rows = [_row(each, memory) for each in found]
        print(json.dumps({"hardware": asdict(hardware), "memory": memory, "meshes": rows}))
    else:
        print(_heading(config, model, options.ranks, memory))
        print(mesh_table(found[: options.rows], alone, memory))
        if len(found) > options.rows:
            print(f"{len(found) - options.rows} more meshes: --rows {len(found)}")
    if options.chart is not None:
        from pydist.plan.chart import draw_meshes

        draw_meshes(options.chart, found[: options.rows], memory)
    return _measure_best(found[:_MEASURED], options, overrides) if options.measure else 0


def _heading(config: Config, model: StepModel, ranks: int, memory: int) -> str:
    hardware = model.hardware
    allocator = f"the allocator's peak is {hardware.slack:g} times that of tensors"
    count = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return (
        f"{count} of {hardware.name} ({hardware.source}), {memory / 2**30:.3g} GiB each "
        f"({allocator}); batch {config.train.batch}; predicted, ms of a step"
    )


def _row(found: Estimate, memory: int) -> dict[str, Any]:
    from pydist.plan import InStages

    stages = found.in_stages or InStages(1, 1, "")
    return {
        "mesh": dict(zip(AXES, found.grid.shape, strict=True)),
        **asdict(stages),
        "bubble": found.bubble,
        "gathered": found.gathered,
        "on_channels": found.on_channels,
        "step": found.step,
        "samples_per_second": found.samples_per_second,
        "peak": found.peak,
        "fits": found.peak <= memory,
        "limit": found.limit if found.peak <= memory else "memory",
        "seconds": found.seconds,
        "memory": found.memory,
    }


def _measure(config: Config) -> int:
    """Measures a mesh in this process, which is one rank of a job."""
    from pydist.train.trial import measured_step

    config, ranks = joined_ranks(config)
    world = ranks.world
    seconds = measured_step(config, ranks)
    if world.rank == 0:
        print(f"{1e3 * seconds:.4g} ms measured", flush=True)
    world.barrier()
    return 0


def _measure_best(
    found: Sequence[Estimate], options: argparse.Namespace, overrides: Sequence[str]
) -> int:
    """Runs some steps on the best meshes, each in a job of its own."""
    from pydist.launch.supervisor import launch

    print(f"measured here, the best {len(found)}:", flush=True)
    for each in found:
        sizes = {axis: str(n) for axis, n in zip(AXES, each.grid.shape, strict=True)}
        chosen = ["--mesh.data", sizes["data"], "--mesh.spatial"]
        chosen += [sizes[axis] for axis in SPATIAL_AXES]
        chosen += [given for axis in OTHER_AXES for given in (f"--mesh.{axis}", sizes[axis])]
        if (stages := each.in_stages) is not None:
            chosen += ["--mesh.stages", str(stages.stages), "--mesh.schedule", stages.schedule]
            chosen += ["--mesh.micro-batches", str(stages.micro_batches)]
        print(f"{each}: {1e3 * each.step:.4g} ms predicted, ", end="", flush=True)
        argv = ["-m", "pydist", "plan", str(options.config), "--measure", *overrides, *chosen]
        code = launch(options.ranks, argv, options.mpi)
        if code:
            return code
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = RunOptions("pydist plan", f"{PROG} [--train.batch 8 ...]")
    parser.add_argument("--ranks", type=int, help="number of ranks to plan for")
    parser.add_argument("--memory", metavar="SIZE", help="memory of a rank, such as 16GB")
    parser.add_argument("--hardware", default="auto", help="a profile's name, or its file")
    parser.add_argument("--rows", type=int, default=20, help="meshes to show (20)")
    parser.add_argument("--measure", action="store_true", help="run the best meshes here")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the table")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, overrides = parser.parse(arguments)
    return options, overrides
