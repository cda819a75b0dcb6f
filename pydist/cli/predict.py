"""`pydist predict`: segments NIfTI volumes with a trained network, across ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pydist.cli.options import parse
from pydist.errors import DataError, DiskError, UsageError

PROG = "pydist predict"


@dataclass(frozen=True)
class _Arguments:
    """Segments a volume in NIfTI files, or every volume in a folder, with a trained network.

    Each volume is partitioned over the ranks. Labels are written on the volume's own grid.
    """

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a run, or one of its checkpoints."""
    images: tyro.conf.Positional[tuple[Path, ...]]
    """A volume's files, one per channel; or a folder of volumes, whose files end in _0000, _0001,
    ... where there are several channels."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """Labels: a file ending in .nii or .nii.gz, or a folder if the images are in one."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of ranks to start on this machine."""
    mpi: str = "auto"
    """Which MPI starts them: openmpi, mpich, gloo (none), or auto."""
    spatial: tuple[int, int, int] | None = None
    """Number of parts along depth, height and width; by default the depth is split over all
    ranks, and sliding windows are not split."""
    sliding: int | None = None
    """Voxels along a side of sliding windows, for volumes that do not fit into memory. Windows are
    dealt out to the ranks; with --spatial, to groups of ranks that divide each window."""
    overlap: float | None = None
    """Overlap of neighboring windows, as a fraction; by default a quarter."""
    folds: tuple[Path, ...] = ()
    """Further runs with the same classes, such as the other folds of a cross-validation, whose
    scores are averaged."""
    probabilities: bool = False
    """Write the probability of each class as well, to OUTPUT with _probabilities in its name."""
    truth: Path | None = None
    """True labels, a file, or a folder with files of the same names: prints the Dice of classes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the network; "auto" is CUDA where each rank has a device of its own."""
    factory: str = ""
    """Factory of a network that is not pydist's own, such as nets.py:make, if you trust it."""
    task: str = ""
    """Task that is not pydist's own, such as mine.py:MyTask, if you trust it."""


def predict(arguments: Sequence[str]) -> int:
    """Runs `pydist predict`; see `pydist predict --help`."""
    options = parse(_Arguments, arguments, PROG)
    if not options.images:
        raise UsageError(
            "no image was given, as in: pydist predict RUN case.nii.gz -o labels.nii.gz"
        )
    _check(options)  # raises errors before any rank starts or predicts
    if options.ranks is None:
        return _predict_here(options)
    from pydist.cli.events import followed
    from pydist.cli.prediction_view import PredictionView
    from pydist.launch import launch

    own = ["--output", str(options.output), "--device", options.device]
    for name in ("spatial", "folds"):
        values = getattr(options, name)
        own += [f"--{name}", *map(str, values)] if values else []
    for name in ("sliding", "overlap", "truth", "factory", "task"):
        value = getattr(options, name)
        own += [f"--{name}", str(value)] if value not in (None, "") else []
    own += ["--probabilities"] if options.probabilities else []
    files = [str(options.checkpoint), *map(str, options.images)]
    view = PredictionView()
    with followed(view):
        code = launch(options.ranks, ["-m", "pydist", "predict", *files, *own], options.mpi)
    view.close()
    return code


def _check(options: _Arguments) -> None:
    """Checks the options before the network is read.

    Raises:
        UsageError: conflicting options, or an output of another kind than the input.
        DataError: an image does not exist.
        DiskError: there is no folder for the output, or its links form a cycle.
    """
    from pydist.data.medical.nifti_header import require_suffix
    from pydist.data.publish import real_path, refuse_overwriting

    if options.overlap is not None and options.sliding is None:
        raise UsageError("--overlap needs windows: give --sliding as well, as in --sliding 96")
    for image in options.images:
        if not image.exists():
            raise DataError(f"{image}: no such file or folder")
        if image.is_dir() and len(options.images) > 1:
            raise UsageError(f"{image} is a folder: give it alone, or the files of one volume")
    if not options.images[0].is_dir():
        require_suffix(options.output)
        if not options.output.parent.is_dir():
            raise DiskError(f"{options.output.parent}: no such folder")
    elif real_path(options.output) == real_path(options.images[0]):
        raise UsageError(
            f"{options.output}: labels would be stored among the images and mistaken for images; "
            "choose another folder"
        )
    cases = _cases(options.images, options.output)
    if options.truth is not None:
        _check_truth(options, options.truth, [output for _, output in cases])
    images = [path for files, _ in cases for path in files]
    for _, output in cases:
        refuse_overwriting(images, output)
        if options.probabilities:
            refuse_overwriting(images, _probabilities_of(output))


def _predict_here(options: _Arguments) -> int:
    """Predicts in this process, which is one rank of a job, or the only one."""
    from pydist import owner
    from pydist.cli.prediction_view import PredictionView
    from pydist.comm.consensus import together
    from pydist.data.publish import make_folder
    from pydist.inference import Predictor, Sliding
    from pydist.inference.dice import dice_of_files
    from pydist.launch import launcher_env
    from pydist.setup import init
    from pydist.train.device import facts_of_run
    from pydist.train.log import PIPE_VARIABLE, EventLog, to_pipe

    place = launcher_env.detect()
    depth = 1 if place is None or options.sliding is not None else place.size
    cases = _cases(options.images, options.output)
    sliding = None
    if options.sliding is not None:
        overlap = {} if options.overlap is None else {"overlap": options.overlap}
        sliding = Sliding(options.sliding, **overlap)
    mesh = init(
        1 if sliding is None else None,
        options.spatial or (depth, 1, 1),
        "host" if options.device == "cpu" else "auto",
    )
    predictor = Predictor(
        [options.checkpoint, *options.folds],
        mesh,
        sliding,
        options.device,
        options.factory,
        options.task,
    )
    facts = facts_of_run(predictor.device, options.device, "off", mesh.world, "--device")
    pipe, first = os.environ.get(PIPE_VARIABLE), mesh.rank == 0
    view = PredictionView() if first and pipe is None else None
    listener = view or (to_pipe(Path(pipe)) if first and pipe is not None else None)
    log = EventLog(None, [] if listener is None else [listener])
    log.emit("start", cases=len(cases), **facts)
    if first and len(options.images) == 1 and options.images[0].is_dir():
        make_folder(options.output)
    if first:
        owner.remove_temporaries(cases[0][1].parent)
    for images, output in cases:
        began = time.perf_counter()
        predictor.predict_file(
            images,
            output,
            _probabilities_of(output) if options.probabilities else None,
            lambda done, windows: log.emit("windows", done=done, windows=windows),
        )
        seconds = time.perf_counter() - began
        dice: dict[str, float] = {}
        if options.truth is not None:
            with together(mesh.world):
                if first:
                    truth = _truth_of(options, output)
                    dice = dice_of_files(output, truth, predictor.class_names)
        log.emit("predicted", output=str(output), seconds=seconds, dice=dice)
    if view is not None:
        view.close()
    mesh.world.barrier()
    return 0


def _check_truth(options: _Arguments, truth: Path, outputs: Sequence[Path]) -> None:
    if not truth.exists():
        raise DataError(f"{truth}: no such file or folder")
    if not truth.is_dir() and len(outputs) > 1:
        raise UsageError(f"--truth {truth}: a folder is needed, as the images are in one")
    for output in outputs:
        _truth_of(options, output)


def _truth_of(options: _Arguments, output: Path) -> Path:
    """Returns the file of a case's true labels."""
    from pydist.data.medical.nifti_header import SUFFIXES, stem

    assert options.truth is not None
    if not options.truth.is_dir():
        return options.truth
    # Of a case in a folder the number of the channel is left out already.
    is_case = options.images[0].is_dir()
    name = stem(output) if is_case else stem(options.images[0]).removesuffix("_0000")
    for suffix in SUFFIXES:
        if (path := options.truth / f"{name}{suffix}").is_file():
            return path
    raise DataError(f"{options.truth}: no {name}.nii or {name}.nii.gz with true labels")


def _probabilities_of(output: Path) -> Path:
    """Returns the file of a case's probabilities, beside that of its labels."""
    from pydist.data.medical.nifti_header import stem

    name = stem(output)
    return output.with_name(f"{name}_probabilities{output.name.removeprefix(name)}")


def _cases(images: Sequence[Path], output: Path) -> list[tuple[tuple[Path, ...], Path]]:
    """Returns each volume's files and its output path."""
    from pydist.data.medical.layouts import find_images

    if len(images) == 1 and images[0].is_dir():
        found = find_images(images[0])
        return [(files, output / f"{name}.nii.gz") for name, files in found.items()]
    return [(tuple(images), output)]
