"""Two ranks that pydist sees on different machines; one of them has a fault.

machines.py FAULT
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from pydist import owner
from pydist.launch import launcher_env, watch


def part() -> int:
    """Makes this process appear alone on its machine; returns its rank."""
    who = launcher_env.detect()
    assert who is not None
    alone = dataclasses.replace(who, local_rank=0, local_size=1)
    path = watch._path
    launcher_env.detect = lambda *_: alone
    watch._path = lambda who: path(who).with_suffix(f".{who.rank}")
    socket.gethostname = lambda: f"machine-{alone.rank}"
    owner.kernel = functools.cache(lambda: f"kernel-{alone.rank}")
    return alone.rank


def main(fault: str) -> None:
    rank = part()
    Path(f"pid{rank}").write_text(str(os.getpid()))
    import torch
    from torch import nn

    import pydist

    mesh = pydist.init(spatial=(2, 1, 1))
    model = pydist.parallelize(nn.Sequential(nn.Conv3d(1, 2, 3), nn.InstanceNorm3d(2)), mesh)

    def step(strange: Any = False) -> None:
        y = model(torch.ones(1, 1, 8, 8, 8))
        if strange:
            mesh.world.all_reduce(torch.ones(3))
        y.square().mean().backward()

    for number in range(4):
        step(strange=number == 1 or (fault == "call" and rank == 0 and number == 3))
    if rank == 0 and fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0 and fault == "spin":
        sum(iter(int, 1))
    step()


if __name__ == "__main__":
    main(sys.argv[1])
