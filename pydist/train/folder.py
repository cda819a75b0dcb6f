"""Names the files of a run's output folder, and checks it before a run writes to it."""

from __future__ import annotations

from pathlib import Path

from pydist import owner
from pydist.errors import DiskError, UsageError
from pydist.train import checkpoint, log, report
from pydist.train.curves import CURVES_FILE
from pydist.train.log import LOG_FILE
from pydist.train.segmentation_report import DICE_FILE

CONFIG_FILE = "config.toml"
CHECKPOINTS = "ckpt"
PICTURES = "samples"
"""Folder with a picture of a sample for each validation."""
TUNING_FILE = "tuning.json"
"""The run's choices of kernels, for `train.tuning` of another run."""

_RESULTS = (report.PREDICTIONS_FILE, DICE_FILE, report.PICTURE_FILE, CURVES_FILE)


def refuse_foreign(folder: Path) -> None:
    """Stops a run before it overwrites or appends to a file that no run has written.

    Raises:
        UsageError: there is such a file.
        DiskError: the folder can't be read, or a path of a file or link is something else.
    """
    found = [folder / name for name in (CONFIG_FILE, LOG_FILE, TUNING_FILE, *_RESULTS)]
    for path in found:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"
            raise DiskError(f"{path}: it is {kind}, and a file is needed")
    last = folder / CHECKPOINTS / checkpoint.LAST
    if last.exists() and not last.is_symlink():
        raise DiskError(f"{last}: it is no link, and a link to the last checkpoint is needed")
    try:
        found = [path for path in found if path.is_file() and path.stat().st_size]
        if not found or checkpoint.complete(folder / CHECKPOINTS):
            return
        path = folder / LOG_FILE
        if path in found and next(log.read(path), None) is not None:
            return
    except OSError as error:
        raise DiskError(f"can't read {error.filename or folder}: {error.strerror}") from error
    raise UsageError(
        f"{found[0]} exists, and {folder} is not the folder of a run: choose another"
        " output.folder, or rename the file"
    )


def remove_unfinished(folder: Path) -> list[Path]:
    """Removes unfinished files of killed runs; returns their paths."""
    return [*owner.remove_temporaries(folder), *owner.remove_temporaries(folder / CHECKPOINTS)]
