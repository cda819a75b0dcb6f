"""`pydist predict` for samples that are NumPy files, or those of a data set."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pydist.cli.predict_options import Arguments
from pydist.errors import DataError, DiskError, UsageError

if TYPE_CHECKING:
    from pydist.inference.resident import Resident
    from pydist.inference.samples import Samples
    from pydist.train.log import EventLog

_SUFFIX = ".npy"
_TABLE = ".csv"


def are_samples(options: Arguments) -> bool:
    """Returns whether the input is NumPy files or a data set, not NIfTI files or a DICOM series.

    Raises:
        UsageError: it is both, or neither.
    """
    from pydist.data.medical.dicom import is_series

    first = options.images[0]
    if _is_dataset(first):
        return True
    found = _visible(first) if first.is_dir() else options.images
    arrays = [path for path in found if path.suffix == _SUFFIX]
    volumes = [path for path in found if path.name.endswith((".nii", ".nii.gz"))]
    if arrays and volumes:
        raise UsageError(
            f"NumPy files such as {arrays[0]} and NIfTI files such as {volumes[0]}: predict them "
            "one after the other"
        )
    if not arrays and not volumes and not is_series(first):
        within = "a folder without" if first.is_dir() else "not"
        raise UsageError(
            f"{first}: {within} NIfTI files (.nii, .nii.gz) or NumPy files ({_SUFFIX}), and "
            "neither a DICOM series nor a data set"
        )
    if not arrays and options.output.suffix == _TABLE:
        raise UsageError(
            f"-o {options.output}: tables are for {_SUFFIX} files and data sets, not for NIfTI "
            "files"
        )
    return bool(arrays)


def _is_dataset(folder: Path) -> bool:
    """Returns whether a folder is a data set; nnU-Net's have a dataset.json, too."""
    from pydist.data.manifest import FILE_NAME, FORMAT

    try:
        return FORMAT.encode() in (folder / FILE_NAME).read_bytes()
    except OSError:
        return False


def _visible(folder: Path) -> list[Path]:
    """Returns a folder's files, without those that systems hide, such as macOS's `._x.npy`."""
    return sorted(each for each in folder.iterdir() if not each.name.startswith("."))


def check_samples(options: Arguments) -> None:
    """Checks options before a rank starts.

    Raises:
        UsageError: options that are for volumes in NIfTI files, or other files among the samples.
        DiskError: there is no folder for the output.
    """
    for name in ("folds", "probabilities", "truth"):
        if getattr(options, name):
            raise UsageError(f"--{name} is for volumes in NIfTI files, not for NumPy files")
    for path in options.images:
        if not path.is_dir() and path.suffix != _SUFFIX:
            raise UsageError(f"{path}: not a {_SUFFIX} file, as other samples are")
    parts = math.prod(options.spatial or (1, 1, 1))
    if options.ranks is not None and parts > 0 and options.ranks % parts:
        raise UsageError(f"-n {options.ranks}: multiples of {parts}, the parts of --spatial")
    if not options.output.parent.is_dir():
        raise DiskError(f"{options.output.parent}: no such folder")


def predict_samples_here(options: Arguments) -> None:
    """Predicts samples in this process, which is one rank of a job, or the only one."""
    from pydist.cli.prediction_view import reported
    from pydist.comm.consensus import together
    from pydist.inference import Sliding
    from pydist.inference.resident import Resident
    from pydist.setup import init

    sliding = Sliding.chosen(options.sliding, options.overlap)
    transport = "host" if options.device == "cpu" else "auto"
    mesh = init(None, options.spatial or (1, 1, 1), transport)
    resident = Resident(
        options.checkpoint, mesh, sliding, options.device, options.factory, options.task
    )
    with reported(mesh, resident.device, options.device, 1) as log:
        with together(mesh.world):
            if mesh.rank == 0:
                _check_output(options, resident)
        began = time.perf_counter()
        skipped: list[DataError] = []
        if mesh.rank == 0:
            skipped = _predict(options, resident, log)
        else:
            resident.follow()
        seconds = time.perf_counter() - began
        log.emit("predicted", output=str(options.output), seconds=seconds, dice={})
    with together(mesh.world):
        if skipped:
            raise DataError(f"samples that could not be predicted: {len(skipped)}")


def _check_output(options: Arguments, resident: Resident) -> None:
    """Makes the folder for the output, if it is one, and removes what killed runs left.

    Raises:
        UsageError: the output is of another kind than the network's results.
    """
    from pydist import owner
    from pydist.data.publish import make_folder, real_path, refuse_overwriting

    output = options.output
    if resident.loaded.kind != "segmentation":
        if output.suffix != _TABLE or output.is_dir():
            raise UsageError(
                f"-o {output}: a {_TABLE} file is needed, for what the network predicts of samples"
            )
        owner.remove_temporaries(output.parent)
        return
    if output.is_file() or output.suffix in (_TABLE, _SUFFIX, ".nii", ".gz"):
        raise UsageError(f"-o {output}: a folder is needed, for a {_SUFFIX} file of each sample")
    if real_path(output) in {real_path(each) for each in options.images}:
        raise UsageError(
            f"{output}: labels would be stored among the samples; choose another folder"
        )
    inputs = _inputs(options)
    for each in inputs:
        refuse_overwriting(inputs, output / each.name)
    make_folder(output)
    owner.remove_temporaries(output)


def _predict(options: Arguments, resident: Resident, log: EventLog) -> list[DataError]:
    """Predicts on the first rank, and ends what the other ranks do for it.

    Returns:
        Why samples were left out.
    """
    from pydist.inference.samples import predict_samples

    skipped: list[DataError] = []

    def skip(error: DataError) -> None:
        if options.on_bad_sample == "stop":
            raise error
        log.emit("skipped", text=str(error))
        skipped.append(error)

    try:
        samples = _samples(options)
        count = len(samples.names)
        predict_samples(
            resident,
            samples,
            options.output,
            lambda done: log.emit("windows", done=done, windows=count),
            skip,
        )
    finally:
        resident.end()
    return skipped


def _samples(options: Arguments) -> Samples:
    from pydist.data import ShardDataset
    from pydist.inference.samples import DatasetSamples, NumpySamples

    first, trust = options.images[0], options.trust
    if _is_dataset(first):
        dataset = ShardDataset(
            first, options.split, allow_roots=trust.allow_roots, untrusted=trust.untrusted
        )
        return DatasetSamples(dataset)
    return NumpySamples(_inputs(options))


def _inputs(options: Arguments) -> list[Path]:
    """Returns the NumPy files; none of a data set."""
    first = options.images[0]
    if _is_dataset(first):
        return []
    files = _visible(first) if first.is_dir() else options.images
    return [each for each in files if each.suffix == _SUFFIX]
