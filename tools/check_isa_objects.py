"""Fails if an object that is compiled per instruction set shares a function with other objects.

    python tools/check_isa_objects.py [--nm NM] OBJECT...

The linker keeps one copy of an inline function or template instance that several objects define.
A copy compiled for AVX-512 would then run on CPUs without it. So these objects (isa_*.cpp of the
families in csrc/ops) may only define symbols in the namespace of their instruction set: all
functions that they call are inlined (PYDIST_HD in csrc/launch/host_device.hpp) or local to them.

Exit code: 0 nothing is shared, 1 something is, 2 an object defines nothing, or nm can't read it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

_DEFINED = re.compile(r"^[0-9a-f]+ ([A-TV-Zui]) (.+)$", re.MULTILINE)
_OWN = re.compile(r"^_?pydist::cpu::(base|x86_64_v\d)::")


def defined(nm: str, path: str) -> list[str]:
    """Returns the demangled symbols that an object defines for others."""
    command = [nm, "-g", "-C", path]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for _, name in _DEFINED.findall(listed)]


def main() -> int:
    """Prints the shared symbols, or the number of correct objects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nm", default="nm")
    parser.add_argument("objects", nargs="+", metavar="OBJECT")
    options = parser.parse_args()
    shared = []
    for path in options.objects:
        names = defined(options.nm, path)
        if not names:
            print(f"check_isa_objects: {path} defines nothing", file=sys.stderr)
            return 2
        shared += [f"{path}: {name}" for name in names if not _OWN.match(name)]
        if len({found[1] for name in names if (found := _OWN.match(name))}) > 1:
            shared.append(f"{path}: several instruction sets")
    if shared:
        print("\n".join(["check_isa_objects:", *shared]), file=sys.stderr)
        return 1
    print(f"{len(options.objects)} objects share no function")
    return 0


if __name__ == "__main__":
    sys.exit(main())
