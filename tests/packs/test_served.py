"""Tests of partitions on several nodes: servers are processes, and readers have the index alone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from pydist._loader import native
from pydist.cli.main import main
from pydist.errors import DataError, UsageError
from pydist.packs import PackFiles, PackFileSystem, PackOptions, pack, serve, verify
from support.jobs.children import child_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="packs are served on Linux alone")

SECRET = "a secret of this test"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDIST_PACKS_SECRET", SECRET)


@pytest.fixture
def nodes(source: Path, tmp_path: Path) -> list[Path]:
    """Makes a pack of two partitions, and folders of three nodes: with one each, and with none."""
    pack(source, tmp_path / "pack", PackOptions(partitions=2))
    folders = [tmp_path / name for name in ("first", "second", "reader")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        shutil.copy(tmp_path / "pack" / native.PACK_INDEX, folder)
        if number < 2:
            shutil.copy(tmp_path / "pack" / native.partition_name(number), folder)
    return folders


@contextlib.contextmanager
def serving(
    folder: Path, listen: str = "127.0.0.1:0"
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs `pydist data serve`; yields its address."""
    command = [sys.executable, "-m", "pydist", "data", "serve", str(folder), "--listen", listen]
    environment = {**child_environment(), "PYDIST_PACKS_SECRET": SECRET}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            address = re.fullmatch(r"serving    1 partitions at (.+)\n", said)
            assert address is not None, said
            yield address[1], process
        finally:
            process.kill()


def test_readers_get_all_files_from_two_servers(
    source: Path, nodes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        str(path.relative_to(source)): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file()
    }
    with serving(nodes[0]) as (first, process), serving(nodes[1], f"{nodes[1]}/s") as (second, _):
        monkeypatch.setenv("PYDIST_PACKS_SERVERS", f"{first}, {second}")
        for folder in nodes:
            assert dict(PackFiles(folder)) == expected
            assert verify(folder) == []
        with PackFileSystem(nodes[2]).open("large.bin") as file:
            file.seek(1_000_000)
            assert file.read(70_000) == expected["large.bin"][1_000_000:1_070_000]
        files = PackFiles(nodes[2])
        loader = DataLoader(
            files, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
        )
        assert dict(tuple(item) for item in loader) == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert re.fullmatch(r"served     \d+ requests, [\d,]+ bytes\n", process.stdout.read())
        lost = next(i for i in range(len(files)) if source_partition(files, i) == 0)
        with pytest.raises(DataError) as error:
            files[lost]
        text = str(error.value)
        assert "part-00000.pack: not on this node, and no server sends it" in text
        assert len(text.splitlines()) == 1
        assert "Connection refused" in text
        with serving(nodes[0], first):  # a server that comes back is used again
            assert dict(files) == expected


def test_a_file_system_follows_the_servers_of_the_environment(
    source: Path, nodes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="No such file"):
        PackFileSystem(nodes[2]).cat_file("large.bin")
    servers = [serve(nodes[number], f"{nodes[number]}/socket") for number in (0, 1)]
    monkeypatch.setenv("PYDIST_PACKS_SERVERS", ",".join(server.address for server in servers))
    content = (source / "large.bin").read_bytes()
    assert PackFileSystem(nodes[2]).cat_file("large.bin") == content
    monkeypatch.delenv("PYDIST_PACKS_SERVERS")
    with pytest.raises(DataError, match="No such file"):
        PackFileSystem(nodes[2]).cat_file("large.bin")


def source_partition(files: PackFiles, index: int) -> int:
    return PackFileSystem(files.folder).entry(files.path(index)).partition


def test_what_is_wrong_is_said(
    nodes: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{nodes[0]}/socket"
    server = serve(nodes[0], address)
    assert os.stat(address).st_mode & 0o777 == 0o600  # noqa: PTH116
    monkeypatch.setenv("PYDIST_PACKS_SERVERS", address)
    monkeypatch.setenv("PYDIST_PACKS_SECRET", SECRET + "?")
    with pytest.raises(DataError, match="it has another secret"):
        list(PackFiles(nodes[2]))
    monkeypatch.setenv("PYDIST_PACKS_SECRET", "short")
    with pytest.raises(UsageError, match="PYDIST_PACKS_SECRET has 5 characters: set it to 16"):
        PackFiles(nodes[2])
    assert main(["data", "serve", str(nodes[0])]) == 2
    assert "PYDIST_PACKS_SECRET has 5 characters" in capsys.readouterr().err
    monkeypatch.setenv("PYDIST_PACKS_SECRET", SECRET)
    with pytest.raises(DataError, match=r"part-00001.pack: .* none of the servers has it"):
        list(PackFiles(nodes[2]))
    with pytest.raises(DataError, match="Address already in use"):
        serve(nodes[0], address)
    with pytest.raises(DataError, match="no partition that could be served"):
        serve(nodes[2], f"{nodes[2]}/socket")
    with pytest.raises(UsageError, match="threads=0: from 1 to 1024"):
        serve(nodes[0], f"{nodes[2]}/socket", threads=0)
    del server
    assert not Path(address).exists()
    monkeypatch.delenv("PYDIST_PACKS_SERVERS")
    with pytest.raises(DataError, match=r"part-0000\d.pack: No such file"):
        list(PackFiles(nodes[2]))


def test_threads_that_cannot_be_started_are_an_error(nodes: list[Path]) -> None:
    """The stacks of 1,024 threads need more address space than the process may have."""
    script = (
        "import resource, sys\n"
        "from pydist.errors import DataError\n"
        "from pydist.packs.servers import serve\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (1 << 28)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try:\n"
        "    serve(sys.argv[1], sys.argv[1] + '/socket', threads=1024)\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(nodes[0])]
    environment = {**child_environment(), "PYDIST_PACKS_SECRET": SECRET}
    ended = subprocess.run(
        command,
        env=environment,
        cwd=nodes[0],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = r".*/socket: \d+ of 1024 threads could be started: .*\n"
    assert re.fullmatch(said, ended.stdout), ended
    assert not (nodes[0] / "socket").exists()
