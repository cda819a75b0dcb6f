"""Fails if a CUDA kernel spills registers or uses local memory, on any architecture.

    python tools/check_spills.py FOLDER --sources ops/pack/cuda.cu launch/device.cu ... --arch 80 90

Reads ptxas's output for the compilation of the sources into objects under FOLDER (*.ptxas, which
tools/ptxas_report writes), so nothing is compiled again. A spill costs memory traffic in the
innermost loops, and so does an array that is indexed by a variable (a "stack frame" without a
spill); neither changes a result, and a GPU to measure it may not be available.

Exit code: 0 nothing is spilled, 1 something is, or a kernel is missing for an architecture, 2 a
source has no report, or the reports contain no kernel.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class Use(NamedTuple):
    """Local memory of one function: a kernel, or one that a kernel calls."""

    kernel: str
    function: str
    arch: str
    frame: int
    stores: int
    loads: int

    def __str__(self) -> str:
        within = "" if self.function == self.kernel else f", in its call of {self.function}"
        return (
            f"sm_{self.arch}: {self.kernel}{within}: {self.stores} bytes of spill stores,"
            f" {self.loads} of spill loads, {self.frame} of stack"
        )


def uses(report: str) -> list[Use]:
    """Returns the local memory of each function in a report, kernel by kernel."""
    found: list[Use] = []
    kernel = function = arch = ""
    for line in report.splitlines():
        if entry := _ENTRY.search(line):
            kernel, arch = entry.groups()
        elif properties := _FUNCTION.search(line):
            function = properties[1]
        elif memory := _MEMORY.search(line):
            frame, stores, loads = map(int, memory.groups())
            found.append(Use(kernel, function, arch, frame, stores, loads))
    return found


def faults(found: list[Use], archs: list[str]) -> list[str]:
    """Returns errors, one line each; every kernel must exist for every architecture."""
    wrong = [str(use) for use in found if use.frame or use.stores or use.loads]
    names = {use.kernel for use in found}
    for arch in archs:
        missing = names - {use.kernel for use in found if use.arch == arch}
        if missing:
            wrong.append(f"sm_{arch}: {len(missing)} kernels missing, such as {min(missing)}")
    return wrong


def _readable(text: str) -> str:
    """Demangles the names of kernels if c++filt is available."""
    tool = shutil.which("c++filt")
    if tool is None:
        return text
    return subprocess.run([tool], input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Prints the errors, or the number of correct kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sources", nargs="+", required=True, help="files, or ends of paths")
    parser.add_argument("--arch", nargs="+", required=True, help="compute capabilities, as 80 90")
    options = parser.parse_args()
    reports = {name: sorted(options.folder.rglob(f"{name}.o.ptxas")) for name in options.sources}
    unread = [name for name, files in reports.items() if not files]
    if unread:
        print(
            f"check_spills: no report of {', '.join(unread)} in {options.folder}", file=sys.stderr
        )
        return 2
    texts = [file.read_text(errors="replace") for files in reports.values() for file in files]
    found = [use for text in texts for use in uses(text)]
    if not found:
        print(f"check_spills: the {len(texts)} reports contain no kernel", file=sys.stderr)
        return 2
    wrong = faults(found, options.arch)
    if wrong:
        print(_readable("\n".join(["check_spills:", *wrong])), file=sys.stderr)
        return 1
    archs = ", ".join(f"sm_{arch}" for arch in options.arch)
    print(
        f"{len(set(use.kernel for use in found))} kernels from {len(reports)} files for {archs}:"
        " no spill, no local memory"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
