"""`pydist sweep`: trains one configuration with many settings, several runs at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pydist.cli.console import Console
from pydist.cli.jobs import refuse_ranks, require_done, teller, training_command
from pydist.cli.options import parse
from pydist.launch.backends import backend_named


@dataclass(frozen=True)
class _Arguments:
    """Trains one configuration with many settings, as many runs at a time as the ranks allow.

    Each run is a job with its own ranks: one that fails is named, and the others go on. The same
    command continues a sweep that was stopped, and repeats failed runs.
    """

    sweep: tyro.conf.Positional[Path]
    """TOML file with the configuration and the settings that vary; docs/studies.md has an example.
    """
    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of ranks that are divided among the runs."""
    mpi: str = "auto"
    """Which MPI starts them: openmpi, mpich, gloo (none), or auto."""
    json: bool = False
    """Print JSON instead of the table; progress goes to stderr."""


def sweep(arguments: Sequence[str]) -> int:
    """Runs `pydist sweep`; see `pydist sweep --help`."""
    chosen = parse(_Arguments, arguments, "pydist sweep")
    refuse_ranks("pydist sweep")
    from pydist.studies.claimed import claimed, write_results
    from pydist.studies.runs import run_all
    from pydist.studies.sweep import load_sweep, sweep_table

    found = load_sweep(chosen.sweep)
    backend_named(chosen.mpi)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = Console(stderr=chosen.json)
    command = training_command(chosen.mpi, found.launcher)
    width = max(len(run.name) for run in found.runs)
    with claimed(found.folder, {"study": "sweep"}):
        outcomes = run_all(found.runs, chosen.ranks, command, teller(console, width))
        together = zip(found.runs, found.settings, outcomes, strict=True)
        record = [
            {"run": run.name, "ranks": run.ranks, "settings": settings, **asdict(outcome)}
            for run, settings, outcome in together
        ]
        write_results(found.folder, {"study": "sweep", "runs": record})
    print(json.dumps({"runs": record}) if chosen.json else sweep_table(found, outcomes))
    require_done(found.runs, outcomes)
    return 0
