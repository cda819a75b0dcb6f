"""`pydist balance`: measures which parts of a sample or of its channels suit unequal ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydist.cli.own_options import RunOptions, arguments_of_ranks
from pydist.cli.train import load_config, mesh_of
from pydist.errors import DiskError, UsageError
from pydist.grid import OTHER_AXES

if TYPE_CHECKING:
    from pydist.train.balancing import Round
    from pydist.train.config import Config
    from pydist.train.parts import Axis

PROG = (
    "pydist balance CONFIG [-n RANKS] [--mpi NAME] [--axis NAME] [--multiple N] [--steps N] "
    "[--rounds N] [--out FILE]"
)


def balance(arguments: Sequence[str]) -> int:
    """Runs `pydist balance`; see `pydist balance --help`."""
    options, overrides = _parse(arguments)
    config = load_config(options.config, overrides, PROG)
    if config.mesh.stages is not None:
        raise UsageError(
            "pydist balance divides an axis of one mesh, and mesh.stages describes several: choose "
            "mesh.balance, which divides the network, or the shares of each stage by hand"
        )
    out = options.out or options.config.with_suffix(".balanced.toml")
    if options.ranks is None:
        return _balance_here(config, options, out)
    _require_new(out)
    from pydist.launch.supervisor import launch
    from pydist.train.parts import axis_of

    if config.mesh.spatial != "auto":  # which the ranks choose
        axis_of(config, options.ranks, options.axis, options.multiple)  # raises before they start
    argv = ["-m", "pydist", "balance", *arguments_of_ranks(arguments)]
    return launch(options.ranks, argv, options.mpi)


def _balance_here(config: Config, options: argparse.Namespace, out: Path) -> int:
    """Balances in this process, which is one rank of a job."""
    from pydist.comm.consensus import require_same, together
    from pydist.data.publish import publish
    from pydist.train import config_io
    from pydist.train.balancing import find_parts
    from pydist.train.parts import axis_of, with_parts
    from pydist.train.planning import on_grid

    mesh = mesh_of(config)
    config = on_grid(config, mesh.grid)
    own = ("axis", "multiple", "steps", "rounds")
    require_same(mesh.world, {f"the option --{name}": getattr(options, name) for name in own})
    with together(mesh.world):
        if mesh.rank == 0:
            _require_new(out)
        axis = axis_of(config, mesh.size, options.axis, options.multiple)
    done: list[Round] = []

    def show(found: Round) -> None:
        done.append(found)
        if mesh.rank == 0:
            print(_line(axis, found), flush=True)

    if mesh.rank == 0:
        part_of = OTHER_AXES.get(axis.name)
        unit = f"of {axis.extent}" if part_of is None else f"% of {part_of}"
        unit = f"{axis.extent} samples of a batch" if axis.name == "data" else unit
        print(f"{axis.name}, {unit}: the parts, their busy seconds, and the seconds of a step")
    best = find_parts(config, mesh.world, axis, options.steps, options.rounds, show)
    with together(mesh.world, "writing the configuration"):
        if mesh.rank == 0:
            publish(out, config_io.dumps(with_parts(config, axis, best.sizes)).encode())
    if mesh.rank == 0:
        gain = f"{done[0].seconds / best.seconds:.2f} times as fast as {_sizes(done[0])}"
        if best is done[0]:
            gain = "as given" if config.mesh.shares.given.get(axis.name) else "the even parts"
        print(f"the fastest: {axis.name} {_sizes(best)}, {gain}; written to {out}")
    mesh.world.barrier()
    return 0


def _require_new(out: Path) -> None:
    if out.exists():
        raise UsageError(f"{out} exists: choose another file with --out")
    if not out.parent.is_dir():
        raise DiskError(f"{out.parent}: no such folder")


def _line(axis: Axis, found: Round) -> str:
    busy = "  ".join(f"{seconds:.4g}" for seconds in found.busy)
    return f"{axis.name} {_sizes(found)}   busy {busy} s   step {found.seconds:.4g} s"


def _sizes(found: Round) -> str:
    return " + ".join(map(str, found.sizes))


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = RunOptions("pydist balance", f"{PROG} [--train.batch 8 ...]")
    parser.add_argument("--axis", metavar="NAME", help="axis to divide: data, depth, ...")
    parser.add_argument("--multiple", type=int, help="divisor of the parts")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round (10)")
    parser.add_argument("--rounds", type=int, default=5, help="divisions to try (5)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the balanced configuration")
    options, overrides = parser.parse(arguments)
    if options.steps < 1 or options.rounds < 1:
        raise UsageError(
            f"--steps {options.steps} --rounds {options.rounds}: at least 1 of each is possible"
        )
    return options, overrides
