"""Measures the steps of one point of the scaling study, as one rank of its job.

    pydist run -n 2 -m pydist.studies.scaling_job SETTINGS.toml STEPS [awaited] [memory]

Each step is an event in the log of the run's folder, as of `pydist train`; its seconds are those of
the slowest rank, and the parts are that rank's. "awaited" takes the overlap out; with "memory" each
rank keeps its blocks of all samples, so that later epochs read nothing and exchange no samples.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from pydist.comm.consensus import together
from pydist.data import ShardDataset
from pydist.data.loader import Loader
from pydist.data.normalize import Normalization
from pydist.partition import Box
from pydist.setup import init
from pydist.studies.awaited import without_overlap
from pydist.train import config_io
from pydist.train.config import Config
from pydist.train.datasets import make_loader, store_options
from pydist.train.job import Job
from pydist.train.log import LOG_FILE, EventLog
from pydist.train.trial import recorded_steps

AWAITED, MEMORY = "awaited", "memory"


class KeptBlocks(ShardDataset):
    """Data set that keeps each block that was read, on this rank."""

    def __init__(self, root: str | Path, split: str, normalize: Normalization) -> None:
        super().__init__(root, split, normalize=normalize)
        self._kept: dict[tuple[str, int, str], Tensor] = {}

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Reads one block of one sample, or copies it from memory; see `ShardDataset`."""
        key = ("values", index, str(box))
        if key not in self._kept:
            self._kept[key] = super().read_block(index, box)
        return _copied(self._kept[key], out)

    def read_stored(self, index: int, box: Box | None, out: Tensor) -> None:
        """Reads one block without normalization, or copies it; see `ShardDataset`."""
        key = ("stored", index, str(box))
        if key not in self._kept:
            super().read_stored(index, box, out)
            self._kept[key] = out.clone()
        out.copy_(self._kept[key])

    def read_labels(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Reads the labels of one block, or copies them from memory; see `ShardDataset`."""
        key = ("labels", index, str(box))
        if key not in self._kept:
            self._kept[key] = super().read_labels(index, box)
        return _copied(self._kept[key], out)


def _copied(kept: Tensor, out: Tensor | None) -> Tensor:
    return kept.clone() if out is None else out.copy_(kept)


def main(arguments: Sequence[str]) -> None:
    """Measures the steps, and writes the log on the first rank."""
    settings, steps, *flags = arguments
    config = config_io.load(Path(settings))
    wanted = config.mesh
    assert wanted.spatial != "auto"
    mesh = init(wanted.data, wanted.spatial, seed=config.train.seed, **wanted.axes)

    def loader(config: Config, data: ShardDataset, job: Job) -> Loader:
        kept = KeptBlocks(config.data.path, "train", config.data.normalize)
        store = store_options(config, data, None)[0]
        return make_loader(config, kept if MEMORY in flags else data, job, store=store)

    with without_overlap() if AWAITED in flags else nullcontext():
        events = recorded_steps(config, mesh, int(steps), 0, loader)
    everyones = mesh.world.all_gather_json([(e["seconds"], e["parts"]) for e in events])
    with together(mesh.world, "writing the log"):
        if mesh.rank == 0:
            log = EventLog(config.output.folder / LOG_FILE)
            for number, event in enumerate(events):
                seconds, parts = max(own[number] for own in everyones)
                log.emit("step", step=number + 1, loss=event["loss"], seconds=seconds, parts=parts)
            taken = sum(event["seconds"] for event in events)
            log.emit("end", status="done", step=len(events), seconds=taken, reason="")


if __name__ == "__main__":
    main(sys.argv[1:])
