"""`pydist predict`: predicts volumes and other samples with a trained network, across ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydist.cli.options import parse
from pydist.cli.own_options import arguments_of_ranks
from pydist.cli.predict_options import Arguments
from pydist.cli.predict_samples import are_samples, check_samples, predict_samples_here
from pydist.errors import (
    DataError,
    DiskError,
    DoesNotFit,
    UsageError,
    in_words,
    out_of_memory,
)

PROG = "pydist predict"


def predict(arguments: Sequence[str]) -> int:
    """Runs `pydist predict`; see `pydist predict --help`."""
    options = parse(Arguments, arguments, PROG)
    if not options.images:
        raise UsageError(
            "no image was given, as in: pydist predict RUN case.nii.gz -o labels.nii.gz"
        )
    _check(options)  # raises errors before any rank starts or predicts
    if options.ranks is None:
        with _advised():
            return _predict_here(options)
    from pydist.cli.events import followed
    from pydist.cli.prediction_view import PredictionView
    from pydist.launch.supervisor import launch

    argv = ["-m", "pydist", "predict", *arguments_of_ranks(arguments)]
    view = PredictionView()
    with followed(view):
        code = launch(options.ranks, argv, options.mpi)
    view.close()
    return code


@contextmanager
def _advised() -> Iterator[None]:
    """Says what takes less memory, if the `with` block finds none."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise DoesNotFit(
            f"{in_words(error)}; each rank holds less of a volume if more divide it, as in -n 4 "
            "--spatial 4 1 1, and labels can be computed by windows, as in --sliding 96"
        ) from error


def _check(options: Arguments) -> None:
    """Checks the options before the network is read.

    Raises:
        UsageError: conflicting options, or an output of another kind than the input.
        DataError: an image does not exist.
        DiskError: there is no folder for the output, or its links form a cycle.
    """
    from pydist.data.medical.dicom import is_series
    from pydist.data.medical.nifti_header import require_suffix
    from pydist.data.publish import real_path, refuse_overwriting

    if options.overlap is not None and options.sliding is None:
        raise UsageError("--overlap needs windows: give --sliding as well, as in --sliding 96")
    for image in options.images:
        if not image.exists():
            raise DataError(f"{image}: no such file or folder")
        if image.is_dir() and len(options.images) > 1 and not is_series(image):
            raise UsageError(f"{image} is a folder: give it alone, or the files of one volume")
    if are_samples(options):
        check_samples(options)
        return
    if not _are_several(options.images):
        require_suffix(options.output)
        if not options.output.parent.is_dir():
            raise DiskError(f"{options.output.parent}: no such folder")
    elif real_path(options.output) == real_path(options.images[0]):
        raise UsageError(
            f"{options.output}: labels would be stored among the images and mistaken for images; "
            "choose another folder"
        )
    cases = _cases(options.images, options.output)
    inputs = [path for files, _ in cases for path in files]
    if options.truth is not None:
        inputs += _truths(options, options.truth, [output for _, output in cases])
    for _, output in cases:
        refuse_overwriting(inputs, output)
        if options.probabilities:
            refuse_overwriting(inputs, _probabilities_of(output))


def _predict_here(options: Arguments) -> int:
    """Predicts in this process, which is one rank of a job, or the only one."""
    if are_samples(options):
        predict_samples_here(options)
        return 0
    from pydist import owner
    from pydist.cli.prediction_view import reported
    from pydist.comm.consensus import together
    from pydist.data.publish import make_folder
    from pydist.inference import Predictor, Sliding
    from pydist.inference.dice import dice_of_files
    from pydist.launch import launcher_env
    from pydist.setup import init

    place = launcher_env.detect()
    depth = 1 if place is None or options.sliding is not None else place.size
    cases = _cases(options.images, options.output)
    sliding = Sliding.chosen(options.sliding, options.overlap)
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
    first = mesh.rank == 0
    skipped = 0
    with reported(mesh, predictor.device, options.device, len(cases)) as log:
        if first and _are_several(options.images):
            make_folder(options.output)
        if first:
            owner.remove_temporaries(cases[0][1].parent)
        for images, output in cases:
            began = time.perf_counter()
            dice: dict[str, float] = {}
            try:
                predictor.predict_file(
                    images,
                    output,
                    _probabilities_of(output) if options.probabilities else None,
                    lambda done, windows: log.emit("windows", done=done, windows=windows),
                )
                if options.truth is not None:
                    with together(mesh.world):
                        if first:
                            truth = _truth_of(options, output)
                            dice = dice_of_files(output, truth, predictor.class_names)
            except DataError as error:
                # One that a network raises on some ranks alone ends the job: the others wait.
                if options.on_bad_sample == "stop" or not error.on_all_ranks:
                    raise
                log.emit("skipped", text=str(error))
                skipped += 1
                continue
            seconds = time.perf_counter() - began
            log.emit("predicted", output=str(output), seconds=seconds, dice=dice)
    mesh.world.barrier()
    if skipped:
        raise DataError(f"{skipped} of {len(cases)} volumes could not be predicted")
    return 0


def _truths(options: Arguments, truth: Path, outputs: Sequence[Path]) -> list[Path]:
    """Returns the files of all cases' true labels."""
    if not truth.exists():
        raise DataError(f"{truth}: no such file or folder")
    if not truth.is_dir() and len(outputs) > 1:
        raise UsageError(f"--truth {truth}: a folder is needed, as the images are in one")
    return [_truth_of(options, output) for output in outputs]


def _truth_of(options: Arguments, output: Path) -> Path:
    """Returns the file of a case's true labels."""
    from pydist.data.medical.nifti_header import SUFFIXES, stem

    assert options.truth is not None
    if not options.truth.is_dir():
        return options.truth
    # Of a case in a folder the number of the channel is left out already.
    is_case = _are_several(options.images)
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

    if _are_several(images):
        found = find_images(images[0])
        return [(files, output / f"{name}.nii.gz") for name, files in found.items()]
    return [(tuple(images), output)]


def _are_several(images: Sequence[Path]) -> bool:
    """Returns whether the input is a folder of volumes, and not the files of one volume."""
    from pydist.data.medical.dicom import is_series
    from pydist.data.medical.nifti_header import is_nifti

    if len(images) > 1 or not images[0].is_dir():
        return False
    return any(map(is_nifti, images[0].iterdir())) or not is_series(images[0])
