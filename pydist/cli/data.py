"""`pydist data universes`: makes a synthetic data set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import Progress

from pydist.cli.options import parse
from pydist.data.universes import UniverseOptions, generate_universes


@dataclass(frozen=True)
class _Arguments:
    """Makes synthetic universes for CosmoFlow: HDF5 files and dataset.json in FOLDER."""

    folder: tyro.conf.Positional[Path]
    """Where to write the data set."""
    universes: tyro.conf.OmitArgPrefixes[UniverseOptions] = field(default_factory=UniverseOptions)
    """What to make."""


def universes(arguments: Sequence[str]) -> int:
    """Runs `pydist data universes`; see `pydist data universes --help`."""
    chosen = parse(_Arguments, arguments, "pydist data universes")
    make(chosen.folder, chosen.universes, Console(highlight=False))
    return 0


def make(folder: Path, options: UniverseOptions, console: Console) -> None:
    """Makes a data set, with a progress bar; one that is there already is kept."""
    began = time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("data      ", total=options.count)
        manifest = generate_universes(
            folder, options, lambda done, total, what: bar.update(task, completed=done)
        )
    samples = sum(manifest.splits.values())
    splits = ", ".join(f"{count} {split}" for split, count in manifest.splits.items())
    seconds = time.perf_counter() - began
    console.print(
        f"data       {options.count} universes of {options.box}³ voxels → {samples} samples of "
        f"{options.width}³ ({splits}) in {folder}  {seconds:.0f} s",
        soft_wrap=True,
    )
