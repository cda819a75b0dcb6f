"""An emulated shared file system: a library that delays calls on files, for child processes.

`slow_files.c` is compiled by `cc` and preloaded. It delays each call that looks a path up below a
folder (open, stat, access, opendir), or each read of a file there. The kernel's caches stay warm:
the delay stands for the round trip to a server, and costs no CPU time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


@cache
def library(folder: Path) -> Path:
    """Compiles the library into a folder, and returns its path."""
    made = folder / "libslow_files.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", str(SOURCE), "-o", str(made)]
    subprocess.run([*command, "-ldl"], check=True)
    return made


def environment(
    build: Path,
    folder: Path,
    metadata_us: float = 0,
    read_us: float = 0,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the environment of child processes for which a folder is slow.

    Args:
        build: folder for the compiled library.
        folder: the folder that is slow.
        metadata_us: delay of each call that looks a path up, in microseconds.
        read_us: delay of each read, in microseconds.
        base: the other variables; by default those of this process.
    """
    variables = dict(os.environ if base is None else base)
    if metadata_us <= 0 and read_us <= 0:
        return variables
    if sys.platform != "linux":
        raise SystemExit("slow_files: delays are emulated on Linux alone (LD_PRELOAD)")
    others = variables.get("LD_PRELOAD")
    preload = f"{others}:{library(build)}" if others else str(library(build))
    return {
        **variables,
        "LD_PRELOAD": preload,
        "SLOW_FOLDER": str(folder.resolve()),
        "SLOW_METADATA_NS": str(round(metadata_us * 1000)),
        "SLOW_READ_NS": str(round(read_us * 1000)),
    }
