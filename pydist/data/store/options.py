"""Defines the settings of a sample store, as a loader and a configuration file name them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydist.errors import UsageError
from pydist.parsing import byte_count

KINDS = ("off", "memory")
"""Possible values of `store`."""
CODECS = ("raw", "zstd", "lz4", "blosc")
"""Possible values of `store_codec`."""

MOST_READERS = 64
"""Largest number of threads that read files."""

LARGEST = 2**63 - 1
"""Bytes that mean a budget without limit."""


@dataclass(frozen=True)
class StoreOptions:
    """Settings of a sample store; sizes are numbers of bytes or text such as "4GB".

    Attributes:
        store: "off", or "memory" to keep samples.
        store_memory: bytes of blocks that this rank keeps in memory; None for no limit.
        store_disk: bytes of blocks that it writes to disk beyond that; None for no disk.
        store_folder: folder for them, on a disk of this machine.
        store_codec: compresses each block on disk that gets smaller by it.
        store_reuse: whether the blocks on disk stay for the next run.
        store_preload: whether to read all samples before the first batch.
    """

    store: str = "off"
    store_memory: int | str | None = None
    store_disk: int | str | None = None
    store_folder: str | Path | None = None
    store_codec: str = "raw"
    store_reuse: bool = False
    store_preload: bool = False

    @property
    def memory(self) -> int:
        """Bytes that may be in memory."""
        limit = self.store_memory
        return LARGEST if limit is None else _bytes_of("store_memory", limit)

    @property
    def disk(self) -> int:
        """Bytes that may be on disk, before compression."""
        return 0 if self.store_disk is None else _bytes_of("store_disk", self.store_disk)

    @property
    def folder(self) -> Path | None:
        """Folder that holds blocks on disk."""
        return None if self.store_folder is None else Path(self.store_folder)

    def check(self, table: str = "") -> None:
        """Checks that the settings are possible and suit each other.

        Args:
            table: comes before each name in messages, such as "data.".

        Raises:
            UsageError: they do not.
        """
        if self.store not in KINDS:
            raise UsageError(f"{self._given('store', table)}: possible are {', '.join(KINDS)}")
        if self.store_codec not in CODECS:
            found = self._given("store_codec", table)
            raise UsageError(f"{found}: possible are {', '.join(CODECS)}")
        for name, default in vars(StoreOptions()).items():
            if name != "store" and getattr(self, name) != default and self.store == "off":
                raise UsageError(
                    f"{self._given(name, table)} with {self._given('store', table)}: possible with "
                    f"{table}store = 'memory'"
                )
        for name in ("store_memory", "store_disk"):
            if (size := getattr(self, name)) is not None:
                _bytes_of(f"{table}{name}", size)
        self._check_disk(table)

    def _check_disk(self, table: str) -> None:
        if self.store_disk is None:
            for name in ("store_folder", "store_codec", "store_reuse"):
                if getattr(self, name) != getattr(StoreOptions(), name):
                    raise UsageError(
                        f"{self._given(name, table)} without {table}store_disk, the bytes that a "
                        "rank may write"
                    )
        elif self.store_folder is None:
            raise UsageError(
                f"{self._given('store_disk', table)} without {table}store_folder, a folder on a "
                "disk of this machine"
            )
        elif self.store_memory is None and not self.store_reuse:
            raise UsageError(
                f"{self._given('store_disk', table)} without {table}store_memory: all blocks would "
                f"stay in memory, and none be written; limit it, or set {table}store_reuse"
            )

    def _given(self, name: str, table: str) -> str:
        value = getattr(self, name)
        return f"{table}{name} = {str(value) if isinstance(value, Path) else value!r}"


def check_readers(readers: int, store: str, table: str = "") -> None:
    """Checks the number of threads that read files.

    Args:
        readers: the number.
        store: as `StoreOptions` has it.
        table: comes before each name in messages, such as "data.".

    Raises:
        UsageError: it is out of range, or there are several with a store.
    """
    if not 1 <= readers <= MOST_READERS:
        raise UsageError(f"{table}readers = {readers}: 1 to {MOST_READERS} threads are possible")
    if readers > 1 and store != "off":
        raise UsageError(
            f'{table}readers = {readers} with {table}store = "{store}": a store reads files in one '
            "thread, and in the first epoch alone; 1 is possible"
        )


def _bytes_of(name: str, size: int | str) -> int:
    """Returns a size in bytes; raises `UsageError` if it is none."""
    try:
        if isinstance(size, str):
            return byte_count(size)
        if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= LARGEST:
            return size
    except ValueError as error:
        raise UsageError(f"{name} = {size!r}: {error}") from None
    raise UsageError(f"{name} = {size!r}: a number of bytes >= 1, or text such as '4GB'")
