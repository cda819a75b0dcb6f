"""Reads a sample store until rank 1 has a fault; `tests/data/store/test_faults.py` starts it.

    storing.py FAULT

In the second epoch, when blocks come from the other rank, rank 1 raises an error, ends without a
word, or finds that a file is gone.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor

import pydist
from pydist.data import Loader
from pydist.errors import DataError

FAULT = sys.argv[1]


class _Samples:
    sample_shape = (1, 32, 64, 64)
    num_targets, labeled, dtype, identity = 1, False, torch.float32, "samples"

    def __init__(self) -> None:
        self.gone = False

    def __len__(self) -> int:
        return 8

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        return self.sample_shape

    def read_block(self, index: int, box: object = None, out: Tensor | None = None) -> Tensor:
        assert out is not None
        if self.gone:
            raise DataError(f"sample {index} is gone")
        return out.fill_(index)

    def read_labels(self, index: int, box: object = None, out: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def target(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def main() -> None:
    mesh, source = pydist.init(), _Samples()
    # Half of the blocks fit, so that the second epoch reads as well.
    budget = 4 * (4 * 32 * 64 * 64 + 128) // 2
    with Loader(source, mesh, 2, store="memory", store_memory=budget) as loader:
        for epoch in range(1000):
            for _ in loader:
                time.sleep(0.01)
                if (epoch, mesh.rank) == (1, 1):
                    source.gone = FAULT == "gone"
                    if FAULT == "raise":
                        raise ArithmeticError("the fault")
                    if FAULT == "kill":
                        os._exit(9)


if __name__ == "__main__":
    main()
