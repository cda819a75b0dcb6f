"""The command line on a rank of several, of which rank 1 computes each convolution N times.

slowed.py N ARGUMENTS
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from torch import Tensor

from pydist.backend.conv_kernels import ConvKernels
from pydist.cli import main as cli


def repeat_convolutions(times: int) -> None:
    """Lets this process compute each convolution, and each of its gradients, several times."""
    run = ConvKernels._run

    def repeated(self: ConvKernels, kernel: Callable[[], Tensor]) -> Tensor:
        for _ in range(times - 1):
            run(self, kernel)
        return run(self, kernel)

    ConvKernels._run = repeated  # type: ignore[method-assign]


def main(times: int, *arguments: str) -> int:
    if os.environ["PYDIST_RANK"] == "1":
        repeat_convolutions(times)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
