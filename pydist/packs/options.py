"""Defines the options of a pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PackOptions:
    """Options that say how a folder is packed.

    Attributes:
        partition_bytes: size of a partition before compression, such as "1GB" or a number of bytes.
            A larger file has a partition that is as large as it is.
        partitions: their number, instead of their size.
        codec: compresses each file that gets smaller by it. Parts of a compressed file can't be
            read without the rest. Files over 1 GiB stay raw.
        item_size: bytes of one value in the files, such as 2 for int16, by which "blosc" sorts.
        order: of the files in the partitions. Where files of one class are in one folder, sorted
            partitions have few classes each.
        seed: of the shuffled order.
        broadcast: folders that all nodes need, such as "val": their files have partitions of their
            own, which `stage` copies to every node. `partitions` counts those of the other files.
    """

    partition_bytes: int | str = "1GB"
    partitions: int | None = None
    codec: Literal["raw", "zstd", "lz4", "blosc"] = "raw"
    item_size: int = 1
    order: Literal["shuffled", "sorted"] = "shuffled"
    seed: int = 0
    broadcast: tuple[str, ...] = ()
