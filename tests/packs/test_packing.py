"""Tests of packing: what is refused and why, what is repeated, and what stays whole."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pydist import owner
from pydist._loader import native
from pydist.data.lock import FolderLock
from pydist.errors import DataError, DiskError, UsageError
from pydist.packs import PackFileSystem, PackOptions, pack, verify
from pydist.packs.writing import parts_by_bytes
from support.jobs.children import child_environment
from support.trees import found


def one_line(error: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    text = str(error.value)
    assert len(text.splitlines()) == 1
    for part in parts:
        assert part in text


def test_links_to_files_inside_are_packed_as_files(source: Path, tmp_path: Path) -> None:
    (source / "link").symlink_to("train/cat/3.txt")
    (source / "train" / "absolute").symlink_to(source / "link")
    pack(source, tmp_path / "pack")
    files = PackFileSystem(tmp_path / "pack")
    assert files.cat("link") == files.cat("train/absolute") == files.cat("train/cat/3.txt")
    assert files.info("link")["type"] == "file"


def hostile_links(source: Path, outside: Path) -> dict[str, tuple[Path, str]]:
    outside.write_text("secret")
    return {
        "out": (outside, "out of the folder"),
        "out by dots": (Path("../outside"), "out of the folder"),
        "folder": (source / "train", "to what is not a file"),
        "root": (source, "out of the folder"),
        "nothing": (source / "none", "leads nowhere"),
        "circle": (source / "circle", "leads nowhere"),
    }


@pytest.mark.parametrize("name", ["out", "out by dots", "folder", "root", "nothing", "circle"])
def test_other_links_are_refused_by_name(source: Path, tmp_path: Path, name: str) -> None:
    target, reason = hostile_links(source, tmp_path / "outside")[name]
    (source / name).symlink_to(target)
    with pytest.raises(DataError) as error:
        pack(source, tmp_path / "pack")
    one_line(error, str(source / name), "a symbolic link", reason)
    assert not (tmp_path / "pack").exists()


def test_what_is_no_file_is_refused_by_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(source / "train" / "pipe\n")
    with pytest.raises(DataError) as error:
        pack(source, tmp_path / "pack")
    one_line(error, "train/pipe\\n: a pipe; a pack has files and folders alone")
    (source / "train" / "pipe\n").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(source)  # the names of sockets are short
        server.bind("sock")
        with pytest.raises(DataError, match="sock: a socket"):
            pack(source, tmp_path / "pack")


def test_a_source_that_is_missing_or_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: No such file or directory"):
        pack(tmp_path / "none", tmp_path / "pack")
    with pytest.raises(DataError, match=r"large.bin: not a folder"):
        pack(source / "large.bin", tmp_path / "pack")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_named(source: Path, tmp_path: Path) -> None:
    (source / "large.bin").chmod(0)
    with pytest.raises(DataError, match=r"large.bin: Permission denied"):
        pack(source, tmp_path / "pack")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PackOptions(codec="gzip"), "codec gzip: choose raw, zstd, lz4 or blosc"),  # type: ignore[arg-type]
        (PackOptions(order="random"), "order='random': shuffled or sorted"),  # type: ignore[arg-type]
        (PackOptions(partitions=0), "partitions=0: from 1 to 4096"),
        (PackOptions(partitions=5000), "partitions=5000: from 1 to 4096"),
        (PackOptions(partition_bytes="1 parsec"), "partition_bytes='1 parsec': a size is expected"),
        (PackOptions(partition_bytes=0), "partition_bytes=0: at least 1"),
        (PackOptions(partition_bytes=10), "at most 4096; choose partition_bytes of"),
        (PackOptions(item_size=2), "item_size=2 with codec='raw': for blosc"),
        (PackOptions(codec="blosc", item_size=256), "item_size=256: from 1 to 255 bytes"),
        (PackOptions(seed=-1), "seed=-1: a number from 0"),
    ],
)
def test_impossible_options_are_refused(
    source: Path, tmp_path: Path, options: PackOptions, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        pack(source, tmp_path / "pack", options)
    one_line(error, message)
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("inside", ["", "train", "new/pack"])
def test_a_pack_is_not_made_inside_of_its_source(source: Path, inside: str) -> None:
    before = found(source)
    with pytest.raises(UsageError, match="inside of"):
        pack(source, source / inside)
    assert found(source) == before


def test_a_folder_with_other_files_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "precious").write_text("mine")
    with pytest.raises(UsageError, match=r"other files, such as 'precious'"):
        pack(source, tmp_path / "pack")
    assert (tmp_path / "pack" / "precious").read_text() == "mine"
    with pytest.raises(UsageError, match="other files"):
        pack(source, tmp_path)  # the source's own parent


def test_the_same_pack_is_kept_and_another_one_refused(source: Path, packed: Path) -> None:
    before = found(packed)
    seen: list[str] = []
    pack(source, packed, progress=lambda done, total, what: seen.append(what))
    assert not seen
    after = found(packed)
    assert {path: after[path] for path in after if path != "."} == {
        path: before[path] for path in before if path != "."
    }
    with pytest.raises(UsageError, match="has a pack of other files or with other options"):
        pack(source, packed, PackOptions(seed=1))
    (source / "large.bin").write_bytes(b"new")
    with pytest.raises(UsageError, match="has a pack of other files or with other options"):
        pack(source, packed)
    assert verify(packed) == []


def test_what_a_killed_run_left_is_replaced(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    folder.mkdir()
    code = "import os, sys; from pydist import owner; from pathlib import Path\n"
    code += "owner.temporary(Path(sys.argv[1]) / '.part-00000.pack').write_bytes(b'half')"
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], check=True, env=child_environment(), timeout=60
    )
    for number in (0, 1, 77):
        (folder / native.partition_name(number)).write_bytes(b"whole")
    for name in (".part-00001.pack", ".index.pdx"):  # by a process on another node
        (folder / f"{name}.tmp-00000000-1abc-2def-0123abcd").write_bytes(b"half")
    assert len(list(folder.iterdir())) == 6
    pack(source, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["index.pdx", "part-00000.pack"]
    assert verify(folder) == []


def test_what_another_left_and_nobody_may_remove(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack").mkdir()
    left = tmp_path / "pack" / ".part-00000.pack.tmp-00000000-1abc-2def-0123abcd"
    left.write_bytes(b"half")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(owner, "remove", refuse)
    with pytest.raises(DiskError, match="pack: Operation not permitted"):
        pack(source, tmp_path / "pack")


def test_a_second_writer_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pack"
    folder.mkdir()
    with FolderLock(folder), pytest.raises(UsageError, match="is in use"):
        pack(source, folder)
    assert not list(folder.iterdir())
    pack(source, folder)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("change", ["grow", "shrink", "touch", "remove", "pipe"])
def test_a_source_that_changes_is_refused(
    source: Path, tmp_path: Path, change: str, codec: str
) -> None:
    victim = source / "val" / "dog" / "4.txt"

    def meddle(done: int, total: int, what: str) -> None:
        if not victim.exists() or victim.is_fifo() or victim.stat().st_mtime == 1:
            return
        if change == "touch":
            os.utime(victim, (1, 1))
        elif change in ("remove", "pipe"):
            victim.unlink()
            if change == "pipe":
                os.mkfifo(victim)
        else:
            text = victim.read_text()
            victim.write_text(text + "x" if change == "grow" else text[1:])
            os.utime(victim, (1, 1))

    options = PackOptions(order="sorted", codec=codec)  # type: ignore[arg-type]
    with pytest.raises(DataError) as error:
        pack(source, tmp_path / "pack", options, meddle)
    one_line(error, "val/dog/4.txt: ")
    assert list((tmp_path / "pack").iterdir()) == []


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    # The limit of a process's files has the effect of a full disk on one write.
    code = """
import resource, signal, sys
from pydist.packs import pack
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
pack(sys.argv[1], sys.argv[2])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "pack")],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "DiskError" in done.stderr
    assert "File too large" in done.stderr
    assert list((tmp_path / "pack").iterdir()) == []


def test_too_little_space_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"__iter__": lambda self: iter((10**9, 0, 1000))})()
    monkeypatch.setattr("pydist.data.publish.shutil.disk_usage", lambda path: usage)
    with pytest.raises(DiskError, match="bytes are needed and 1000 are free"):
        pack(source, tmp_path / "pack")


def test_the_order_is_that_of_the_seed(source: Path, tmp_path: Path) -> None:
    def order(name: str, options: PackOptions) -> list[str]:
        pack(source, tmp_path / name, options)
        files = PackFileSystem(tmp_path / name)
        return sorted(files.find(""), key=lambda path: files.entry(path).offset)

    one = order("a", PackOptions(seed=1))
    assert one == order("b", PackOptions(seed=1))
    assert one != order("c", PackOptions(seed=2))
    assert order("d", PackOptions(order="sorted")) == sorted(one) != one


def test_parts_are_balanced_and_in_order() -> None:
    sizes = [10] * 100
    assert Counter(parts_by_bytes(sizes, 4)) == dict.fromkeys(range(4), 25)
    assert parts_by_bytes([0, 0, 0], 3) == [0, 0, 0]
    assert parts_by_bytes([1000, 1, 1], 2) == [0, 1, 1]


def test_only_what_gets_smaller_is_compressed(source: Path, tmp_path: Path) -> None:
    origin = pack(source, tmp_path / "pack", PackOptions(codec="zstd"))
    files = PackFileSystem(tmp_path / "pack")
    assert files.entry("large.bin").codec == "raw"  # noise
    assert files.entry("train/cat/4.txt").codec == "zstd"
    assert files.entry("train/cat/0.txt").codec == "raw"
    assert files.info("train/cat/4.txt")["size"] == len(files.cat("train/cat/4.txt"))
    stored = sum(files.entry(path).stored_size for path in files.find(""))
    assert origin["stored_bytes"] == stored < origin["bytes"]


def test_progress_counts_bytes(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    pack(source, tmp_path / "pack", progress=lambda *event: told.append(event))
    total = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert told[-1][:2] == (total, total)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert {what for _, _, what in told} == set(PackFileSystem(tmp_path / "pack").find(""))


def test_a_deep_folder_is_packed(tmp_path: Path) -> None:
    deep = tmp_path / "source" / "/".join(["d" * 100] * 30)
    deep.mkdir(parents=True)
    (deep / "file").write_text("bottom")
    pack(tmp_path / "source", tmp_path / "pack")
    path = "/".join(["d" * 100] * 30 + ["file"])
    assert PackFileSystem(tmp_path / "pack").cat(path) == b"bottom"
    assert PackFileSystem(tmp_path / "pack").find("") == [path]


def test_the_source_may_be_a_link_and_paths_relative(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("source")
    Path("link/inner").symlink_to("large.bin")
    pack("link", "pack")
    assert PackFileSystem("pack").info("inner")["size"] == 3 << 20
