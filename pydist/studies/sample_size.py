"""Compares networks that learn from whole universes with networks that learn from parts of them.

The reason to train on samples that do not fit one device: Oyama et al. (2021) report an order of
magnitude less error for universes of 512³ voxels than for sub-cubes of 128³. This study repeats the
comparison at a size of choice, on synthetic universes: the same universes, network and budget, once
with whole cubes, and once with each cube cut into sub-cubes.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pydist.data import Manifest, ShardDataset
from pydist.data.lock import FolderLock
from pydist.data.manifest import FILE_NAME, DataFile
from pydist.data.publish import make_folder
from pydist.data.universes.generate import generate_universes
from pydist.errors import DataError, DiskError
from pydist.studies.options import CUTS, SampleSizeOptions
from pydist.studies.runs import Run
from pydist.studies.summaries import (
    Array,
    QuadraticRidge,
    averaged,
    errors_by_output,
    summary,
)  # fmt: skip
from pydist.train.config import (
    AdamConfig,
    Config,
    DataConfig,
    FactoryConfig,
    MeshConfig,
    OutputConfig,
    TrainConfig,
)  # fmt: skip
from pydist.train.report import PREDICTIONS_FILE, read_predictions

if TYPE_CHECKING:
    from pydist.data.each_file import Progress

NETWORK, RIDGE, CONSTANT = "network", "ridge", "mean"


@dataclass(frozen=True)
class Row:
    """Errors that one predictor makes with one input.

    Attributes:
        predictor: `NETWORK`, `RIDGE`, or `CONSTANT`, which predicts the training set's mean.
        cut: parts of a cube along each side.
        averaged: whether the predictions of all sub-cubes of a universe are averaged.
        errors: mean squared errors, [seeds, outputs].
    """

    predictor: str
    cut: int
    averaged: bool
    errors: Sequence[Sequence[float]]

    @property
    def mean(self) -> float:
        """Mean that the errors have over seeds and outputs."""
        return float(np.mean(self.errors))

    @property
    def spread(self) -> float:
        """Standard deviation that the outputs' mean has over the seeds; 0 with one seed."""
        means = np.mean(self.errors, 1)
        return float(means.std(ddof=1)) if len(means) > 1 else 0.0


@dataclass(frozen=True)
class Study:
    """Study that has a folder, with data sets, runs and results.

    Attributes:
        folder: of its files.
        options: of the study.
        ranks: number of ranks that train on a whole cube together, by its depth.
    """

    folder: Path
    options: SampleSizeOptions
    ranks: int = 1

    def data(self, cut: int) -> Path:
        """Returns the folder of the data set with each cube in `cut`³ parts."""
        return self.folder / "data" / ("universes" if cut == 1 else f"parts-{cut**3}")

    def make_data(self, progress: Progress | None = None) -> None:
        """Makes the universes, and the data sets of their sub-cubes; complete ones are kept."""
        options = replace(self.options.universe_options, workers=2)
        whole = generate_universes(self.data(1), options, progress)
        for cut in CUTS[1:]:
            cut_universes(whole, self.data(1), self.data(cut), cut)

    def runs(self) -> list[Run]:
        """Returns the trainings: all inputs with the first seed, then with the next."""
        return [
            self._run(cut, seed) for seed, cut in itertools.product(range(self.options.seeds), CUTS)
        ]

    def _run(self, cut: int, seed: int) -> Run:
        o, ranks = self.options, self.ranks
        name = f"{'whole' if cut == 1 else f'parts-{cut**3}'}-seed-{seed}"
        # Sub-cubes need no partition: each rank has some of them.
        spatial, groups = ((ranks, 1, 1), 1) if cut == 1 else ((1, 1, 1), ranks)
        config = Config(
            model=FactoryConfig(
                factory="pydist.models.pooled:PooledCosmoFlow",
                args={"features": o.features, "levels": o.levels},
                task="regression",
            ),
            data=DataConfig(path=self.data(cut), normalize="standardize", store="memory"),
            mesh=MeshConfig(spatial=spatial, data=groups),
            optimizer=AdamConfig(lr=o.lr, end_lr=0.0, decay_epochs=float(o.epochs)),
            train=TrainConfig(
                epochs=o.epochs,
                batch=o.batch * cut**3,
                seed=seed,
                validate_every=o.epochs,
            ),
            output=OutputConfig(folder=self.folder / "runs" / name, plot=False),
        )
        return Run(name, config, ranks)

    def rows(self) -> list[Row]:
        """Computes the errors of all predictors, once all runs are done."""
        found = [self._constant()]
        for cut in CUTS:
            tables = [self._predictions(cut, seed) for seed in range(self.options.seeds)]
            found += _rows(NETWORK, cut, tables)
        for cut in CUTS:
            found += _rows(RIDGE, cut, [self._ridge(cut)])
        return found

    def _predictions(self, cut: int, seed: int) -> tuple[Array, Array]:
        """Reads a run's predicted and true values, [samples, outputs]."""
        path = self._run(cut, seed).folder / PREDICTIONS_FILE
        try:
            _, predicted, true = read_predictions(path)
        except OSError as error:
            raise DiskError(f"can't read {path}: {error.strerror}") from error
        except ValueError:
            raise DataError(f"{path}: not the table of a validation") from None
        samples = self.options.universe_options.validation_count * cut**3
        if len(true) != samples:
            raise DataError(f"{path}: {len(true)} samples instead of {samples}")
        return predicted, true

    def _constant(self) -> Row:
        (_, train, _), (_, true, _) = (_samples(self.data(1), 1, s) for s in ("train", "val"))
        return Row(CONSTANT, 1, False, [errors_by_output(train.mean(0)[None], true)])

    def _ridge(self, cut: int) -> tuple[Array, Array]:
        """Returns predicted and true values of the regression on summary statistics."""
        features, targets, groups = _samples(self.data(cut), cut**3, "train", summary)
        fitted = QuadraticRidge(features, targets, groups)
        features, targets, _ = _samples(self.data(cut), cut**3, "val", summary)
        return fitted.predict(features), targets

    def record(self) -> dict[str, Any]:
        """Returns the options of the study as JSON holds them."""
        return {"study": "sample-size", "options": asdict(self.options), "ranks": self.ranks}

    def identity(self) -> dict[str, Any]:
        """Returns what identifies the folder, for `claimed`: more seeds continue the study."""
        found = self.record()
        del found["options"]["seeds"]
        return found


def cut_universes(whole: Manifest, source: Path, folder: Path, cut: int) -> Manifest:
    """Makes a data set of the sub-cubes of a data set's cubes, in the same files.

    The files are linked, or copied where the file system has no hard links.

    Args:
        whole: the data set of cubes, one in each file.
        source: its folder.
        folder: of the new data set; a complete one is kept.
        cut: parts along each side.
    """
    channels, *extents = whole.sample_shape
    width = extents[0] // cut
    corners = itertools.product(range(0, extents[0], width), repeat=3)
    offsets = tuple((z, y, x) for z, y, x in corners)
    files: list[DataFile] = [replace(f, offsets=offsets, means=()) for f in whole.files]
    made = replace(whole, sample_shape=(channels, width, width, width), files=tuple(files))
    make_folder(folder)
    with FolderLock(folder):
        if (folder / FILE_NAME).exists() and Manifest.load(folder).digest == made.digest:
            return made
        for file in files:
            _link(source / file.path, folder / file.path)
        made.save(folder)
    return made


def _link(source: Path, path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)
    except OSError as error:
        raise DiskError(f"can't write {path}: {error.strerror}") from error


def _samples(
    folder: Path,
    parts: int,
    split: str,
    features: Callable[[npt.NDArray[np.generic]], Array] = lambda _: np.empty(0),
) -> tuple[Array, Array, npt.NDArray[np.int64]]:
    """Returns features, targets and number of the universe of each sample of a split."""
    data = ShardDataset(folder, split, normalize="none")
    try:
        found = [(features(data[i][0].numpy()), data.target(i).numpy()) for i in range(len(data))]
    finally:
        data.close()
    x, y = (np.array(each, dtype=np.float64) for each in zip(*found, strict=True))
    return x, y, np.arange(len(data)) // parts


def _rows(predictor: str, cut: int, tables: Sequence[tuple[Array, Array]]) -> list[Row]:
    """Returns the errors of an input's predictions, and of their averages over a universe."""
    rows = [Row(predictor, cut, False, [errors_by_output(p, t) for p, t in tables])]
    if cut > 1:
        groups = np.arange(len(tables[0][0])) // cut**3
        pairs = [(averaged(p, groups), averaged(t, groups)) for p, t in tables]
        rows.append(Row(predictor, cut, True, [errors_by_output(p, t) for p, t in pairs]))
    return rows
