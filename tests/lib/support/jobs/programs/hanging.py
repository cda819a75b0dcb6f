"""A program in which rank 1 makes the others wait; `support.jobs.hangs` starts it.

    hanging.py FOLDER PHASE FAULT

Each rank writes its process id to FOLDER; rank 1 also writes the time of the fault.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER, PHASE, FAULT = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
RANK = next(
    int(os.environ[name])
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PYDIST_RANK", "RANK")
    if name in os.environ
)


class Early(BaseException):
    """Exception that leaves `main` early, as a return would."""


def fault(*_: Any, **__: Any) -> None:
    if PHASE != "join":
        (FOLDER / "time").write_text(str(time.time()))
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "spin":  # in C code, which does not release the interpreter's lock
        sum(itertools.repeat(0))
    elif FAULT == "caught":
        raise ArithmeticError
    elif FAULT == "return":
        raise Early


def strike(owner: Any, name: str, calls: int = 1) -> None:
    """Triggers the fault before the given call of the function of this name."""
    if RANK != 1:
        return
    function: Callable[..., Any] = getattr(owner, name)
    count = itertools.count(1)

    def struck(*args: Any, **kwargs: Any) -> Any:
        if next(count) == calls:
            fault()
        return function(*args, **kwargs)

    setattr(owner, name, struck)


def stamp_start() -> None:
    """Writes the time at which this rank's watchdog starts, the start of its wait."""
    from pydist.launch import watch

    start = watch.start

    def stamped(who: Any) -> None:
        start(who)
        (FOLDER / "time").write_text(str(time.time()))

    watch.start = stamped


def run_training(world: Any) -> None:
    """Runs the phases of `pydist train`."""
    import pydist.data.read_ahead
    import pydist.train.run
    from pydist.mesh import Mesh
    from pydist.train.config import (
        Config,
        CosmoFlowConfig,
        DataConfig,
        OutputConfig,
        TrainConfig,
    )
    from pydist.train.network import MeshNetwork

    if PHASE == "opening":
        strike(pydist.train.run, "open_datasets")
    elif PHASE == "loader":
        strike(pydist.data.read_ahead, "read_group", calls=2)
    elif PHASE == "saving":
        strike(MeshNetwork, "state")
    else:
        strike(MeshNetwork, "collect")
    config = Config(
        model=CosmoFlowConfig(variant="mlperf", width=32),
        data=DataConfig(path=FOLDER.parent / "universes", normalize="log1p"),
        train=TrainConfig(epochs=2, batch=2),
        output=OutputConfig(folder=FOLDER / "run", plot=False),
    )
    pydist.train.run.train(config, Mesh(world, 1, (2, 1, 1)))


def run_own_loop(mesh: Any) -> None:
    """Runs the phases of a user's own loop."""
    import torch
    from torch import nn

    import pydist
    from pydist.optim import partitioned

    net = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.InstanceNorm3d(4),
        nn.Conv3d(4, 4, 3, padding=1),
        nn.Conv3d(4, 1, 1),
    )
    model = pydist.parallelize(net, mesh)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    if PHASE == "optimizer":
        optimizer = pydist.optim.sharded(optimizer, model, "always")
        strike(partitioned, "gather_state")

    def at_second(*_: Any) -> None:
        if RANK == 1 and mesh.session.forwards == 2:
            fault()

    if PHASE == "halo":
        net[2].register_forward_pre_hook(at_second)
    elif PHASE == "reduction":
        net[1].register_forward_pre_hook(at_second)
    elif PHASE == "backward":
        net[2].register_full_backward_hook(at_second)
    elif PHASE == "buckets" and RANK == 1:
        weight = net[2].weight
        assert isinstance(weight, nn.Parameter)
        weight.register_post_accumulate_grad_hook(at_second)
    for _ in range(4):
        with contextlib.suppress(ArithmeticError):
            model(torch.ones(1, 1, 8, 8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if PHASE == "optimizer":
        optimizer.state_dict()
    if PHASE == "tuning":
        from pydist.backend.autotuner import autotuner_of

        class Hanging:
            key = choice_key = "hang"
            candidates = "fast", "slow"

            def rivals(self, candidate: str) -> Sequence[str]:
                return self.candidates

        def visit(key: str, name: str) -> float:
            if RANK == 1:
                fault()
            return 1.0

        subjects = [[Hanging()]] * mesh.size
        choices = ["fast"] * mesh.size
        autotuner_of(mesh).choose(
            mesh.world, subjects, visit, lambda _: choices, lambda _: True, True
        )


def main() -> None:
    (FOLDER / f"pid{RANK}").write_text(str(os.getpid()))
    import pydist

    if PHASE == "join" and RANK == 1:
        fault()
    elif PHASE == "join":
        stamp_start()
    mesh = pydist.init(spatial=(2, 1, 1))
    if PHASE in ("opening", "loader", "saving", "validation"):
        run_training(mesh.world)
    elif PHASE == "finalize":
        leave = fault if FAULT in ("stop", "spin") else lambda: os._exit(0)
        if RANK == 1:  # after pydist has ended, before MPI ends
            (FOLDER / "time").write_text(str(time.time()))
            setattr(type(mesh.world), "close", lambda _: leave())  # noqa: B010
    else:
        run_own_loop(mesh)
    mesh.world.barrier()


if __name__ == "__main__":
    with contextlib.suppress(Early, ArithmeticError):
        main()
    atexit.register(lambda: None)
