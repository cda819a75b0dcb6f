"""Compares implementations of four 3×3×3 convolutions with ReLU, split over 2 ranks.

4→16→16→16→16 channels, padding 1, batch 1, forward and backward on fresh data, dL/dy in the layout
of y; 2 ranks with one thread each, split over depth, and plain torch on one process. Two sets of
processes run side by side, one with the C library's default malloc and one with pydist's settings
("+ malloc"); all contestants take turns, one step per round. With "+ malloc + oneDNN", "blocked"
and "channels-last", ReLU works in place as well. Every result is first compared with torch in
double precision; for contestants without exchanges, only where exchanges have no effect.

    python benchmarks/python/conv_stack.py --width 64

Packages that are compared if importable: physicsnemo (ShardTensor), distconv (LBANN). distdl is not
included: it is not on the package index.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
import jobs

CHANNELS = 16
INPUTS = 4
TOLERANCE = 5e-3
"""Maximum error of every contestant. Gradients at 128³ are sums of random terms, for which
single-precision torch itself has an error of 1e-3."""
FACTOR, FLOOR = 4, 1e-4
"""Maximum error: this many times that of plain torch, or `FLOOR` if larger."""


@dataclass(frozen=True)
class Entry:
    """Contestant that a job runs, with the name of its way to run the stack."""

    job: str
    way: str
    title: str
    exchanges: bool = True


ENTRIES = (
    Entry("plain", "torch, 2 threads", "plain torch, 1 process, 2 threads"),
    Entry("plain", "torch, 1 thread", "plain torch, 1 process, 1 thread"),
    Entry("plain-malloc", "torch, 2 threads", "plain torch, 2 threads + malloc"),
    Entry("plain-malloc", "onednn, 2 threads", "plain torch, 2 threads + malloc + oneDNN"),
    Entry("split", "gloo", "handwritten, gloo"),
    Entry("split-malloc", "gloo", "handwritten, gloo + malloc"),
    Entry("split-malloc", "gloo, onednn", "handwritten, gloo + malloc + oneDNN"),
    Entry("split", "mpi", "receive-and-concatenate, MPI"),
    Entry("split-malloc", "mpi", "receive-and-concatenate, MPI + malloc"),
    Entry("split-malloc", "mpi, onednn", "receive-and-concatenate, MPI + malloc + oneDNN"),
    Entry("split", "shardtensor", "physicsnemo ShardTensor"),
    Entry("split-malloc", "shardtensor", "physicsnemo ShardTensor + malloc"),
    Entry("split", "distconv", "LBANN DistConv"),
    Entry("split-malloc", "distconv", "LBANN DistConv + malloc"),
    Entry("split", "dtensor", "torch DTensor"),
    Entry("split", "bound", "no exchange, torch's conv3d", False),
    Entry("split", "bound, onednn", "no exchange, oneDNN", False),
    Entry("split-malloc", "bound", "no exchange, torch's conv3d + malloc", False),
    Entry("split-malloc", "bound, onednn", "no exchange, oneDNN + malloc", False),
    Entry("split-malloc", "bound, blocked", "no exchange, oneDNN-blocked + malloc", False),
    Entry("split-malloc", "bound, last", "no exchange, channels-last + malloc", False),
    Entry("split-malloc", "pydist, quiet", "no exchange, pydist", False),
    Entry("split", "pydist", "pydist, malloc as it comes"),
    Entry("split-malloc", "pydist", "pydist"),
    Entry("split-malloc", "pydist, in place", "pydist, in-place ReLU"),
)
PYDIST = ENTRIES[-2]


# -- the driver -----------------------------------------------------------------------------


def main() -> None:
    parser = common.parser(__doc__, rounds=6)
    parser.add_argument("--width", type=int, default=64, help="edge of the cube (64)")
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--only", nargs="+", default=[], help="parts of titles: only these run")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    width, rounds = (16, 2) if options.quick else (options.width, options.rounds)
    entries = [e for e in ENTRIES if not options.only or any(o in e.title for o in options.only)]
    entries += [] if PYDIST in entries else [PYDIST]

    def start(name: str, ranks: int, threads: int) -> Callable[[], jobs.Job]:
        settings = json.dumps({"width": width, "malloc": name.endswith("malloc")})
        return lambda: jobs.Job(__file__, ranks, ["--worker", settings], options.mpi, threads)

    known = {
        "plain": start("plain", 1, 2),
        "plain-malloc": start("plain-malloc", 1, 2),
        "split": start("split", 2, 1),
        "split-malloc": start("split-malloc", 2, 1),
    }
    used = {"plain", *(e.job for e in entries)}
    with jobs.running(**{name: job for name, job in known.items() if name in used}) as started:
        described = common.machine(mpi_library=started[PYDIST.job].ask("library")[0])
        reference = started["plain"].ask("reference")[0]
        able, errors, refused = [], {}, []
        for entry in entries:
            answers = started[entry.job].ask("check", way=entry.way)
            reasons = [a["reason"] for a in answers if "reason" in a]
            if reasons:
                refused.append({"name": entry.title, "reason": reasons[0]})
                continue
            errors[entry] = compare(answers, reference, entry.exchanges, width)
            able.append(entry)
        check(errors)
        seconds = jobs.interleave(
            able,
            rounds,
            lambda e, seed: max(started[e.job].ask("step", way=e.way, seed=seed)),
            warm_up=0,  # done by the check
        )
        usage = {e: max(started[e.job].ask("usage", way=e.way)) for e in able}
    own = common.summary(seconds[PYDIST])["median"]
    rows = [
        {
            "name": e.title,
            "job": e.job,
            "way": e.way,
            **common.summary(seconds[e]),
            "over_pydist": common.summary(seconds[e])["median"] / own,
            "cpu": usage[e][0],
            "page_faults": usage[e][1],
            "error": errors[e],
        }
        for e in able
    ]
    print(f"{width}³, seconds a step, {rounds} rounds")
    head = ("", "median", "min", "1st quartile", "3rd", "over pydist's", "CPU s", "page faults")
    names = ("over_pydist", "cpu", "page_faults", "error")
    cells = [
        (r["name"], r["median"], r["min"], *r["quartiles"], *(r[name] for name in names))
        for r in rows
    ]
    common.show((*head, "error"), cells)
    for each in refused:
        print(f"not run: {each['name']}: {each['reason']}")
    result = {"machine": described, "width": width, "rows": rows, "not_run": refused}
    common.write(result, f"conv_stack_{width}", options)


def compare(
    answers: Sequence[dict[str, Any]], reference: dict[str, Any], exchanges: bool, width: int
) -> float:
    """Returns a contestant's largest error, relative to each reference tensor's largest value."""
    import torch

    planes = torch.cat([answer["planes"] for answer in answers])
    wanted = reference["planes"]
    if not exchanges:  # values that depend on the neighbor's planes are wrong
        cut, reach = width // 2, min(4, width // 2 - 1)
        apart = torch.ones(width, dtype=torch.bool)
        apart[cut - reach : cut + reach] = False
        planes, wanted = planes[apart], wanted[apart]
    error = off(planes, wanted)
    if exchanges:
        for answer in answers:
            for mine, true in zip(answer["grads"], reference["grads"], strict=True):
                error = max(error, off(mine, true))
    return error


def check(errors: dict[Entry, float]) -> None:
    """Checks all contestants against the same limit.

    Raises:
        SystemExit: a contestant is too far from double precision.
    """
    of_torch = [error for entry, error in errors.items() if entry.job.startswith("plain")]
    limit = min(TOLERANCE, max(FLOOR, FACTOR * of_torch[0])) if of_torch else TOLERANCE
    for entry, error in errors.items():
        if not error < limit:
            raise SystemExit(f"{entry.title} is wrong: its error is {error:.1e}, above {limit:.1e}")


def off(mine: Any, true: Any) -> float:
    return float((mine.double() - true).abs().max() / true.abs().max())


# -- the ranks ------------------------------------------------------------------------------


def work(width: int, malloc: bool) -> None:
    """Runs a rank of one of the jobs."""
    import torch

    import pydist

    warnings.simplefilter("ignore")  # of the packages compared
    world = pydist.init(keep_freed_memory=malloc).world
    ranks = _Ranks(world, width, torch)
    jobs.serve(world.rank, lambda what, **details: getattr(ranks, what)(**details))


class _Ranks:
    def __init__(self, world: Any, width: int, torch: Any) -> None:
        self._world, self._width, self._torch = world, width, torch
        self._meter = jobs.Meter()
        self._made: dict[str, Any] = {}
        self._strides: dict[str, tuple[int, ...]] = {}

    def library(self) -> str:
        return jobs.library(self._world)

    def check(self, way: str) -> dict[str, Any]:
        """Makes a contestant, runs it once, and returns enough of its results to compare them."""
        try:
            made = self._make(way)
            y = made.forward(self._input(0))
            self._strides[way] = y.stride()
            grad = self._grad(0, y.stride())
            planes = self._planes(y, grad)
            grads = [g.detach().clone() for g in made.backward(grad)]
            if way.startswith("pydist"):  # may still be autotuning
                for _ in range(2):
                    made.forward(self._input(0))
                    made.backward(grad)
        except Exception as error:
            if way not in ("shardtensor", "distconv", "dtensor"):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return {"reason": f"{type(error).__name__}: {lines[0][:200]}"}
        self._made[way] = made
        return {"planes": planes, "grads": grads}

    def step(self, way: str, seed: int) -> float:
        made = self._made[way]
        x, grad = self._input(seed), self._grad(seed, self._strides[way])
        self._world.barrier()
        return self._meter.measure(way, lambda: (made.forward(x), made.backward(grad)))

    def usage(self, way: str) -> tuple[float, float]:
        return self._meter.usage(way)

    def reference(self) -> dict[str, Any]:
        """Runs torch in double precision, in slabs of depth: its buffers are 27 × the input."""
        torch = self._torch
        from conv_contestants import network

        torch.set_num_threads(common.cores())
        model = network().double()
        x = self._input(0).double()
        for layer in model:
            x = _in_slabs(layer, x) if hasattr(layer, "weight") else layer(x)
        grad = self._grad(0, x.stride())
        planes = self._planes(x, grad)
        x.backward(grad.double())
        return {"planes": planes, "grads": [p.grad for p in model.parameters()]}

    def _make(self, way: str) -> Any:
        import conv_contestants as c

        rank, size = self._world.rank, self._world.size
        last = self._torch.channels_last_3d
        gloo, mpi = (
            lambda conv: c.by_hand(rank, size, c.exchange_gloo, conv),
            lambda conv: c.by_hand(rank, size, c.exchange_mpi, conv),
        )
        ways: dict[str, Callable[[], Any]] = {
            "torch, 1 thread": lambda: c.Plain(1),
            "torch, 2 threads": lambda: c.Plain(2),
            "onednn, 2 threads": lambda: c.Layered(c.conv_onednn, None, True, 2),
            "gloo": lambda: c.Layered(gloo(c.conv_torch), c.reduce_gloo),
            "gloo, onednn": lambda: c.Layered(gloo(c.conv_onednn), c.reduce_gloo, True),
            "mpi": lambda: c.Layered(mpi(c.conv_torch), c.reduce_mpi),
            "mpi, onednn": lambda: c.Layered(mpi(c.conv_onednn), c.reduce_mpi, True),
            "shardtensor": c.ShardTensorRival,
            "distconv": c.DistConvRival,
            "dtensor": c.DTensorRival,
            "bound": lambda: c.Layered(c.conv_torch),
            "bound, onednn": lambda: c.Layered(c.conv_onednn),
            "bound, blocked": c.Blocked,
            "bound, last": lambda: c.Layered(c.conv_onednn, None, True, memory_format=last),
            "pydist": lambda: c.Pydist(self._world),
            "pydist, in place": lambda: c.Pydist(self._world, inplace=True),
            "pydist, quiet": lambda: c.Pydist(self._world, quiet=True),
        }
        return ways[way]()

    def _input(self, seed: int) -> Any:
        return self._halves(INPUTS, 2 * seed, None)

    def _grad(self, seed: int, strides: tuple[int, ...] | None) -> Any:
        return self._halves(CHANNELS, 2 * seed + 1, strides)

    def _halves(self, channels: int, seed: int, strides: tuple[int, ...] | None) -> Any:
        """Returns this rank's part of the global tensor; a plain process has both halves."""
        torch, width = self._torch, self._width
        half = width // 2
        shape = (1, channels, half * (2 // self._world.size), width, width)
        made = torch.empty(shape)
        for i, part in enumerate(made.split(half, 2)):
            generator = torch.Generator().manual_seed(4 * seed + self._world.rank + i)
            drawn = torch.empty(part.shape).uniform_(-1, 1, generator=generator)
            part.copy_(drawn)
        if strides is None or strides == made.stride():
            return made
        return torch.empty_strided(shape, strides).copy_(made)

    def _planes(self, y: Any, grad: Any) -> Any:
        """Returns Σ y·g over each plane of depth: small, but any wrong voxel changes it."""
        pairs = zip(y.detach().unbind(2), grad.unbind(2), strict=True)
        return self._torch.stack([(a.double() * b.double()).sum() for a, b in pairs])


def _in_slabs(conv: Any, x: Any, planes: int = 16) -> Any:
    import torch
    import torch.nn.functional as F

    padded = F.pad(x, (0, 0, 0, 0, 1, 1))
    slabs = [
        F.conv3d(padded[:, :, at : at + planes + 2], conv.weight, conv.bias, padding=(0, 1, 1))
        for at in range(0, x.shape[2], planes)
    ]
    return torch.cat(slabs, 2)


if __name__ == "__main__":
    main()
