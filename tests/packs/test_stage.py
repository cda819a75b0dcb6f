"""Tests of staging: which partitions a node gets, what is refused, and what a killed run leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from pydist._loader import native
from pydist.cli.main import main
from pydist.cli.mounting import mounted
from pydist.data.lock import FolderLock
from pydist.errors import DataError, DiskError, UsageError
from pydist.packs import PackFiles, PackFileSystem, PackOptions, pack, serve, stage, verify
from pydist.packs.staging import RECORD
from support.data.damage import flip
from support.jobs.children import child_environment
from support.killed.children import in_child
from support.trees import found

INDEX = native.PACK_INDEX


@pytest.fixture
def six(source: Path, tmp_path: Path) -> Path:
    """Makes a pack of six partitions, and two more for the files below `val`."""
    options = PackOptions(partitions=6, partition_bytes=1500, broadcast=("val/",))
    pack(source, tmp_path / "six", options)
    assert native.PackFolder(os.fsencode(tmp_path / "six")).partitions == 8
    return tmp_path / "six"


def parts_in(folder: Path) -> list[int]:
    """Returns the partitions in a folder, which has the index and nothing else beside them."""
    names = {path.name for path in folder.iterdir()} - {INDEX, RECORD}
    parts = [int(name.removeprefix("part-").removesuffix(".pack")) for name in names]
    assert names == {native.partition_name(part) for part in parts}
    assert (folder / INDEX).exists()
    return sorted(parts)


def copies_in(folder: Path) -> list[Path]:
    """Returns the index and the partitions in a folder, which has the list of partitions, too."""
    found = list(folder.iterdir())
    found.remove(folder / RECORD)
    return found


@pytest.mark.parametrize(
    ("nodes", "copies", "expected"),
    [
        (1, 1, [[0, 1, 2, 3, 4, 5]]),
        (2, 1, [[0, 2, 4], [1, 3, 5]]),
        (2, 2, [[0, 1, 2, 3, 4, 5]] * 2),
        (3, 2, [[0, 2, 3, 5], [0, 1, 3, 4], [1, 2, 4, 5]]),
        (4, 1, [[0, 4], [1, 5], [2], [3]]),
        (4, 3, [[0, 2, 3, 4], [0, 1, 3, 4, 5], [0, 1, 2, 4, 5], [1, 2, 3, 5]]),
        (8, 1, [[0], [1], [2], [3], [4], [5], [], []]),
    ],
)
def test_partitions_of_each_node(
    source: Path, tmp_path: Path, nodes: int, copies: int, expected: list[list[int]]
) -> None:
    pack(source, tmp_path / "pack", PackOptions(partitions=6))
    for node in range(nodes):
        folder = tmp_path / f"node{node}"
        assert stage(tmp_path / "pack", folder, node, nodes, copies=copies) == expected[node]
        assert parts_in(folder) == expected[node]
        for path in copies_in(folder):
            assert path.read_bytes() == (tmp_path / "pack" / path.name).read_bytes()


def test_files_below_broadcast_folders_have_partitions_of_their_own(
    source: Path, six: Path, tmp_path: Path
) -> None:
    files = PackFileSystem(six)
    for name in files.find(""):
        assert (files.entry(name).partition >= 6) == name.startswith("val/")
    made = found(six)
    pack(source, six, PackOptions(partitions=6, partition_bytes=1500, broadcast=("val", "val")))
    assert found(six) == {**made, ".": found(six)["."]}  # the same options: it is kept
    with pytest.raises(UsageError, match="or with other options"):
        pack(source, six, PackOptions(partitions=6, partition_bytes=1500))
    for name in ("none", "", "large.bin", "val/cat/0.txt"):
        with pytest.raises(DataError, match=f"source: no folder '{name}' in it$"):
            pack(source, tmp_path / "other", PackOptions(broadcast=("train", name)))
    pack(source, tmp_path / "all", PackOptions(broadcast=("train", "val/cat", "val")))
    assert verify(tmp_path / "all") == []


def test_every_node_has_the_broadcast_folders(six: Path, tmp_path: Path) -> None:
    assert stage(six, tmp_path / "a", 1, 3) == [1, 4, 6, 7]
    files = PackFileSystem(six)
    wanted = {files.entry(f"train/cat/{number}.txt").partition for number in range(5)}
    node = (min(wanted) + 1) % 3
    chosen = stage(six, tmp_path / "b", node, 3, broadcast=["train/cat/", "val/dog"])
    assert chosen == parts_in(tmp_path / "b") == sorted({node, node + 3, 6, 7} | wanted)
    for name in ("none", "", "large.bin"):
        with pytest.raises(DataError, match=f"six: the pack has no folder '{name}'$"):
            stage(six, tmp_path / "c", 1, 3, broadcast=[name])
    assert not (tmp_path / "c").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="packs are served on Linux alone")
@pytest.mark.parametrize("copies", [1, 2])
def test_each_node_reads_all_files_without_the_pack(
    source: Path, six: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    folders = [tmp_path / f"node{node}" for node in range(3)]
    for node, folder in enumerate(folders):
        stage(six, folder, node, 3, copies=copies)
    shutil.rmtree(six)
    expected = {
        str(path.relative_to(source)): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file()
    }
    monkeypatch.setenv("PYDIST_PACKS_SECRET", "a secret of this test")
    servers = [serve(folder, f"{tmp_path}/socket{node}") for node, folder in enumerate(folders)]
    assert [server.partitions for server in servers] == [2 * copies + 2] * 3
    monkeypatch.setenv("PYDIST_PACKS_SERVERS", ",".join(server.address for server in servers))
    for node, folder in enumerate(folders):
        before = [server.requests for server in servers]
        assert dict(PackFiles(folder)) == expected
        assert verify(folder) == []
        assert servers[node].requests == before[node]  # its own copy comes first
        with mounted("/pydist-staged", str(folder)) as environment:
            script = "cd /pydist-staged && find . -type f -print0 | sort -z | xargs -0 cat"
            program = ["bash", "-c", script]
            seen = subprocess.run(
                program,
                env={**environment, "LC_ALL": "C"},
                check=True,
                capture_output=True,
                timeout=60,
            )
        assert seen.stdout == b"".join(expected[name] for name in sorted(expected))
    if copies == 2:  # any server that has it: one node is lost
        del servers[0]
        assert dict(PackFiles(folders[1])) == dict(PackFiles(folders[2])) == expected


def test_too_little_space_is_said_before_anything_is_written(
    six: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"__iter__": lambda self: iter((10**9, 0, 1000))})()
    monkeypatch.setattr("pydist.data.publish.shutil.disk_usage", lambda path: usage)
    needed = (six / INDEX).stat().st_size
    needed += sum((six / native.partition_name(part)).stat().st_size for part in (0, 3, 6, 7))
    with pytest.raises(DiskError, match=f"node: {needed} bytes are needed and 1000 are free$"):
        stage(six, tmp_path / "node", 0, 3)
    assert not list((tmp_path / "node").iterdir())


def test_killed_at_each_step_the_next_run_completes(six: Path, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    work = partial(stage, six, folder, 0, 3)
    kills = 0
    for step in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        if not in_child(work, folder, step=step).killed:
            break
        kills += 1
        whole = {path: path.stat().st_ino for path in folder.glob("*.pack")}
        assert len(whole) == 4 or not (folder / INDEX).exists()
        assert stage(six, folder, 0, 3) == parts_in(folder) == [0, 3, 6, 7]
        assert {path: path.stat().st_ino for path in whole} == whole  # not copied again
        for path in copies_in(folder):
            assert path.read_bytes() == (six / path.name).read_bytes()
    assert kills > 10


def test_only_what_is_missing_is_copied(six: Path, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    told: list[tuple[int, int, str]] = []
    stage(six, folder, 0, 3, progress=lambda *event: told.append(event))
    copied = [path.stat().st_size for path in copies_in(folder)]
    assert told[-1][:2] == (sum(copied), sum(copied))
    assert {name for _, _, name in told} == {path.name for path in copies_in(folder)}
    told.clear()
    stage(six, folder, 0, 3, progress=lambda *event: told.append(event))
    assert not told
    stage(six, folder, 0, 3, copies=2, progress=lambda *event: told.append(event))
    assert {name for _, _, name in told} == {INDEX, "part-00002.pack", "part-00005.pack"}
    assert parts_in(folder) == [0, 2, 3, 5, 6, 7]
    stage(six, folder, 1, 3)  # what it has beside its own stays
    assert parts_in(folder) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert verify(folder) == []


def test_a_damaged_partition_is_named_and_not_staged(six: Path, tmp_path: Path) -> None:
    files = PackFileSystem(six)
    entry = files.entry("train/cat/4.txt")
    damaged = six / native.partition_name(entry.partition)
    flip(damaged, entry.offset + 7)
    node = entry.partition % 3
    with pytest.raises(DataError) as error:
        stage(six, tmp_path / "node", node, 3)
    said = f"{damaged}: damaged: train/cat/4.txt does not match its checksum"
    assert str(error.value) == said
    assert not (tmp_path / "node" / damaged.name).exists()
    assert {path.name for path in (tmp_path / "node").iterdir()} <= {
        native.partition_name(part) for part in (node, node + 3, 6, 7)
    }
    stage(six, tmp_path / "other", (node + 1) % 3, 3)  # the others are not
    os.truncate(damaged, damaged.stat().st_size - 1)
    with pytest.raises(DataError, match=f"{damaged.name}: damaged: it has .* bytes of"):
        stage(six, tmp_path / "node", node, 3)
    damaged.unlink()
    with pytest.raises(DataError, match=f"six/{damaged.name}: No such file"):
        stage(six, tmp_path / "node", node, 3)
    (six / INDEX).unlink()
    (six / INDEX).write_bytes(b"")
    with pytest.raises(DataError, match=r"six/index\.pdx: empty"):
        stage(six, tmp_path / "node", node, 3)


@pytest.mark.parametrize("damage", ["a byte", "cut short"])
def test_a_damaged_index_is_replaced(six: Path, tmp_path: Path, damage: str) -> None:
    node = tmp_path / "node"
    stage(six, node, 0, 1)
    content = (node / INDEX).read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    (node / INDEX).write_bytes(changed if damage == "a byte" else content[:100])
    stage(six, node, 0, 1)
    assert (node / INDEX).read_bytes() == content
    assert verify(node) == []


def test_a_staged_folder_is_verified_without_the_other_nodes(six: Path, tmp_path: Path) -> None:
    node = tmp_path / "node"
    kept = stage(six, node, 0, 3)
    assert verify(node) == []
    lost = node / native.partition_name(kept[1])
    content = lost.read_bytes()
    lost.unlink()
    assert [lost.name in fault for fault in verify(node)] == [True]
    assert stage(six, node, 0, 3) == kept  # copies it again
    assert lost.read_bytes() == content
    assert verify(node) == []
    flip(lost, -1)
    assert verify(node)
    (node / RECORD).write_text("[")
    with pytest.raises(DataError, match=RECORD):
        verify(node)
    (node / RECORD).unlink()  # then every partition is to be there
    assert len(verify(node)) > native.PackFolder(os.fsencode(six)).partitions - len(kept)


def test_a_folder_with_something_else_is_refused(source: Path, six: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "other", PackOptions(partitions=2))
    before = found(tmp_path / "other")
    with pytest.raises(UsageError, match=r"other has another pack than .*six \(index\.pdx differs"):
        stage(six, tmp_path / "other", 0, 3)
    (tmp_path / "other" / INDEX).unlink()
    with pytest.raises(UsageError, match=r"another pack than .*six \(part-00000\.pack differs"):
        stage(six, tmp_path / "other", 0, 3)
    for path in (tmp_path / "other").iterdir():
        assert path.read_bytes() == before[path.name][3]
    with pytest.raises(UsageError, match=r"source has other files, such as 'large\.bin'"):
        stage(six, source, 0, 3)
    for inside in (six, six / "node"):
        with pytest.raises(UsageError, match=f"{inside}: it is in the pack that is to be copied"):
            stage(six, inside, 0, 3)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / native.partition_name(0))  # opening it would wait forever
    with pytest.raises(UsageError, match=r"pipe has other files, such as 'part-00000\.pack'"):
        stage(six, tmp_path / "pipe", 0, 3)
    (tmp_path / "node").mkdir()
    with FolderLock(tmp_path / "node"), pytest.raises(UsageError, match="is in use"):
        stage(six, tmp_path / "node", 0, 3)
    assert not list((tmp_path / "node").iterdir())


def test_a_full_disk_leaves_nothing_incomplete(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "pack", PackOptions(partitions=2))
    # The limit of a process's files has the effect of a full disk on one write.
    code = """
import resource, signal, sys
from pydist.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
sys.exit(main(["data", "stage", *sys.argv[1:], "--node", "0/1"]))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "pack"), str(tmp_path / "node")]
    done = subprocess.run(
        command,
        env=child_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (DiskError.exit_code, 1), done.stderr
    assert "node: File too large" in done.stderr
    names = {path.name for path in (tmp_path / "node").iterdir()}
    assert names <= {native.partition_name(part) for part in range(2)}
    assert stage(tmp_path / "pack", tmp_path / "node", 0, 1) == [0, 1]
    assert verify(tmp_path / "node") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--node", "4/4"], "node 4 of 4: nodes are numbered from 0 to 3"),
        (["--node", "0/0"], "nodes=0: at least 1"),
        (["--node", "two"], "--node two: I/N is expected, such as 0/4"),
        (["--node", "-1/4"], "--node"),
        (["--node", "0/4", "--copies", "5"], "copies=5: from 1 to 4, the number of nodes"),
        (["--node", "0/4", "--copies", "0"], "copies=0: from 1 to 4, the number of nodes"),
        (["--node", "0/4", "--broadcast", "x"], "six: the pack has no folder 'x'"),
        ([], "the following arguments are required: --node; pydist data stage --help tells more"),
    ],
)
def test_the_command_says_what_is_wrong(
    six: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["data", "stage", str(six), str(tmp_path / "node"), *options]) in (2, 65)
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "node").exists()


def test_the_command(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = ["--broadcast", "val/cat", "--broadcast", "val/dog"]
    assert main(["data", "pack", *folders, "source", "-o", "p", "--partitions", "4"]) == 0
    more = ["--broadcast", "train/cat", "--broadcast", "val/dog", "--copies", "1"]
    capsys.readouterr()
    assert main(["data", "stage", "p", "n", "--node", "1/2"]) == 0
    size = sum(path.stat().st_size for path in (tmp_path / "n").glob("*.pack"))
    assert f"data       3 of 5 partitions, {size:,} bytes in n  0 s\n" in capsys.readouterr().out
    assert parts_in(tmp_path / "n") == [1, 3, 4]
    assert main(["data", "stage", *more, "p", "m", "--node", "1/2"]) == 0
    files = PackFileSystem("p")
    cats = {files.entry(f"train/cat/{number}.txt").partition for number in range(5)}
    assert parts_in(tmp_path / "m") == sorted({1, 3, 4} | cats)


@pytest.mark.parametrize(
    "record",
    ['{"options": 3}', '{"options": {"broadcast": "val"}}', "[1]", "no JSON"],
)
def test_a_record_without_folders_is_no_obstacle(tmp_path: Path, record: str) -> None:
    stage(made_with(tmp_path / "pack", record), tmp_path / "node", 0, 1)
    assert parts_in(tmp_path / "node") == [0]


@pytest.mark.parametrize("name", [r'"\ud800"', '"x"', "null", '{"a": 1}', '"..\\u0000"'])
def test_a_record_with_impossible_folders_is_refused(tmp_path: Path, name: str) -> None:
    made_with(tmp_path / "pack", f'{{"options": {{"broadcast": [{name}]}}}}')
    with pytest.raises(DataError, match="the pack has no folder "):
        stage(tmp_path / "pack", tmp_path / "node", 0, 1)


def made_with(folder: Path, record: str) -> Path:
    """Makes a pack without files that has a record."""
    folder.mkdir()
    number = bytes(range(16))
    part = native.PartitionWriter(os.fsencode(folder / native.partition_name(0)), 0, number)
    index = native.IndexWriter(0o755, 0)
    (folder / INDEX).write_bytes(index.content(number, [part.finish()], record))
    return folder
