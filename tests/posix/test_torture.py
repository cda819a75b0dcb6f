"""Tests that random calls on a mounted pack and on a real folder return the same.

The real folder is a read-only bind mount at the same path, where the machine permits one; then
calls that write are compared, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pydist.cli.mounting import mounted
from pydist.packs import pack

CALLER = Path(__file__).with_name("caller.py")
READ_ONLY_MOUNT = """
mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && shift 2 && exec "$@"
"""
Call = list[Any]


class Caller:
    """The program that makes the calls, on a real folder or on a mounted pack."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, calls: list[Call]) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(calls), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


class Machine(NamedTuple):
    """A real folder, a pack whose files are copied into memory, and one with all files in place."""

    real: Caller
    copies: Caller
    in_place: Caller
    calls: st.SearchStrategy[list[Call]]


def can_bind(folder: Path, point: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", READ_ONLY_MOUNT, "sh", folder, point, "true"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Starts the callers; without permission to mount, the real folder can be written."""
    base = tmp_path_factory.mktemp("torture")
    folder, point = base / "folder", base / "point"
    make_tree(folder)
    point.mkdir()
    pack(folder, base / "packs")
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    caller = [sys.executable, "-S", str(CALLER), str(point)]
    with ExitStack() as stack:
        read_only = can_bind(folder, point)
        real = ["unshare", "-m", "sh", "-c", READ_ONLY_MOUNT, "sh", str(folder), str(point)]
        if not read_only:
            point.rmdir()
            folder.rename(point)
            real = []
        # With room in the cache for some of the files.
        copies = stack.enter_context(mounted(str(point), str(base / "packs"), cache="30kB"))
        in_place = stack.enter_context(mounted(str(point), str(base / "packs"), large="1B"))
        yield Machine(
            stack.enter_context(Caller(real + caller, plain)),
            stack.enter_context(Caller(caller, copies)),
            stack.enter_context(Caller(caller, in_place)),
            ALL_CALLS if read_only else CALLS_THAT_READ,
        )


def make_tree(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a b").mkdir()
    (folder / "empty").mkdir()
    (folder / "a" / "one").write_bytes(bytes(range(256)) * 40)
    (folder / "a" / "b" / "two").write_bytes(os.urandom(5000))
    (folder / "a b" / "ü*?").write_text("text\n")
    (folder / "zero").write_bytes(b"")
    (folder / "file").write_text("some lines\n" * 2000)
    (folder / "private").write_text("x")
    (folder / "private").chmod(0o400)
    (folder / "closed").mkdir()
    (folder / "closed" / "one").write_text("one")
    (folder / "closed").chmod(0o600)
    for number, path in enumerate(sorted(folder.rglob("*"))):
        os.utime(path, ns=(0, 1_600_000_000_000_000_001 + number * 10**9))


COMPONENTS = st.sampled_from(
    [
        *(
            "a",
            "b",
            "one",
            "two",
            "file",
            "zero",
            "a b",
            "ü*?",
            "empty",
            "private",
            "closed",
            "nothing",
        ),
        *("..", ".", "x" * 255, "x" * 256),
    ]
)
RELATIVE = st.builds(
    lambda parts, double, slash: ("//" if double else "/").join(parts) + "/" * slash,
    st.lists(COMPONENTS, min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1]),
)
KNOWN = st.sampled_from(["file", "a/one", "a/b/two", "a", "a/b", ".", "zero", "a b/ü*?", "empty"])
FROM_ABOVE = st.builds(lambda path: f"../point/{path}", KNOWN)
PATHS = st.one_of(KNOWN, KNOWN, RELATIVE, FROM_ABOVE, st.sampled_from(["", "/usr", "..", "~"]))
FLAGS = st.sampled_from(
    [os.O_RDONLY] * 6
    + [os.O_RDONLY | os.O_DIRECTORY, os.O_RDONLY | os.O_NOFOLLOW]
    + [os.O_RDONLY | os.O_CLOEXEC, os.O_PATH, os.O_RDONLY | os.O_NONBLOCK]
)
WRITING_FLAGS = st.sampled_from(
    [
        *(os.O_RDWR, os.O_WRONLY, os.O_WRONLY | os.O_CREAT, os.O_CREAT | os.O_EXCL),
        *(os.O_RDWR | os.O_CREAT | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC),
        *(os.O_WRONLY | os.O_APPEND, os.O_TMPFILE | os.O_RDWR, os.O_RDONLY | os.O_CREAT),
    ]
)
SLOTS = st.integers(0, 1)
AT = st.one_of(st.none(), SLOTS)
SIZES = st.sampled_from([0, 1, 100, 4096, 10_000, 30_000])
OFFSETS = st.sampled_from([-1, 0, 1, 99, 4096, 9_999, 22_000, 50_000])


def call(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return st.tuples(st.just(name), *arguments).map(list)


READS = (
    *([call("open", SLOTS, PATHS, FLAGS, AT)] * 2),
    *([call("open", SLOTS, KNOWN, st.just(os.O_RDONLY), st.none())] * 6),
    call("close", SLOTS),
    *([call("read", SLOTS, SIZES)] * 2),
    call("readv", SLOTS, SIZES),
    call("pread", SLOTS, SIZES, OFFSETS),
    call("preadv", SLOTS, SIZES, OFFSETS),
    call("seek", SLOTS, OFFSETS, st.sampled_from([0, 1, 2, os.SEEK_DATA, os.SEEK_HOLE, 7])),
    call("fstat", SLOTS),
    call("dup", SLOTS, SLOTS),
    call("dup2", SLOTS, SLOTS),
    call("map", SLOTS, st.sampled_from([1, 4096, 5000]), st.integers(0, 1), st.booleans()),
    call("send", SLOTS, SIZES, st.one_of(st.none(), OFFSETS)),
    call("reopen", SLOTS, SLOTS),
    call("link", SLOTS),
    *([call("stat", PATHS, AT, st.booleans())] * 3),
    call("access", PATHS, st.sampled_from([0, 1, 4, 5]), AT),
    call("list", PATHS),
    call("list_open", SLOTS),
    call("scan", KNOWN),
    call("seekdir", KNOWN, st.integers(0, 6)),
    call("walk", KNOWN),
    call("fwalk", KNOWN),
    *([call("chdir", PATHS)] * 2),
    call("fchdir", SLOTS),
    call("realpath", PATHS),
    call("readlink", PATHS),
    call("stream", PATHS, st.sampled_from(["r", "rb", "re"]), OFFSETS),
    call("file", KNOWN, st.just("rb")),
    call("child", SLOTS),
    call("child_in", KNOWN),
    call("fork", SLOTS, SIZES),
)
WRITES = (
    call("open", SLOTS, PATHS, WRITING_FLAGS, AT),
    call("access", PATHS, st.sampled_from([2, 3, 6, 7]), AT),
    call("write", SLOTS),
    call("mode", SLOTS),
    call("mkdir", PATHS),
    call("symlink", PATHS),
    call("unlink", PATHS),
    call("rmdir", PATHS),
    call("rename", PATHS, PATHS),
    call("hardlink", PATHS, PATHS),
    call("truncate", PATHS),
    call("chmod", PATHS),
    call("utime", PATHS),
    call("fchmod", SLOTS),
    call("stream", KNOWN, st.sampled_from(["r+", "w", "a"]), OFFSETS),
)

OPENED = st.tuples(*(call("open", st.just(slot), KNOWN, st.just(0), st.none()) for slot in (0, 1)))


def sequences(*calls: st.SearchStrategy[Call]) -> st.SearchStrategy[list[Call]]:
    """Draws sequences of calls that begin with two open files or directories."""
    return st.builds(
        lambda opened, others: [*opened, *others],
        OPENED,
        st.lists(st.one_of(*calls), min_size=3, max_size=30),
    )


CALLS_THAT_READ = sequences(*READS)
ALL_CALLS = sequences(*READS, *WRITES)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_calls_return_what_they_return_on_a_real_folder(
    machine: Machine, data: st.DataObject
) -> None:
    calls = data.draw(machine.calls)
    real, copies, in_place = machine.real(calls), machine.copies(calls), machine.in_place(calls)
    for made, expected, copied, placed in zip(calls, real, copies, in_place, strict=True):
        assert (made, copied) == (made, expected)
        assert (made, placed) == (made, expected)
