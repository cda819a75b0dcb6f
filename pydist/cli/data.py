"""`pydist data`: generates, indexes, converts, describes and verifies data sets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.progress import Progress

from pydist.cli.console import Console
from pydist.cli.data_workers import require_one_process, workers_of
from pydist.cli.options import parse
from pydist.data.medical.options import CTOptions, NiftiOptions
from pydist.data.options import ConvertOptions, IndexOptions
from pydist.data.trust import FileTrust
from pydist.data.universes.options import UniverseOptions
from pydist.errors import DataError, UsageError
from pydist.launch.backends import cores
from pydist.packs.options import PackOptions

# What the commands call is imported by them: their help must not wait for NumPy.
if TYPE_CHECKING:
    from pydist.data.each_file import Workers
    from pydist.data.manifest import Manifest

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


_FileTrust = tyro.conf.OmitArgPrefixes[FileTrust]
_Workers = Annotated[int, tyro.conf.arg(metavar="N", help_behavior_hint="(default: all cores)")]


@dataclass(frozen=True)
class _Dicom:
    """Converts DICOM series with labels to HDF5 files and dataset.json in FOLDER."""

    source: tyro.conf.Positional[Path]
    """Folder with a folder of slices for each case; --labels names a folder with CASE.nii.gz, or
    with a series CASE, for each of them."""
    folder: tyro.conf.Positional[Path]
    """Folder of the data set."""
    conversion: tyro.conf.OmitArgPrefixes[NiftiOptions] = field(default_factory=NiftiOptions)
    """Options of the conversion."""


@dataclass(frozen=True)
class _Index:
    """Makes a data set of existing files, in place: writes dataset.json into FOLDER."""

    folder: tyro.conf.Positional[Path]
    """Folder with HDF5 files, such as the public CosmoFlow universes; or with Zarr or NumPy
    folders."""
    index: tyro.conf.OmitArgPrefixes[IndexOptions] = field(default_factory=IndexOptions)
    """What a sample is, and what is computed."""
    trust: _FileTrust = field(default_factory=FileTrust)
    """How far the files are trusted."""
    workers: _Workers = field(default_factory=cores)
    """Processes that read files. Where mpirun or srun has started ranks, all but the first do."""
    overwrite: bool = False
    """Replace a dataset.json that was made in another way."""


@dataclass(frozen=True)
class _Convert:
    """Copies a data set into another file format."""

    source: tyro.conf.Positional[Path]
    """Folder of a data set."""
    folder: tyro.conf.Positional[Path]
    """Folder of the copy."""
    conversion: tyro.conf.OmitArgPrefixes[ConvertOptions] = field(default_factory=ConvertOptions)
    """Format and storage."""
    trust: _FileTrust = field(default_factory=FileTrust)
    """How far the files of the source are trusted."""
    workers: _Workers = field(default_factory=cores)
    """Processes that copy; each holds one file in memory. Where mpirun or srun has started ranks,
    all but the first do."""


@dataclass(frozen=True)
class _Info:
    """Describes a data set: shapes, types, splits, and with --deep its values. Or a pack."""

    folder: tyro.conf.Positional[Path]
    """Folder of the data set or of the pack."""
    deep: bool = False
    """Read all voxels: ranges, NaN and infinite values, voxels by class, checksums. Of a pack, all
    checksums."""
    json: bool = False
    """Print JSON."""
    trust: _FileTrust = field(default_factory=FileTrust)
    """How far the files of a data set are trusted."""
    workers: _Workers = field(default_factory=cores)
    """Processes that read files with --deep, or ranks as of `pydist data index`."""


@dataclass(frozen=True)
class _Pack:
    """Packs many small files into a few large ones with an index, from which they are read."""

    source: tyro.conf.Positional[Path]
    """Folder whose files and folders are packed."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Folder of the pack: new or empty."""
    packing: tyro.conf.UseAppendAction[tyro.conf.OmitArgPrefixes[PackOptions]] = field(
        default_factory=PackOptions
    )
    """Options of the packing."""


@dataclass(frozen=True)
class _Verify:
    """Reads every file of a data set or a pack, and compares it with its checksum.

    The targets of a data set must be finite.
    """

    folder: tyro.conf.Positional[Path]
    """Folder of the data set or of the pack."""
    deep: bool = False
    """Read all voxels of a data set, too, which must be finite. Of a pack, everything is read
    without it."""
    trust: _FileTrust = field(default_factory=FileTrust)
    """How far the files of a data set are trusted."""
    workers: _Workers = field(default_factory=cores)
    """Threads that read files; with --deep processes, or ranks as of `pydist data index`."""


def universes(arguments: Sequence[str]) -> int:
    """Runs `pydist data universes`; see `pydist data universes --help`."""
    chosen = parse(_Universes, arguments, "pydist data universes")
    require_one_process("makes universes")
    make(chosen.folder, chosen.universes, Console())
    return 0


def ct(arguments: Sequence[str]) -> int:
    """Runs `pydist data ct`; see `pydist data ct --help`."""
    chosen = parse(_CT, arguments, "pydist data ct")
    require_one_process("makes volumes")
    make_ct(chosen.folder, chosen.volumes, Console())
    return 0


def nifti(arguments: Sequence[str]) -> int:
    """Runs `pydist data nifti`; see `pydist data nifti --help`."""
    _convert_medical(parse(_Nifti, arguments, "pydist data nifti"))
    return 0


def dicom(arguments: Sequence[str]) -> int:
    """Runs `pydist data dicom`; see `pydist data dicom --help`."""
    chosen = parse(_Dicom, arguments, "pydist data dicom")
    if chosen.conversion.labels is None:
        raise UsageError("--labels: the folder with the labels is needed")
    _convert_medical(chosen)
    return 0


_MANY = 100
"""Label from which on it may be a mark instead of a class, where no file names the classes."""


def _convert_medical(chosen: _Nifti | _Dicom) -> None:
    """Converts images with labels, with a progress bar, and says which were rejected."""
    from pydist.data.medical.convert import convert_nifti

    require_one_process("converts images")
    console = Console()
    began = time.perf_counter()
    with progress_bar(console) as told:
        manifest = convert_nifti(chosen.source, chosen.folder, chosen.conversion, told)
    rejected = manifest.origin["rejected"]
    for why in rejected.values():
        console.print(f"rejected   {why}", soft_wrap=True, markup=False)
    what = f"{len(manifest.files)} cases" + (f", {len(rejected)} rejected" if rejected else "")
    _say(console, what, manifest, chosen.folder, began)
    ignored = manifest.origin["options"].get("ignore_label")
    if ignored is not None:
        console.print(f"next       set train.ignore_label = {ignored}: these voxels have no class")
    highest = len(manifest.class_names) - 1
    if ignored is None and highest >= _MANY and manifest.class_names[highest] == f"class {highest}":
        console.print(
            f"notice     the highest label is {highest}, so there are {highest + 1} classes; if it "
            f"marks voxels without a class, convert with --ignore-label {highest} --overwrite",
            soft_wrap=True,
        )


def index(arguments: Sequence[str]) -> int:
    """Runs `pydist data index`; see `pydist data index --help`."""
    chosen = parse(_Index, arguments, "pydist data index")
    from pydist.data.index import index_dataset

    return _from_files(
        chosen,
        lambda told, workers: index_dataset(
            chosen.folder,
            chosen.index,
            told,
            workers=workers,
            overwrite=chosen.overwrite,
            trust=chosen.trust,
        ),
    )


def convert(arguments: Sequence[str]) -> int:
    """Runs `pydist data convert`; see `pydist data convert --help`."""
    chosen = parse(_Convert, arguments, "pydist data convert")
    from pydist.data.convert import convert_dataset

    return _from_files(
        chosen,
        lambda told, workers: convert_dataset(
            chosen.source,
            chosen.folder,
            chosen.conversion,
            told,
            workers=workers,
            trust=chosen.trust,
        ),
    )


def _from_files(chosen: _Index | _Convert, make: Callable[[Told, Workers], Manifest]) -> int:
    """Makes a data set of files in several processes or ranks, and says what was made."""
    console = Console()
    began = time.perf_counter()
    with workers_of(chosen) as workers, progress_bar(console) as told:
        if workers is None:
            return 0
        manifest = make(told, workers)
    what = f"{len(manifest.files)} {manifest.file_format} files"
    _say(console, what, manifest, chosen.folder, began)
    return 0


def info(arguments: Sequence[str]) -> int:
    """Runs `pydist data info`; see `pydist data info --help`."""
    chosen = parse(_Info, arguments, "pydist data info")
    with workers_of(chosen) as workers:
        if workers is not None:
            _describe(chosen, workers)
    return 0


def _describe(chosen: _Info, workers: Workers) -> None:
    from pydist.cli.data_info import lines_of
    from pydist.data.info import deep_facts, kept_facts, outline
    from pydist.packs import verifying

    console = Console()
    if verifying.is_pack(chosen.folder):
        _describe_pack(chosen, console)
        return
    described = outline(chosen.folder)
    if not chosen.deep:
        found = kept_facts(chosen.folder, chosen.trust)
    else:
        with progress_bar(console) as told:
            found = deep_facts(chosen.folder, told, workers=workers, trust=chosen.trust)
    if chosen.json:
        deep = None if found is None else {split: asdict(f) for split, f in found.items()}
        print(json.dumps({**described, "deep": deep}, indent=1))
    else:
        for line in lines_of(described, found):
            console.print(line, soft_wrap=True, markup=False)
    faults = sum(len(facts.faults) for facts in (found or {}).values())
    if faults:
        raise DataError(f"{chosen.folder} has damaged or missing files ({faults})")


def _describe_pack(chosen: _Info, console: Console) -> None:
    from pydist.cli.data_info import lines_of_pack
    from pydist.packs import verifying

    _refuse_trust(chosen)
    described = verifying.pack_outline(chosen.folder)
    faults: list[str] | None = None
    if chosen.deep:
        with progress_bar(console) as told:
            faults = verifying.verify(chosen.folder, told, workers=chosen.workers)
    if chosen.json:
        deep = None if faults is None else {"faults": faults}
        print(json.dumps({**described, "deep": deep}, indent=1))
    else:
        for line in lines_of_pack(described, faults):
            console.print(line, soft_wrap=True, markup=False)
    if faults:
        raise DataError(f"{chosen.folder} does not match its checksums (files: {len(faults)})")


def _refuse_trust(chosen: _Info | _Verify) -> None:
    """Raises `UsageError` for options about the files of a data set, with a pack."""
    if chosen.trust != FileTrust():
        raise UsageError(
            f"--untrusted and --allow-roots are for data sets, and {chosen.folder} is a pack: its "
            "files are compared with their checksums, and not opened"
        )


def pack(arguments: Sequence[str]) -> int:
    """Runs `pydist data pack`; see `pydist data pack --help`."""
    chosen = parse(_Pack, arguments, "pydist data pack")
    require_one_process("packs files")
    from pydist.packs import writing

    console = Console()
    began = time.perf_counter()
    with progress_bar(console) as told:
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
    chosen = parse(_Verify, arguments, "pydist data verify")
    with workers_of(chosen) as workers:
        if workers is not None:
            _compare(chosen, workers)
    return 0


def _compare(chosen: _Verify, workers: Workers) -> None:
    from pydist.data.index import verify_dataset
    from pydist.data.info import deep_faults
    from pydist.packs import verifying

    console = Console()
    packed = verifying.is_pack(chosen.folder)
    if packed:
        _refuse_trust(chosen)
    with progress_bar(console) as told:
        if packed:
            faults = verifying.verify(chosen.folder, told, workers=chosen.workers)
        elif chosen.deep:
            faults = deep_faults(chosen.folder, told, workers=workers, trust=chosen.trust)
        else:
            faults = verify_dataset(chosen.folder, told, workers=chosen.workers, trust=chosen.trust)
    for fault in faults:
        console.print(f"damaged    {fault}", soft_wrap=True, markup=False)
    if faults:
        what = "does not match its checksums" if packed else "has damaged or unusable files"
        raise DataError(f"{chosen.folder} {what} (files: {len(faults)})")
    console.print(f"verified   {chosen.folder}", soft_wrap=True, markup=False)


def make(folder: Path, options: UniverseOptions, console: Console) -> None:
    """Generates a set of universes, with a progress bar; an existing one is kept."""
    from pydist.data.universes.generate import generate_universes

    began = time.perf_counter()
    with progress_bar(console) as told:
        manifest = generate_universes(folder, options, told)
    what = f"{options.count} universes of {options.box}³ voxels"
    _say(console, what, manifest, folder, began)


def make_ct(folder: Path, options: CTOptions, console: Console) -> None:
    """Generates a set of CT volumes, with a progress bar; an existing one is kept."""
    from pydist.data.medical.generate import generate_ct

    began = time.perf_counter()
    with progress_bar(console) as told:
        manifest = generate_ct(folder, options, told)
    what = f"{options.count} synthetic CT volumes of {' × '.join(map(str, options.shape))} voxels"
    _say(console, what, manifest, folder, began)


@contextmanager
def progress_bar(console: Console) -> Iterator[Told]:
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
