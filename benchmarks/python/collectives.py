"""Measures all calls of a transport, by size, over all transports, in one table.

Each transport has its own ranks: threads of one process for `local`, processes for `mpi` under
Open MPI and MPICH and for `c10d` over gloo; missing ones are listed. They take turns, and every
result is checked once. Times, in seconds, are of one call: the mean over consecutive calls, of the
slowest rank. Bytes are those of one rank's contribution.

    python benchmarks/python/collectives.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any

import common
import jobs

if TYPE_CHECKING:
    from pydist.comm import Channel, Transport

SIZES = (8, 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24)
CALLS = (
    "barrier", "send, recv", "channel", "broadcast", "all_gather", "all_gather_async", "all_to_all",
    "reduce_scatter_async", "all_reduce", "all_reduce_async", "broadcast_bytes", "all_gather_bytes",
)  # fmt: skip
TITLES = {
    "local": "local (threads)",
    "openmpi": "mpi (Open MPI)",
    "mpich": "mpi (MPICH)",
    "gloo": "c10d (gloo)",
}


def main() -> None:
    parser = common.parser(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (2)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    from pydist.launch.backends import available

    sizes, rounds = (SIZES[:2], 2) if options.quick else (SIZES, options.rounds)
    at_hand = ["local", *(backend.name for backend in available())]
    kinds = [kind for kind in TITLES if kind in at_hand]

    def start(kind: str) -> Callable[[], jobs.Job]:
        ranks = 1 if kind == "local" else options.ranks
        text = json.dumps({"threads": options.ranks if kind == "local" else 0})
        mpi = "gloo" if kind == "local" else kind
        return lambda: jobs.Job(__file__, ranks, ["--worker", text], mpi)

    cases = [(call, 0 if call == "barrier" else n) for call in CALLS for n in sizes]
    cases = list(dict.fromkeys(cases))
    with jobs.running(**{kind: start(kind) for kind in kinds}) as started:
        libraries = {kind: started[kind].ask("library")[0] for kind in kinds}
        seconds: dict[tuple[str, tuple[str, int]], list[float]] = {}
        for case in cases:
            for kind in kinds:
                started[kind].ask("check", call=case[0], nbytes=case[1])

            def step(kind: str, _: int, case: tuple[str, int] = case) -> float:
                return max(started[kind].ask("run", call=case[0], nbytes=case[1]))

            times = jobs.interleave(kinds, rounds, step)
            seconds.update({(kind, case): taken for kind, taken in times.items()})
    rows = [
        {"transport": TITLES[kind], "call": call, "bytes": nbytes, **common.summary(taken)}
        for (kind, (call, nbytes)), taken in seconds.items()
    ]
    print(f"{options.ranks} ranks, µs a call, median of {rounds} rounds")
    common.show(
        ("call", "bytes", *(TITLES[kind] for kind in kinds)),
        [
            (*case, *(common.summary(seconds[kind, case])["median"] * 1e6 for kind in kinds))
            for case in cases
        ],
    )
    missing = [title for kind, title in TITLES.items() if kind not in kinds]
    for title in missing:
        print(f"not run: {title} is not installed")
    described = common.machine(libraries=libraries)
    result = {"machine": described, "ranks": options.ranks, "rows": rows, "not_run": missing}
    common.write(result, "collectives", options)


# -- the ranks ------------------------------------------------------------------------------


def work(threads: int) -> None:
    """Runs a rank of one of the jobs, or the process whose threads are ranks."""
    import pydist
    from pydist.comm import run_local

    if not threads:
        world = pydist.init().world

        def answer(what: str, **details: Any) -> Any:
            return jobs.library(world) if what == "library" else _TASKS[what](world, **details)

        jobs.serve(world.rank, answer)
        return

    def answer_in_threads(what: str, **details: Any) -> Any:
        if what == "library":
            return "local"
        answers = run_local(lambda world: _TASKS[what](world, **details), threads)
        return max(answers) if what == "run" else None

    jobs.serve(0, answer_in_threads)


def _check(world: Transport, call: str, nbytes: int) -> None:
    made = _Call(world, call, nbytes)
    made.check()
    made.close()


def _seconds(world: Transport, call: str, nbytes: int) -> float:
    made = _Call(world, call, nbytes)
    run, repeats = made.run, max(2, min(50, (4 << 20) // max(1, nbytes)))
    run()
    world.barrier()
    start = perf_counter()
    for _ in range(repeats):
        run()
    seconds = (perf_counter() - start) / repeats
    made.close()
    return seconds


_TASKS: dict[str, Callable[..., Any]] = {"check": _check, "run": _seconds}


@dataclass
class _Call:
    """Call of a transport that is timed, with its buffers; each rank contributes `rank + 1`."""

    world: Transport
    call: str
    nbytes: int
    result: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        import torch

        rank, size = self.world.rank, self.world.size
        self.elements = max(1, self.nbytes // 4)
        self.mine = torch.full([self.elements], rank + 1.0)
        self.like = torch.empty_like(self.mine)
        self.rows = torch.full([size, self.elements], rank + 1.0)
        self.others = torch.empty_like(self.rows)
        self.text = bytes([rank + 1]) * self.nbytes
        self.next, self.before = (rank + 1) % size, (rank - 1) % size

    @cached_property
    def channel(self) -> Channel:
        """Channel that goes from this rank to the next; the first run makes it."""
        sends, recvs = [(self.next, self.mine)], [(self.before, self.like)]
        return self.world.channel(sends, recvs, tag=7)

    @property
    def run(self) -> Callable[[], None]:
        """Returns a function that makes the call once."""
        # Looked up each time: a stored bound method would make a cycle, and keep the buffers.
        return getattr(self, "_" + self.call.replace(", ", "_"))

    def check(self) -> None:
        """Runs the call and compares this rank's result with the expected one."""
        import torch

        size = self.world.size
        self.run()
        total = size * (size + 1) / 2
        every = torch.arange(1.0, size + 1)
        wanted = {
            "barrier": None,
            "send, recv": self.before + 1.0,
            "channel": self.before + 1.0,
            "broadcast": 1.0,
            "all_gather": every,
            "all_gather_async": every,
            "all_to_all": every,
            "reduce_scatter_async": total,
            "all_reduce": total,
            "all_reduce_async": total,
            "broadcast_bytes": bytes([1]) * self.nbytes,
            "all_gather_bytes": [bytes([r + 1]) * self.nbytes for r in range(size)],
        }[self.call]
        given = self.result
        if isinstance(wanted, torch.Tensor):
            rows = torch.stack(list(given)).view(size, -1)
            right = torch.equal(rows, wanted[:, None].expand(size, self.elements))
        elif isinstance(wanted, float):
            right = bool((given == wanted).all())
        else:
            right = given == wanted
        if not right:
            raise SystemExit(f"{self.call} over {self.world.name} gave a wrong result")

    def close(self) -> None:
        """Releases the channel, if there is one."""
        if self.call == "channel":
            self.channel.close()

    def _barrier(self) -> None:
        self.world.barrier()

    def _send_recv(self) -> None:
        self.world.send(self.mine, self.next)
        self.world.recv(self.like, self.before)
        self.result = self.like

    def _channel(self) -> None:
        self.channel.start()
        self.channel.wait()
        self.result = self.like

    def _broadcast(self) -> None:
        self.world.broadcast(self.mine)
        self.result = self.mine

    def _all_gather(self) -> None:
        self.result = self.world.all_gather(self.mine)

    def _all_gather_async(self) -> None:
        self.world.all_gather_async(self.mine, self.others).wait()
        self.result = self.others

    def _all_to_all(self) -> None:
        self.world.all_to_all(list(self.rows), list(self.others))
        self.result = self.others

    def _reduce_scatter_async(self) -> None:
        self.world.reduce_scatter_async(self.rows, self.like).wait()
        self.result = self.like

    def _all_reduce(self) -> None:
        self.world.all_reduce(self.mine)
        self.result = self.mine

    def _all_reduce_async(self) -> None:
        self.world.all_reduce_async(self.mine).wait()
        self.result = self.mine

    def _broadcast_bytes(self) -> None:
        self.result = self.world.broadcast_bytes(self.text if self.world.rank == 0 else None)

    def _all_gather_bytes(self) -> None:
        self.result = self.world.all_gather_bytes(self.text)


if __name__ == "__main__":
    main()
