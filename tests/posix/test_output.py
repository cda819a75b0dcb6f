"""Tests that results go through to the output folder, and nothing else can be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from support.mounts import Case

PROGRAM = """
import ctypes, os, shutil, socket, sys, tempfile
from pathlib import Path
import h5py, numpy as np
mount = Path(sys.argv[1])
out = mount / "results"
assert "results" in os.listdir(mount) and (out).is_dir() and os.listdir(out) == []
assert [entry.inode() for entry in os.scandir(mount) if entry.name == "results"] == [
    out.stat().st_ino
]
os.makedirs(out / "a" / "b")
with open(out / "a" / "log.tmp", "w") as file:
    file.write("one\\n")
os.rename(out / "a" / "log.tmp", out / "a" / "log")
with open(out / "a" / "log", "a") as file:
    file.write("two\\n")
os.chdir(out / "a")
Path("relative").write_text("here")
os.symlink("log", "link")
os.link("log", "hard")
os.chdir(mount)
shutil.copy("lines", "results/copied")
np.save("results/array.npy", np.arange(10))
with h5py.File(out / "volume.h5", "w") as file:
    file["full"] = np.arange(6)
with tempfile.NamedTemporaryFile(dir=out, delete=False) as file:
    file.write(b"temporary")
os.remove(file.name)
os.truncate(out / "copied", 100)
os.utime(out / "copied", (5, 5))
os.chmod(out / "copied", 0o600)
assert sorted(os.listdir(out)) == ["a", "array.npy", "copied", "volume.h5"]
descriptor = os.open("results", os.O_RDONLY)
os.unlink("a/hard", dir_fd=descriptor)
libc = ctypes.CDLL(None)
pattern = ctypes.create_string_buffer(bytes(out / "madeXXXXXX.txt"))
os.close(libc.mkostemps(pattern, 4, 0))
os.remove(pattern.value)
watches = libc.inotify_init()
assert libc.inotify_add_watch(watches, bytes(out / "copied"), 2) > 0
assert libc.inotify_add_watch(watches, bytes(mount / "nothing"), 2) == -1
for name in ("socket", "a/" + "long" * 19):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("results/" + name)
        listener.listen()
        client.connect("results/" + name)
    os.remove(out / name)
for function, arguments in (
    (socket.socket(socket.AF_UNIX).bind, (str(mount / "new"),)),
    (socket.socket(socket.AF_UNIX).bind, (str(mount / "lines"),)),
    (socket.socket(socket.AF_UNIX).connect, (str(mount / "lines"),)),
    (os.rename, ("lines", "results/lines")),
    (os.link, ("lines", "results/lines")),
    (os.rename, ("results/copied", "copied")),
    (open, ("new", "w")),
    (open, ("lines", "r+")),
    (os.mkdir, ("new",)),
    (os.unlink, ("lines",)),
    (tempfile.mkstemp, ("", "", str(mount))),
):
    try:
        function(*arguments)
    except OSError as error:
        print(function.__name__, error.strerror)
"""


def test_results_go_through(case: Case, tmp_path: Path) -> None:
    target = tmp_path / "real"
    with case.environment(output=f"results={target}") as environment:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, case.mount],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (ended.stderr, ended.returncode) == ("", 0)
    assert ended.stdout.splitlines() == [
        "bind Read-only file system",
        "bind Address already in use",
        "connect Connection refused",
        "rename Invalid cross-device link",
        "link Invalid cross-device link",
        "rename Invalid cross-device link",
        "open Read-only file system",
        "open Read-only file system",
        "mkdir Read-only file system",
        "unlink Read-only file system",
        "mkstemp Read-only file system",
    ]
    assert (target / "a" / "log").read_text() == "one\ntwo\n"
    assert (target / "a" / "link").readlink() == Path("log")
    assert (target / "a" / "relative").read_text() == "here"
    assert (target / "copied").read_bytes() == (case.folder / "lines").read_bytes()[:100]
    assert (target / "copied").stat().st_mtime == 5
    assert np.load(target / "array.npy").tolist() == list(range(10))
    with h5py.File(target / "volume.h5") as file:
        assert file["full"][:].tolist() == list(range(6))
    assert sorted(path.name for path in (target / "a").iterdir()) == [
        "b",
        "link",
        "log",
        "relative",
    ]


@pytest.mark.parametrize("name", ["file", "pipe"])
def test_the_shell_redirects_into_it(case: Case, tmp_path: Path, name: str) -> None:
    commands = {
        "file": "cd $0; cat lines > results/file; echo more >> results/file; mv results/file lines",
        "pipe": "cd $0/class; sort -r ../lines | tee ../results/pipe | cksum; cp -r . ../results",
    }
    with case.environment(output=f"results={tmp_path}/real") as environment:
        ended = subprocess.run(
            ["bash", "-c", commands[name], case.mount],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    lines = (case.folder / "lines").read_text()
    if name == "file":
        assert "Read-only file system" in ended.stderr
        assert (tmp_path / "real" / "file").read_text() == f"{lines}more\n"
    else:
        assert ended.stderr == ""
        expected = sorted(lines.splitlines(), reverse=True)
        assert (tmp_path / "real" / "pipe").read_text().splitlines() == expected
        assert len(list((tmp_path / "real").rglob("*.bin"))) == 12
