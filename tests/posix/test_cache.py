"""Tests of the copies that stay in memory after a packed file was opened."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.cli.mounting import mounted
from pydist.packs import PackOptions, pack

SIZES = {"a": 10_000, "b": 5_000, "c": 20_000, "empty": 0, "program": 30}
READ = """
import os, sys
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        found = os.fstat(file.fileno())
        print(name, len(file.read()), found.st_nlink, oct(found.st_mode), found.st_ino)
    assert os.stat(name).st_ino == found.st_ino
    for flags in (os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        try:
            os.open(name, flags)
        except OSError as error:
            assert error.strerror == "Read-only file system", error
"""


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    for name, size in SIZES.items():
        (tmp_path / "source" / name).write_bytes(os.urandom(size // 2) + bytes(size - size // 2))
    (tmp_path / "source" / "program").write_bytes(b"#!/bin/sh\necho a program\n")
    (tmp_path / "source" / "program").chmod(0o755)
    pack(tmp_path / "source", tmp_path / "packs", PackOptions(codec="zstd"))
    return tmp_path / "packs"


def kept(folder: str) -> list[int]:
    """Returns the sizes of the copies."""
    return sorted(path.stat().st_size for path in Path(folder).glob("f*"))


def taken(folder: str) -> int:
    return int.from_bytes(Path(folder, "taken").read_bytes(), sys.byteorder)


@pytest.mark.parametrize(
    ("cache", "sizes"),
    [
        ("1MiB", [0, 5_000, 10_000, 20_000]), ("30kB", [0, 5_000, 10_000]), ("1B", [0]), ("0", []),
    ],
)  # fmt: skip
def test_all_processes_share_copies_up_to_a_limit(
    packed: Path, cache: str, sizes: list[int]
) -> None:
    mount = packed.with_name("mount")
    with mounted(str(mount), str(packed), cache=cache) as environment:
        folder = environment["PYDIST_MOUNT_FOLDERS"]
        command = ["sh", "-c", f'umask 077; cd {mount} && ./program && exec "$@"', "sh"]
        command += [sys.executable, "-c", READ, *SIZES]
        first, again = [
            subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
            for _ in range(2)
        ]
        assert first == again
        assert first.splitlines()[0] == b"a program"
        found = [line.split()[1] for line in first.decode().splitlines()[1:]]
        assert list(map(int, found))[:4] == list(SIZES.values())[:4]
        assert kept(folder) == sizes
        assert taken(folder) == sum(-(-size // 4096) * 4096 for size in sizes)
    assert not Path(folder).exists()


@pytest.mark.parametrize(("free", "limit"), [(64 << 20, 32 << 20), (5 << 30, 1 << 30)])
def test_half_of_a_small_shared_memory_is_left_to_programs(
    packed: Path, free: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(packed)._replace(free=free)
    monkeypatch.setattr("pydist.cli.mounting.shutil.disk_usage", lambda folder: usage)
    with mounted("/nowhere/data", str(packed)) as environment:
        assert environment["PYDIST_MOUNT_CACHE"] == str(limit)
    with mounted("/nowhere/data", str(packed), cache="2GiB") as environment:
        assert environment["PYDIST_MOUNT_CACHE"] == str(2 << 30)


def test_damaged_file_is_not_kept(packed: Path) -> None:
    mount = packed.with_name("mount")
    part = packed / "part-00000.pack"
    content = bytearray(part.read_bytes())
    content[64:] = bytes(byte ^ 1 for byte in content[64:])
    part.write_bytes(content)
    with mounted(str(mount), str(packed)) as environment:
        ended = subprocess.run(
            ["cat", mount / "a"], env=environment, check=False, capture_output=True, text=True
        )
        assert "damaged: its stored bytes do not match their checksum" in ended.stderr
        assert "Input/output error" in ended.stderr
        assert kept(environment["PYDIST_MOUNT_FOLDERS"]) == []
        assert taken(environment["PYDIST_MOUNT_FOLDERS"]) == 0
