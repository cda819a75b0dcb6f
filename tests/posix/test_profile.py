"""Tests that the calls of programs are counted, on packs as on the files that were packed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from pydist.cli.mounting import mounted
from pydist.cli.store_profile import CallCounts, Counters
from support.mounts import Case

PROGRAM = """
import os, subprocess, sys
root = sys.argv[1]
for name in sorted(os.listdir(root + "/class/a")):
    with open(f"{root}/class/a/{name}", "rb", buffering=0) as file:
        while file.read(1000): pass
for _ in range(3):
    os.stat(root + "/lines")
os.access(root + "/lines", os.R_OK)
descriptor = os.open(root + "/large", os.O_RDONLY)
os.pread(descriptor, 100, 5)
os.lseek(descriptor, 7, 0)
os.close(descriptor)
try:
    os.stat(root + "/nothing")
except FileNotFoundError:
    pass
subprocess.run(["cat", root + "/lines"], stdout=subprocess.DEVNULL)
open("/proc/self/stat").read()
"""


Counted = tuple[dict[str, CallCounts], int, int, int]


def count(case: Case, tmp_path: Path, *, packs: bool) -> tuple[Counted, str]:
    root = case.mount if packs else case.folder
    with Counters(tmp_path / f"report-{packs}") as counters:
        given = str(case.packs) if packs else None
        with mounted(str(root), given, counters=counters.file) as environment:
            program = [sys.executable, "-S", "-c", PROGRAM, str(root)]
            subprocess.run(program, env=environment, check=True)
        return counters.read(), counters.finish()


def test_calls_are_counted_by_kind(case: Case, tmp_path: Path) -> None:
    (loose, *numbers), table = count(case, tmp_path, packs=False)
    (packed, *same_numbers), same_table = count(case, tmp_path, packs=True)
    assert numbers == same_numbers == [8, 1, 2]
    for text in (table, same_table):
        assert text.splitlines()[-1] == "8 files, 1 directories, 2 processes"
    for name, calls in loose.items():
        others = packed[name]
        assert (calls.calls, calls.failed, calls.bytes) == (
            others.calls,
            others.failed,
            others.bytes,
        )
    assert packed["open"].calls == packed["close"].calls == 8
    assert packed["list"].calls == 1
    assert packed["access"].calls == 1
    # The program reads six small files and a piece of the large one; cat reads the lines.
    size = sum(path.stat().st_size for path in (case.folder / "class" / "a").iterdir())
    assert packed["read"].bytes == size + 100 + (case.folder / "lines").stat().st_size
    assert packed["stat"].failed == 1
    assert packed["open"].threads == packed["open"].processes == 1
    report = json.loads((tmp_path / "report-True").read_text())
    assert report["calls"]["read"]["calls"] == packed["read"].calls


def test_calls_at_one_time_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    reader = """
import os, sys, threading
files = [os.open(sys.argv[1], os.O_RDWR) for _ in range(3)]
threads = [threading.Thread(target=os.read, args=(file, 1)) for file in files]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    with (
        Counters(tmp_path / "report") as counters,
        mounted(str(folder), counters=counters.file) as environment,
    ):
        command = [sys.executable, "-S", "-c", reader, str(folder / "pipe")]
        readers = [subprocess.Popen(command, env=environment) for _ in range(2)]
        while counters.read()[0]["read"].threads < 6:
            assert all(process.poll() is None for process in readers)
            time.sleep(0.01)
        writer = os.open(folder / "pipe", os.O_RDWR)
        os.write(writer, b"x" * 6)
        assert [process.wait() for process in readers] == [0, 0]
        os.close(writer)
        counted = counters.read()[0]["read"]
        assert (counted.calls, counted.threads, counted.processes) == (6, 6, 2)
