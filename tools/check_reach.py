#!/usr/bin/env python3
"""Checks how many modules an operator reaches by imports, itself included.

A reader who follows a convolution through the code meets these modules at most. Imports within
functions count, those for types only do not.

Usage: tools/check_reach.py [--list]
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

MOST = {"pydist.ops.conv.conv": 58}
"""Most modules by operator; may only fall."""


def main() -> int:
    """Prints the modules that each operator reaches; 1 if they are too many."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # this tree, not an installed package
    graph = grimp.build_graph("pydist", exclude_type_checking_imports=True, cache_dir=None)
    failed = False
    for operator, most in MOST.items():
        reached = sorted({operator, *graph.find_upstream_modules(operator)})
        if "--list" in sys.argv:
            print("\n".join(reached))
        print(f"{operator} reaches {len(reached)} modules; {most} are allowed")
        failed |= len(reached) > most
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
