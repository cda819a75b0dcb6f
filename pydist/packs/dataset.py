"""Gives torch the files of a pack as a data set."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from pydist.errors import DataError
from pydist.packs.servers import open_pack

Decode = Callable[[str, bytes], Any]


class PackFiles(Dataset[Any]):
    """Data set whose samples are the files of a pack, in the order of their paths.

    An item is (path, content), or what `decode` returns for them; contents are compared with their
    checksums. Can be pickled and used by forked or spawned workers of a `DataLoader`, which share
    the memory of the index.

    Args:
        folder: the pack's folder.
        decode: called with a file's path in the pack and its content.
        under: a folder of the pack, for the files below it alone.
        suffixes: for files whose names end in it, or in one of them, alone, such as ".jpg" or
            (".jpg", ".png").

    Raises:
        DataError: there is no pack or no such folder in it, or it is damaged; later also by reads.
    """

    def __init__(
        self,
        folder: str | Path,
        decode: Decode | None = None,
        *,
        under: str = "",
        suffixes: str | tuple[str, ...] = (),
    ) -> None:
        self.folder = Path(folder).absolute()
        self.decode = decode
        self._pack = open_pack(folder)
        start = self._pack.find(os.fsencode(under.strip("/")))
        if start is None:
            raise DataError(f"{folder}: the pack has no folder {under!r}")
        numbers = self._pack.files(start)
        if suffixes:
            given = (suffixes,) if isinstance(suffixes, str) else suffixes
            ends = tuple(os.fsencode(suffix) for suffix in given)
            numbers = [n for n in numbers if self._pack.entry(n).name.endswith(ends)]
        self._numbers = np.array(numbers, np.uint32)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        number = int(self._numbers[operator.index(index)])
        path, content = os.fsdecode(self._pack.path(number)), self._pack.read(number)
        return (path, content) if self.decode is None else self.decode(path, content)

    def path(self, index: int) -> str:
        """Returns the path of an item's file in the pack."""
        return os.fsdecode(self._pack.path(int(self._numbers[index])))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pack": self._pack.id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pack = open_pack(state["folder"])
        if pack.id != state["_pack"]:
            raise DataError(f"{state['folder']}: the pack was replaced by another one")
        self.__dict__.update({**state, "_pack": pack})
