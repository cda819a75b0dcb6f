"""`pydist data`: generates, converts and verifies data sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import Progress

from pydist.cli.console import Console
from pydist.cli.options import parse
from pydist.data.manifest import Manifest
from pydist.data.medical import CTOptions, NiftiOptions, convert_nifti, generate_ct
from pydist.data.universes import UniverseOptions, generate_universes
from pydist.errors import DataError
from pydist.packs.writing import PackOptions

Told = Callable[[int, int, str], None]


@dataclass(frozen=True)
class _Universes:
    """Generates synthetic universes for CosmoFlow: HDF5 files and dataset.json in FOLDER."""

    folder: tyro.conf.Positional[Path]
    """Folder of the data set."""
    universes: tyro.conf.OmitArgPrefixes[UniverseOptions] = field(default_factory=UniverseOptions)
    """Options of the generation."""


@dataclass(frozen=True)
class _CT:
    """Generates synthetic CT volumes with labels, for the U-Net: HDF5 or NIfTI files in FOLDER."""

    folder: tyro.conf.Positional[Path]
    """Folder of the data set."""
    volumes: tyro.conf.OmitArgPrefixes[CTOptions] = field(default_factory=CTOptions)
    """Options of the generation."""


@dataclass(frozen=True)
class _Nifti:
    """Converts NIfTI images with labels to HDF5 files and dataset.json in FOLDER."""

    source: tyro.conf.Positional[Path]
    """Folder of nnU-Net or of the Medical Segmentation Decathlon (with dataset.json), or a folder
    of images, with --labels for the labels."""
    folder: tyro.conf.Positional[Path]
    """Folder of the data set."""
    conversion: tyro.conf.OmitArgPrefixes[NiftiOptions] = field(default_factory=NiftiOptions)
    """Options of the conversion."""


@dataclass(frozen=True)
class _Pack:
    """Packs many small files into a few large ones with an index, from which they are read."""

    source: tyro.conf.Positional[Path]
    """Folder whose files and folders are packed."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Folder of the pack: new or empty."""
    packing: tyro.conf.OmitArgPrefixes[PackOptions] = field(default_factory=PackOptions)
    """Options of the packing."""


@dataclass(frozen=True)
class _Verify:
    """Reads every file of a data set or a pack and compares it with its checksum."""

    folder: tyro.conf.Positional[Path]
    """Folder of the data set or of the pack."""


def universes(arguments: Sequence[str]) -> int:
    """Runs `pydist data universes`; see `pydist data universes --help`."""
    chosen = parse(_Universes, arguments, "pydist data universes")
    make(chosen.folder, chosen.universes, Console())
    return 0


def ct(arguments: Sequence[str]) -> int:
    """Runs `pydist data ct`; see `pydist data ct --help`."""
    chosen = parse(_CT, arguments, "pydist data ct")
    make_ct(chosen.folder, chosen.volumes, Console())
    return 0


def nifti(arguments: Sequence[str]) -> int:
    """Runs `pydist data nifti`; see `pydist data nifti --help`."""
    chosen = parse(_Nifti, arguments, "pydist data nifti")
    console = Console()
    began = time.perf_counter()
    with _told(console) as told:
        manifest = convert_nifti(chosen.source, chosen.folder, chosen.conversion, told)
    rejected = manifest.origin["rejected"]
    for why in rejected.values():
        console.print(f"rejected   {why}", soft_wrap=True, markup=False)
    what = f"{len(manifest.files)} cases" + (f", {len(rejected)} rejected" if rejected else "")
    _say(console, what, manifest, chosen.folder, began)
    ignored = manifest.origin["options"].get("ignore_label")
    if ignored is not None:
        console.print(f"next       set train.ignore_label = {ignored}: these voxels have no class")
    return 0


def pack(arguments: Sequence[str]) -> int:
    """Runs `pydist data pack`; see `pydist data pack --help`."""
    from pydist.packs import writing

    chosen = parse(_Pack, arguments, "pydist data pack")
    console = Console()
    began = time.perf_counter()
    with _told(console) as told:
        made = writing.pack(chosen.source, chosen.output, chosen.packing, told)
    share = made["stored_bytes"] / made["bytes"] if made["bytes"] else 1.0
    packed = f" → {made['stored_bytes']:,}" if chosen.packing.codec != "raw" else ""
    console.print(
        f"data       {made['files']:,} files in {made['folders']:,} folders, {made['bytes']:,}"
        f"{packed} bytes{f' ({share:.0%})' if packed else ''} in {chosen.output}  "
        f"{time.perf_counter() - began:.0f} s",
        soft_wrap=True,
        markup=False,
    )
    return 0


def verify(arguments: Sequence[str]) -> int:
    """Runs `pydist data verify`; see `pydist data verify --help`."""
    from pydist.data.index import verify_dataset
    from pydist.packs import verifying

    chosen = parse(_Verify, arguments, "pydist data verify")
    console = Console()
    packed = verifying.is_pack(chosen.folder)
    with _told(console) as told:
        faults = (verifying.verify if packed else verify_dataset)(chosen.folder, told)
    for fault in faults:
        console.print(f"damaged    {fault}", soft_wrap=True, markup=False)
    if faults:
        what = "checksums" if packed else "manifest"
        raise DataError(f"{chosen.folder} does not match its {what} (files: {len(faults)})")
    console.print(f"verified   {chosen.folder}", soft_wrap=True, markup=False)
    return 0


def make(folder: Path, options: UniverseOptions, console: Console) -> None:
    """Generates a set of universes, with a progress bar; an existing one is kept."""
    began = time.perf_counter()
    with _told(console) as told:
        manifest = generate_universes(folder, options, told)
    what = f"{options.count} universes of {options.box}³ voxels"
    _say(console, what, manifest, folder, began)


def make_ct(folder: Path, options: CTOptions, console: Console) -> None:
    """Generates a set of CT volumes, with a progress bar; an existing one is kept."""
    began = time.perf_counter()
    with _told(console) as told:
        manifest = generate_ct(folder, options, told)
    what = f"{options.count} synthetic CT volumes of {' × '.join(map(str, options.shape))} voxels"
    _say(console, what, manifest, folder, began)


@contextmanager
def _told(console: Console) -> Iterator[Told]:
    """Draws the progress of making a data set; yields the callback."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("data      ", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total)


def _say(
    console: Console, what: str, manifest: Manifest | None, folder: Path, began: float
) -> None:
    """Prints one line about a new data set."""
    made = ""
    if manifest is not None:
        splits = ", ".join(f"{count} {split}" for split, count in manifest.splits.items())
        sides = manifest.sample_shape[1:]
        shape = f"{sides[0]}³" if len(set(sides)) == 1 else " × ".join(map(str, sides))
        varied = any(file.extents not in (None, sides) for file in manifest.files)
        made = (
            f" → {sum(manifest.splits.values())} samples of {'up to ' if varied else ''}{shape} "
            f"({splits})"
        )
    console.print(
        f"data       {what}{made} in {folder}  {time.perf_counter() - began:.0f} s",
        soft_wrap=True,
        markup=False,
    )
