"""What tests share: this folder's parent is on pytest's path, so `from support.x import y` works.

- `equivalence`: functions, networks and scripts split against whole
- `operators`: every function that pydist handles, called once; docs/operators.md
- `networks`, `random_networks`: networks that tests train, written and drawn
- `training`: training runs and programs
- `jobs`: processes that tests start, and programs for them
- `transports`: what every transport must do
- `stand_ins`: what takes the place of a device (docs/stand-ins.md)
- `kernels`, `data`: cases for native kernels; data sets, read and damaged
- `hunter`: random training programs, split against whole (`tools/hunt`)
"""

from __future__ import annotations

from pathlib import Path

LIBRARY = Path(__file__).parents[1]
"""The folder to put on `PYTHONPATH` for processes that import this package."""

ROOT = LIBRARY.parents[1]
"""The checkout."""
