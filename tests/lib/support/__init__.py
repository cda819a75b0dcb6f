"""Code shared by tests; its parent is on pytest's path, so `from support.x import y` works.

- `equivalence`: functions, networks and scripts compared between a split and a one-device run
- `attention`: attention in a given form of exchange
- `fused`: calls of layers that are deferred or fused
- `operators`: one call of every function that pydist handles; docs/operators.md
- `networks`, `random_networks`: networks that tests train, written by hand and generated
- `training`: training runs and programs
- `jobs`: processes that tests start, and programs for them
- `transports`: the contract of every transport
- `stand_ins`: replacements for devices (docs/stand-ins.md)
- `kernels`, `data`: cases for native kernels; reading and damaging data sets
- `hunter`: random training programs, run split and on one device (`tools/hunt`)
"""

from __future__ import annotations

from pathlib import Path

LIBRARY = Path(__file__).parents[1]
"""The folder to put on `PYTHONPATH` for processes that import this package."""

ROOT = LIBRARY.parents[1]
"""The root folder of the checkout."""
