"""`pydist demo`: demonstrates learning, and equivalence to one rank, in two minutes on a laptop.

Trains CosmoFlow on 4 ranks (two groups, each with universes in two blocks) until it predicts
parameters of unseen universes, repeats the first steps on one rank, and shows the difference of the
two loss curves. For scale it also shows the difference on one rank if the initial weights are
perturbed by a millionth.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydist.cli.console import Console
from pydist.cli.data import make
from pydist.cli.options import parse
from pydist.cli.progress import ProgressView
from pydist.cli.train import launch_training
from pydist.errors import DiskError, UsageError
from pydist.launch.backends import backend_named
from pydist.train.config import (
    AdamConfig,
    CheckpointConfig,
    Config,
    CosmoFlowConfig,
    DataConfig,
    MeshConfig,
    OutputConfig,
    TrainConfig,
)  # fmt: skip
from pydist.train.config_io import dumps, from_tables, to_dict

if TYPE_CHECKING:
    from torch.nn import Module

    from pydist.data.universes.options import UniverseOptions

RANKS = 4
EPOCHS, COMPARED = 5, 10
"""Epochs of the run, and steps that are repeated: rounding errors grow in each."""
WIDTH: Literal[32] = 32
WHOLE, MOVED = "one-rank", "one-rank-moved"
"""Folders of the runs for comparison."""
_MARK = "demo.toml"
"""The file that marks a demo's folder."""
_RUNS = ("ckpt", WHOLE, MOVED)
_RESULTS = ("log.jsonl", "result.png", "predictions.csv", "dice.csv")


@dataclass(frozen=True)
class _Arguments:
    """Trains CosmoFlow on 4 ranks, compares the run with one rank, and draws the result."""

    folder: Path = Path("runs/demo")
    """Folder of data, log, checkpoint and figure; files of an earlier demo are replaced."""
    universes: int = 640
    """Number of synthetic universes of 32³ voxels; a fifth of them is for validation."""
    mpi: str = "auto"
    """Which MPI starts the ranks: openmpi, mpich, gloo (none), or auto."""


def demo(arguments: Sequence[str]) -> int:
    """Runs `pydist demo`; see `pydist demo --help`."""
    options = parse(_Arguments, arguments, "pydist demo")
    # Threads that spin while they wait for each other are very slow on oversubscribed cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    began = time.perf_counter()
    console = Console()
    split, universes = _config(options.folder), _universes(options.universes)
    backend_named(options.mpi)
    with prepared(split) as config_file:
        make(split.data.path, universes, console)
    code = launch_training(config_file, [], RANKS, options.mpi, ProgressView(console))
    if code:
        return code
    _compare(split, console)
    console.print(f"finished   in {time.perf_counter() - began:.0f} s")
    console.print("next       pydist train examples/cosmoflow.toml -n 4; README.md has the rest")
    return 0


def _config(folder: Path) -> Config:
    return Config(
        # Without batch norm so few steps do not find Omega_m, which shows in how channels differ.
        # The authors' momentum, for thousands of steps, would leave statistics of the start.
        model=CosmoFlowConfig(width=WIDTH, batch_norm=True, batch_norm_momentum=0.1, dropout=0.0),
        data=DataConfig(path=folder / "data", normalize="standardize"),
        mesh=MeshConfig(data=2, spatial=(2, 1, 1)),
        optimizer=AdamConfig(lr=1e-3, warmup_epochs=1.0, decay_epochs=EPOCHS - 1.0),
        train=TrainConfig(epochs=EPOCHS, batch=8, seed=1),
        checkpoint=CheckpointConfig(resume="never"),
        output=OutputConfig(folder=folder, plot=False),
    )


@contextmanager
def prepared(config: Config) -> Iterator[Path]:
    """Removes an earlier demo's files, except for the data, which are kept if they still fit.

    This process locks the folder within the `with` block, where the data are made.

    Yields:
        The configuration file for the ranks.

    Raises:
        UsageError: a value of the configuration is out of range, or the folder belongs to another
            run, or one that is not a demo; nothing is changed then.
        DiskError: the folder can't be written.
    """
    from pydist.data.lock import FolderLock

    from_tables(to_dict(config), "command line")
    folder = config.output.folder
    with ExitStack() as stack:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # The comparison runs of a demo lock folders of their own.
            held = [folder, *(each for name in (WHOLE, MOVED) if (each := folder / name).is_dir())]
        for each in held:
            stack.enter_context(FolderLock(each))
        with _writing(folder):
            _require_demo(folder)
            file = _cleared(folder, dumps(config))
        yield file


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskError(f"can't write into {folder}: {error.strerror}") from error


def _require_demo(folder: Path) -> None:
    """Raises `UsageError` if a demo would remove files that no demo has made."""
    if (folder / _MARK).exists():
        return
    for name in (*_RUNS, *_RESULTS, "data"):
        if os.path.lexists(folder / name):
            raise UsageError(
                f"{folder} has {name}, which no demo has made: choose another folder with --folder"
            )


def _cleared(folder: Path, config: str) -> Path:
    """Removes an earlier demo's runs and results, and writes the new configuration."""
    for name in _RUNS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _RESULTS:
        (folder / name).unlink(missing_ok=True)
    file = folder / _MARK
    file.write_text(config, encoding="utf-8")
    return file


def _universes(count: int) -> UniverseOptions:
    from pydist.data.universes.options import UniverseOptions

    # Large cells: in a small cube the parameters are most visible on large scales.
    return UniverseOptions(
        count=count,
        width=WIDTH,
        box_width=WIDTH,
        cell=8.0,
        validation=0.2,
        workers=2,
        overwrite=True,
    )


def _compare(split: Config, console: Console) -> None:
    """Repeats the first steps twice on one rank; prints and draws differences of the curves."""
    from pydist.data import ShardDataset
    from pydist.train import report
    from pydist.train.log import losses

    folder = split.output.folder
    curves = {f"{RANKS} ranks (data 2 × depth 2)": losses(folder / "log.jsonl")}
    curves["1 rank"] = _train_alone(split, folder / WHOLE, console)
    curves["1 rank, weights moved"] = _train_alone(split, folder / MOVED, console, _move)
    split_curve, whole, scale = curves.values()
    console.print(
        f"check      the first {len(whole)} steps on 1 rank: largest difference of the loss "
        f"{_distance(split_curve, whole):.1e}\n"
        f"           for scale, 1 rank with initial weights moved by a millionth: "
        f"{_distance(scale, whole):.1e}",
        soft_wrap=True,
    )
    if (table := folder / report.PREDICTIONS_FILE).exists():  # there are universes for validation
        names, predicted, true = report.read_predictions(table)
        found = (report.explained(predicted[:, i], true[:, i]) for i in range(len(names)))
        shown = ", ".join(f"{name} {r2:.2f}" for name, r2 in zip(names, found, strict=True))
        if len(true) > 1:  # of a single one there is no variance
            console.print(f"learned    R² of {len(true)} unseen universes: {shown}", soft_wrap=True)
    picture = report.draw_run(folder, curves, ShardDataset(split.data.path), split.mesh)
    files = f"{picture}, {folder / 'log.jsonl'}, {folder / 'ckpt' / 'last'}"
    console.print(f"result     {files}", soft_wrap=True)


def _move(model: Module) -> None:
    """Changes every weight by up to a millionth of itself, about the rounding error of a sum."""
    import torch

    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 1e-6 * (2 * torch.rand(weight.shape, generator=draw) - 1))


def _train_alone(
    split: Config,
    folder: Path,
    console: Console,
    prepare: Callable[[Module], None] | None = None,
) -> dict[int, float]:
    """Trains the run's first steps on one rank in this process; returns the loss by step."""
    from pydist.setup import init
    from pydist.train.log import LOG_FILE, losses
    from pydist.train.run import train

    alone = replace(
        split,
        mesh=MeshConfig(transport="local"),
        train=replace(split.train, steps=COMPARED, validate_every=0),
        checkpoint=replace(split.checkpoint, every=10**9),
        output=replace(split.output, folder=folder),
    )
    mesh = init(1, (1, 1, 1), "local", seed=alone.train.seed)
    view = ProgressView(console, label="check")
    try:
        train(alone, mesh, [view], prepare)
    finally:
        view.close()
    return losses(folder / LOG_FILE)


def _distance(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Computes the largest difference of two loss curves over the steps of the second."""
    return max(abs(one[step] - loss) for step, loss in other.items())
