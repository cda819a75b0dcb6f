"""The operations that are killed: what each does, and what holds after a kill and after a run."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from pydist.comm import run_local
from pydist.data import Manifest, ShardDataset, UniverseOptions, generate_universes
from pydist.data.convert import convert_dataset
from pydist.data.index import index_dataset
from pydist.data.info import deep_faults
from pydist.data.lock import FILE_NAME as LOCK
from pydist.data.manifest import FILE_NAME as MANIFEST
from pydist.data.options import ConvertOptions, IndexOptions
from pydist.owner import remove
from pydist.packs import PackFileSystem, PackOptions, pack, stage
from pydist.packs.staging import RECORD
from pydist.packs.verifying import is_pack, verify
from support.jobs.programs import spilling
from support.trees import found


class Operation(ABC):
    """An operation on a folder, which is repeated until it completes.

    Args:
        base: an empty folder for its source and its `folder`.
    """

    name: ClassVar[str]

    def __init__(self, base: Path) -> None:
        self.folder = base / "made"
        self.folder.mkdir(parents=True)

    @property
    def way(self) -> int:
        """Number of the options that the next runs have."""
        return self._way

    _way = 0

    @abstractmethod
    def work(self) -> Any:
        """Runs it once, in a child process; returns what `completed` compares."""

    @abstractmethod
    def check(self) -> str:
        """Checks what a kill has left, and returns in a word how far it came."""

    @abstractmethod
    def completed(self, result: Any) -> None:
        """Checks what a run has made that was not killed."""

    def start_anew(self) -> None:
        """Removes what is complete, by default a pack, and keeps all else that kills have left."""
        if is_pack(self.folder):
            for path in self.folder.iterdir():
                path.unlink()


class Packing(Operation):
    """Operation that packs 120 files into 6 partitions, as `pydist data pack` does."""

    name = "pack"

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._source = base / "source"
        random = np.random.default_rng(3)
        for number in range(120):
            path = self._source / f"class{number % 6}" / f"{number}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = int(random.integers(1, 60_000))
            path.write_bytes(random.integers(0, 4, size, np.uint8).tobytes())

    def work(self) -> Any:
        pack(self._source, self.folder, PackOptions(partitions=6, codec="zstd"))

    def check(self) -> str:
        if is_pack(self.folder):
            assert verify(self.folder) == []
            return "index"
        names = {path.name for path in self.folder.iterdir()} - {LOCK}
        if any(name.startswith("part-") for name in names):
            return "partitions"
        return "temporary files" if names else "nothing"

    def completed(self, result: Any) -> None:
        assert verify(self.folder) == []
        assert sum(not name.name.startswith("part-") for name in self.folder.iterdir()) == 1
        extracted = self.folder.with_name("extracted")
        PackFileSystem(self.folder).get("", str(extracted), recursive=True)
        assert found(extracted) == found(self._source)
        shutil.rmtree(extracted)


class Staging(Operation):
    """Operation that copies the partitions of one node of three, as `pydist data stage` does."""

    name = "stage"

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        packing = Packing(base / "packing")
        packing.work()
        self._pack = packing.folder

    def work(self) -> Any:
        return stage(self._pack, self.folder, 0, 3, copies=2)

    def check(self) -> str:
        parts = list(self.folder.glob("*.pack"))
        for path in parts:
            assert path.read_bytes() == (self._pack / path.name).read_bytes()
        if is_pack(self.folder):
            assert len(parts) == 4
            return "index"
        return f"{len(parts)} partitions"

    def completed(self, result: Any) -> None:
        assert self.check() == "index"
        others = {path.name for path in self.folder.iterdir() if not path.name.startswith("part-")}
        assert RECORD in others
        assert len(others) == 2  # and the index
        assert result == [0, 2, 3, 5]


class _OfUniverses(Operation):
    """An operation that makes a data set of 8 universes, in one of two ways."""

    workers: ClassVar[int] = 1

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._source = base / "source"
        options = UniverseOptions(count=8, width=8, layout="cosmoflow", validation=0.25)
        generate_universes(self._source, options)
        whole = ShardDataset(self._source)
        self._samples = [whole[number] for number in range(len(whole))]

    def check(self) -> str:
        # At any instant the manifest is a whole one: of this run, or of an earlier one.
        if not (self.folder / MANIFEST).exists():
            return "no manifest"
        assert deep_faults(self.folder) == []
        return "manifest"

    def completed(self, result: Any) -> None:
        assert deep_faults(self.folder) == []
        manifest = Manifest.load(self.folder)
        made = ShardDataset(self.folder)
        assert len(made) == len(self._samples)
        for number, expected in enumerate(self._samples):
            torch.testing.assert_close(made[number], expected, rtol=0, atol=0)
        # Nothing is left of all runs but the data set, and the table of the one before.
        kept = {MANIFEST, manifest_table(self.folder), *(file.path for file in manifest.files)}
        left = {path.name for path in self.folder.iterdir()} - kept
        assert len(left) <= 1, left
        assert all(name.endswith(".index") for name in left), left

    def start_anew(self) -> None:
        (self.folder / MANIFEST).unlink(missing_ok=True)
        self._way = 1 - self._way


class Indexing(_OfUniverses):
    """Operation that indexes in place, as `pydist data index` does, with statistics or without."""

    name = "index"

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        for path in self._source.glob("*.hdf5"):
            shutil.copy(path, self.folder)
        self._digests: dict[int, str] = {}

    def work(self) -> Any:
        options = IndexOptions(width=8, validation=0.25, statistics=self.way == 0)
        return index_dataset(self.folder, options, overwrite=True, workers=self.workers).digest

    def completed(self, result: Any) -> None:
        super().completed(result)
        assert self._digests.setdefault(self.way, result) == result


class Converting(_OfUniverses):
    """Operation that converts to NumPy and HDF5 by turns, as `pydist data convert` does."""

    name = "convert"
    _WAYS = (
        ConvertOptions("numpy", overwrite=True),
        ConvertOptions("hdf5", "channel-first", (4, 4, 4), compression="gzip", overwrite=True),
        ConvertOptions("hdf5", "channel-first", overwrite=True),  # the same names
    )

    def work(self) -> Any:
        convert_dataset(self._source, self.folder, self._WAYS[self.way], workers=self.workers)

    def completed(self, result: Any) -> None:
        super().completed(result)
        assert Manifest.load(self.folder).file_format == self._WAYS[self.way].format

    def start_anew(self) -> None:
        # Over what is there, complete or not; or from nothing.
        self._way = (self._way + 1) % len(self._WAYS)
        if self._way == 0:
            for path in self.folder.iterdir():
                remove(path)


class IndexingByTwo(Indexing):
    """Operation that indexes by two more processes, which must not outlive the killed one."""

    name = "index by two"
    workers = 2


class ConvertingByTwo(Converting):
    """Operation that converts by two more processes; half-written files are theirs."""

    name = "convert by two"
    workers = 2


class Spilling(Operation):
    """Training input with blocks on disk, which the next run reads; by 2 ranks."""

    name = "spill"

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._expected = run_local(spilling.work, 2, None)

    def work(self) -> Any:
        before = self._packs()
        return run_local(spilling.work, 2, self.folder), before

    def check(self) -> str:
        return f"{self._packs()} packs"

    def completed(self, result: Any) -> None:
        batches, before = result
        assert [each[0] for each in batches] == [each[0] for each in self._expected]
        if before == 2:  # the blocks of the run before were enough
            assert [each[1] for each in batches] == [0, 0]
        assert self._packs() == 2

    def start_anew(self) -> None:
        for made in filter(is_pack, self.folder.iterdir()):
            for path in made.iterdir():
                path.unlink()

    def _packs(self) -> int:
        packs = [path for path in self.folder.iterdir() if is_pack(path)]
        for path in packs:
            assert verify(path) == []
        return len(packs)


def manifest_table(folder: Path) -> str:
    """Returns the name of the table of files of a data set."""
    name = json.loads((folder / MANIFEST).read_text())["files"]
    assert isinstance(name, str)
    return name


_ALL = (Packing, Staging, Spilling, Converting, ConvertingByTwo, Indexing, IndexingByTwo)

OPERATIONS: dict[str, Callable[[Path], Operation]] = {each.name: each for each in _ALL}
