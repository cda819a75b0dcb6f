"""Tests of damaged packs: every changed byte that belongs to a file or a header is found."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from pydist._loader import native
from pydist.errors import DataError, UsageError
from pydist.packs import PackFiles, PackFileSystem, PackOptions, pack, verify
from support.data.damage import flip


@pytest.mark.parametrize("codec", ["raw", "zstd", "lz4"])
def test_damaged_files_are_named(source: Path, tmp_path: Path, codec: str) -> None:
    folder = tmp_path / "pack"
    pack(source, folder, PackOptions(codec=codec, partitions=3))  # type: ignore[arg-type]
    files = PackFileSystem(folder)
    entries = {name: files.entry(name) for name in files.find("")}
    rng = np.random.default_rng(1)
    for name in rng.choice(sorted(entries), 8, replace=False):
        entry = entries[name]
        partition = folder / native.partition_name(entry.partition)
        at = entry.offset + int(rng.integers(entry.stored_size))
        flip(partition, at)
        (fault,) = verify(folder)
        assert f"{name}: damaged: " in fault
        with pytest.raises(DataError, match="damaged"):
            files.cat_file(name)
        flip(partition, at)
    assert verify(folder) == []


def test_partitions_that_are_missing_cut_short_or_of_another_pack_are_named(
    source: Path, tmp_path: Path
) -> None:
    folder, other = tmp_path / "pack", tmp_path / "other"
    for each in (folder, other):
        pack(source, each, PackOptions(partitions=3))
    first, second, third = (folder / native.partition_name(number) for number in range(3))
    first.unlink()
    os.truncate(second, second.stat().st_size - 1)
    third.write_bytes((other / third.name).read_bytes())
    faults = verify(folder)
    assert [fault.split(": ")[0] for fault in faults] == [str(p) for p in (first, second, third)]
    assert "No such file" in faults[0]
    assert "bytes of" in faults[1]
    assert "belongs to another pack" in faults[2]
    files = PackFiles(folder)
    for index in range(len(files)):
        with pytest.raises(DataError):
            files[index]


def test_a_damaged_index_is_refused(packed: Path) -> None:
    index = packed / native.PACK_INDEX
    size = index.stat().st_size
    for at in [*range(0, 128, 5), *range(128, size, 97), size - 1]:
        flip(index, at)
        with pytest.raises(DataError, match=r"index\.pdx: "):
            verify(packed)
        flip(index, at)
    assert verify(packed) == []
    os.truncate(index, 0)
    with pytest.raises(DataError, match=r"index\.pdx: empty"):
        PackFileSystem(packed)


def test_too_many_open_files_are_said(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for number in range(60):
        (tmp_path / "source" / str(number)).write_bytes(b"x")
    pack(tmp_path / "source", tmp_path / "pack", PackOptions(partitions=60))
    files = PackFiles(tmp_path / "pack")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sorted(int(path.name) for path in Path("/dev/fd").iterdir())
    free = [number for number in range(used[-1] + 60) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[30], hard))
    try:
        with pytest.raises(UsageError, match=r"too many open files \(ulimit -n\).* 60 partitions"):
            list(files)
        with pytest.raises(UsageError, match="too many open files"):  # no list of damaged files
            verify(tmp_path / "pack")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(files)) == 60


def test_names_in_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    name = os.fsencode(tmp_path / "source") + b"/line\n\xff\x1b[31m"
    with open(name, "wb") as file:  # noqa: PTH123 -- its path is bytes
        file.write(b"content")
    pack(tmp_path / "source", tmp_path / "pack")
    flip(tmp_path / "pack" / "part-00000.pack", 64)
    (fault,) = verify(tmp_path / "pack")
    assert r"line\x0a\xff\x1b[31m: damaged" in fault
    with pytest.raises(FileNotFoundError):
        PackFileSystem(tmp_path / "pack").info("line")
