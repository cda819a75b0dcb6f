"""`pydist bench`: studies that train many times and end with a table and a figure."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pydist.cli.console import Console
from pydist.cli.data import progress_bar
from pydist.cli.jobs import (
    module_command,
    on_pack,
    refuse_ranks,
    require_done,
    teller,
    training_command,
)  # fmt: skip
from pydist.cli.options import parse
from pydist.errors import RankFailed, UsageError
from pydist.launch.backends import backend_named, cores
from pydist.studies.options import SampleSizeOptions, ScalingOptions

# The studies are imported by their commands, whose help must not wait for torch.
if TYPE_CHECKING:
    from pydist.studies.runs import Run


@dataclass(frozen=True)
class _SampleSize:
    """Compares networks that learn from whole universes with networks that learn from sub-cubes.

    The same synthetic universes, network and budget: whole cubes that are partitioned over the
    ranks, and sub-cubes of 1/8 and 1/64 of the volume. Shows the error of each parameter. The same
    command continues a study that was stopped.
    """

    folder: Path = Path("runs/sample-size")
    """Folder of data, runs, results.json and result.png."""
    ranks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Number of ranks that train on a cube together, or each on some of the sub-cubes."""
    mpi: str = "auto"
    """Which MPI starts them: openmpi, mpich, gloo (none), or auto."""
    json: bool = False
    """Print JSON instead of the table; progress goes to stderr."""
    options: tyro.conf.OmitArgPrefixes[SampleSizeOptions] = field(default_factory=SampleSizeOptions)
    """What is trained."""


def sample_size(arguments: Sequence[str]) -> int:
    """Runs `pydist bench sample-size`; see `pydist bench sample-size --help`."""
    chosen = parse(_SampleSize, arguments, "pydist bench sample-size")
    from pydist.studies.claimed import claimed, write_results
    from pydist.studies.runs import run_all
    from pydist.studies.sample_size import Study
    from pydist.studies.sample_size_report import conclusion, draw_sizes, sizes_record, table_of

    refuse_ranks("pydist bench")
    if not 1 <= chosen.ranks <= chosen.options.width:
        raise UsageError(f"-n {chosen.ranks}: 1 to {chosen.options.width} ranks are possible")
    backend_named(chosen.mpi)
    # Threads that spin while they wait for each other are very slow on oversubscribed cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    began = time.perf_counter()
    console = Console(stderr=chosen.json)
    study = Study(chosen.folder, chosen.options, chosen.ranks)
    with claimed(chosen.folder, study.identity()):
        with progress_bar(console) as told:
            study.make_data(told)
        runs = study.runs()
        width = max(len(run.name) for run in runs)
        command = training_command(chosen.mpi)
        outcomes = run_all(runs, chosen.ranks, command, teller(console, width))
        require_done(runs, outcomes)
        rows = study.rows()
        record = sizes_record(study, rows)
        files = [write_results(chosen.folder, record)]
        try:
            files.append(draw_sizes(study, rows))
        except UsageError as error:  # matplotlib is optional
            console.print(f"note       {error}", soft_wrap=True, markup=False)
    if chosen.json:
        print(json.dumps(record))
        return 0
    print(table_of(study, rows))
    for line in conclusion(rows):
        print(line)
    shown = ", ".join(map(str, files))
    console.print(f"result     {shown}  {time.perf_counter() - began:.0f} s", soft_wrap=True)
    return 0


@dataclass(frozen=True)
class _Scaling:
    """Measures how training scales, and draws the cost model's curves beside it.

    Strong (fixed sample and batch), weak in the batch and weak in the sample, with and without
    overlap, with samples from files, the store, and memory; losses are compared with those of one
    rank. Ranks beyond this machine's cores are modeled, not measured; so are the paper's
    experiments, to 2,048 GPUs. The same command continues a study that was stopped.
    """

    folder: Path = Path("runs/scaling")
    """Folder of data, runs, results.json and result.png."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"], metavar="INT")] = None
    """Largest number of ranks that is measured, a power of two; by default as many as cores."""
    mpi: str = "auto"
    """Which MPI starts them: openmpi, mpich, gloo (none), or auto."""
    modeled: int = 64
    """Largest number of ranks of the model's curves, a power of two."""
    hardware: str = "cpu"
    """Hardware of the curves: a profile, or a file that `pydist env --bench` has written."""
    json: bool = False
    """Print JSON instead of tables; progress goes to stderr."""
    options: tyro.conf.OmitArgPrefixes[ScalingOptions] = field(default_factory=ScalingOptions)
    """What is trained."""


def scaling(arguments: Sequence[str]) -> int:
    """Runs `pydist bench scaling`; see `pydist bench scaling --help`."""
    chosen = parse(_Scaling, arguments, "pydist bench scaling")
    from pydist.hardware import load_hardware
    from pydist.studies import scaling_job, scaling_report
    from pydist.studies.claimed import claimed, write_results
    from pydist.studies.file_rates import file_rates
    from pydist.studies.modeled import paper_points, series_estimates
    from pydist.studies.runs import run_all
    from pydist.studies.scaling import Scaling
    from pydist.studies.scaling_report import ScalingResults

    refuse_ranks("pydist bench")
    available = 1 << (cores().bit_length() - 1)
    ranks = available if chosen.ranks is None else chosen.ranks
    for option, count in (("-n", ranks), ("--modeled", chosen.modeled)):
        if count < 1 or count & (count - 1):
            raise UsageError(f"{option} {count}: powers of two are possible")
    if ranks > available:
        raise UsageError(
            f"-n {ranks}: this machine has cores for {available} ranks; more are modeled, by "
            "--modeled"
        )
    backend_named(chosen.mpi)
    hardware = load_hardware(chosen.hardware)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    began = time.perf_counter()
    console = Console(stderr=chosen.json)
    study = Scaling(chosen.folder, chosen.options, ranks)
    with claimed(chosen.folder, study.record()):
        study.make_data()
        points = study.points()
        by_name = {point.name: point for point in points}

        def command(run: Run) -> Sequence[str]:
            point = by_name[run.name]
            found = module_command(run, chosen.mpi, scaling_job.__name__, study.arguments(point))
            pack = study.packed(point)
            return found if pack is None else on_pack(found, pack, study.mount(point))

        runs = [study.run(point) for point in points]
        # One after the other, whatever their ranks: others would take their time.
        tell = teller(console, max(map(len, by_name)))
        outcomes = [run_all([run], ranks, command, tell)[0] for run in runs]
        require_done(runs, outcomes)
        results = ScalingResults(
            [study.measured(point) for point in points],
            series_estimates(study, chosen.modeled, hardware),
            hardware,
            list(paper_points(load_hardware("v100"))),
            file_rates(hardware),
        )
        record = scaling_report.scaling_record(study, results)
        files = [write_results(chosen.folder, record)]
        try:
            files.append(scaling_report.draw_scaling(study, results))
        except UsageError as error:  # matplotlib is optional
            console.print(f"note       {error}", soft_wrap=True, markup=False)
    if chosen.json:
        print(json.dumps(record))
    else:
        for table in scaling_report.tables(results):
            print(table, end="\n\n")
        shown = ", ".join(map(str, files))
        console.print(f"result     {shown}  {time.perf_counter() - began:.0f} s", soft_wrap=True)
    if wrong := scaling_report.unequal(results):
        raise RankFailed(f"losses differ from those of one rank: {', '.join(wrong)}")
    return 0
