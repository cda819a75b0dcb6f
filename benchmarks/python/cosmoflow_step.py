"""A training step of CosmoFlow (forward, backward, Adam) on 1 rank and split over several.

Beside plain torch, and beside the no-exchange bound: the same shards, kernels and optimizer on all
ranks at once, with transports that fall silent. From runs with all, with some and with none of the
messages, a round apart, come the cost of halos and statistics over the bound, and what the
reduction of the gradients costs beside a bare MPI all-reduce of their bytes. Batch norm is on (its
statistics span the ranks), dropout off. One thread a rank; fresh data each step; loss and gradients
of all that exchange are first compared with torch in double precision.

    python benchmarks/python/cosmoflow_step.py --width 128
    python benchmarks/python/cosmoflow_step.py --width 64 --ranks 2 4 8
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import jobs

TOLERANCE = 5e-3
"""Of pydist's loss and gradients; plain torch in single precision may be ten times as far off."""
SPLITS = {
    1: {"": (1, 1, 1)},
    2: {"depth": (2, 1, 1), "height": (1, 2, 1), "width": (1, 1, 2)},
    4: {"depth × height": (2, 2, 1)},
    8: {"depth × height × width": (2, 2, 2)},
}
COSTS = {
    "name": "",
    "faster_than_torch": "torch 2 threads / it",
    "halo_and_statistics": "halo + statistics / bound",
    "gradients": "gradients, s",
    "all_reduce": "bare all-reduce, s",
    "ratio": "ratio",
    "over_2_ranks": "over 2 ranks",
    "floor": "floor",
}
FULL, HALO, BOUND = "", ", gradients not reduced", ", nothing exchanged"


@dataclass(frozen=True)
class Entry:
    """A contestant: in which job it runs, and how it is made there."""

    job: str
    title: str
    threads: int = 1
    onednn: bool = False
    spatial: tuple[int, int, int] | None = None
    silent: str = FULL
    share: str = "auto"
    allreduce: bool = False

    @property
    def exact(self) -> bool:
        """Whether its results are those of one device."""
        return not self.allreduce and self.silent == FULL


def entries(ranks: Sequence[int], quick: bool = False) -> list[Entry]:
    """All contestants; in a quick run one of each kind."""
    made = [
        Entry("plain", "plain torch, 2 threads", 2),
        Entry("plain", "plain torch, 1 thread", 1),
        Entry("plain-malloc", "plain torch, 2 threads + malloc", 2),
        Entry("plain-malloc", "plain torch, 2 threads + malloc + oneDNN", 2, True),
    ][: 1 if quick else None]
    for count in ranks:
        for name, spatial in list(SPLITS[count].items())[: 1 if quick else None]:
            title = f"pydist, {count} ranks, {name}" if name else "pydist, 1 rank"
            for silent in (FULL, HALO, BOUND) if count > 1 else (FULL,):
                made.append(Entry(f"split-{count}", title + silent, spatial=spatial, silent=silent))
        if count > 1:
            name, spatial = next(iter(SPLITS[count].items()))
            title = f"pydist, {count} ranks, {name}, optimizer's step not shared"
            made.append(Entry(f"split-{count}", title, spatial=spatial, share="never"))
            title = f"bare MPI all-reduce of the gradients, {count} ranks"
            made.append(Entry(f"split-{count}", title, allreduce=True))
    return made


# -- the driver -----------------------------------------------------------------------------


def main() -> None:
    parser = common.parser(__doc__, rounds=6)
    parser.add_argument("--width", type=int, default=64, help="edge of the cube (64)")
    parser.add_argument("--batch", type=int, default=1, help="samples a step (1)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=sorted(SPLITS))
    parser.add_argument("--no-batch-norm", action="store_true", help="leave out batch norm")
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    width, rounds = (32, 2) if options.quick else (options.width, options.rounds)
    setting = {"width": width, "batch": options.batch, "batch_norm": not options.no_batch_norm}

    def start(ranks: int, threads: int, malloc: bool) -> Any:
        text = json.dumps({**setting, "malloc": malloc})
        return lambda: jobs.Job(__file__, ranks, ["--worker", text], options.mpi, threads)

    known = {"plain": start(1, 2, False), "plain-malloc": start(1, 2, True)}
    known.update({f"split-{count}": start(count, 1, True) for count in options.ranks})
    all_of_them = entries(options.ranks, options.quick)
    used = {e.job for e in all_of_them}
    with jobs.running(**{name: job for name, job in known.items() if name in used}) as started:
        library = started[f"split-{options.ranks[-1]}"].ask("library")[0]
        described = common.machine(mpi_library=library)
        reference = started["plain"].ask("reference")[0]
        errors = {}
        for entry in all_of_them:
            answers = started[entry.job].ask("check", entry=entry)
            errors[entry] = compare(entry, answers, reference)
        seconds = jobs.interleave(
            all_of_them,
            rounds,
            lambda e, seed: max(started[e.job].ask("step", title=e.title, seed=seed)),
        )
        usage = {e: max(started[e.job].ask("usage", title=e.title)) for e in all_of_them}
        kept = {
            e.title: max(started[e.job].ask("kept", title=e.title))
            for e in all_of_them
            if e.silent != FULL
        }
    if not all(kept.values()):
        raise SystemExit(f"a silent contestant was not asked to send anything: {kept}")
    rows = [
        {
            "name": e.title,
            "job": e.job,
            **common.summary(seconds[e]),
            "cpu": usage[e][0],
            "page_faults": usage[e][1],
            "error": errors[e],
        }
        for e in all_of_them
    ]
    print(f"CosmoFlow {width}³, batch {options.batch}, seconds a step, {rounds} rounds")
    head = ("", "median", "min", "1st quartile", "3rd", "CPU s", "page faults", "error")
    cells = [
        (r["name"], r["median"], r["min"], *r["quartiles"], r["cpu"], r["page_faults"], r["error"])
        for r in rows
    ]
    common.show(head, cells)
    costs = cost_rows(all_of_them, seconds)
    print("\nwhat the exchanges cost (paired by round)")
    common.show(tuple(COSTS.values()), [tuple(cost.values()) for cost in costs])
    result = {"machine": described, **setting, "rows": rows, "costs": costs, "bytes_kept": kept}
    common.write(result, f"cosmoflow_step_{width}", options)


def cost_rows(
    all_of_them: Sequence[Entry], seconds: dict[Entry, list[float]]
) -> list[dict[str, Any]]:
    """For each split: what halos and statistics, and what the gradients add; what more ranks cost.

    With more ranks than cores the floor is the bound on as many ranks: it has their thinner shards
    and their crowded cores, and sends nothing. Both are shown over the first split on 2 ranks.
    """
    by_title = {e.title: seconds[e] for e in all_of_them}
    median = {title: common.summary(taken)["median"] for title, taken in by_title.items()}
    bare = {e.job: median[e.title] for e in all_of_them if e.allreduce}
    two = next((median[e.title] for e in all_of_them if e.job == "split-2" and e.exact), None)
    found = []
    for e in all_of_them:
        if e.spatial is None or e.silent != FULL or e.share == "never":
            continue
        row = dict.fromkeys(COSTS)
        row["name"] = e.title
        row["faster_than_torch"] = median["plain torch, 2 threads"] / median[e.title]
        if math.prod(e.spatial) > 1:
            halo, bound = by_title[e.title + HALO], by_title[e.title + BOUND]
            lost = common.paired(halo, bound)
            row["halo_and_statistics"] = 1 + lost / median[e.title + BOUND]
            row["gradients"] = common.paired(seconds[e], halo)
            row["all_reduce"] = bare[e.job]
            row["ratio"] = row["gradients"] / bare[e.job]
            if two is not None:
                row["over_2_ranks"] = median[e.title] / two
                row["floor"] = median[e.title + BOUND] / two
        found.append(row)
    return found


def compare(
    entry: Entry, answers: Sequence[dict[str, Any]], reference: dict[str, Any]
) -> float | None:
    """The largest error of loss and gradients, relative to each tensor's largest value."""
    if not entry.exact:
        return None
    error = max(abs(a["loss"] - reference["loss"]) / abs(reference["loss"]) for a in answers)
    largest = max(float(g.abs().max()) for g in reference["grads"])
    for mine, true in zip(answers[0]["grads"], reference["grads"], strict=True):
        scale = max(float(true.abs().max()), 1e-3 * largest)
        error = max(error, float((mine.double() - true).abs().max()) / scale)
    allowed = TOLERANCE if entry.spatial else 10 * TOLERANCE
    if not error < allowed:
        raise SystemExit(f"{entry.title} is wrong: its error is {error:.1e}, above {allowed}")
    return error


# -- the ranks ------------------------------------------------------------------------------


def work(width: int, batch: int, batch_norm: bool, malloc: bool) -> None:
    """A rank of one of the jobs."""
    import pydist

    world = pydist.init(keep_freed_memory=malloc).world
    ranks = _Ranks(world, width, batch, batch_norm)
    jobs.serve(world.rank, lambda what, **details: getattr(ranks, what)(**details))


class _Ranks:
    def __init__(self, world: Any, width: int, batch: int, batch_norm: bool) -> None:
        self._world, self._width, self._batch = world, width, batch
        self._batch_norm = batch_norm
        self._meter = jobs.Meter()
        self._made: dict[str, Any] = {}

    def library(self) -> str:
        return jobs.library(self._world)

    def check(self, entry: Entry) -> dict[str, Any]:
        """Makes a contestant and runs its first step."""
        made = self._made[entry.title] = self._make(entry)
        made.prepare(*self._draw(0))
        loss, grads = made.step(check=True)
        return {"loss": loss, "grads": grads if self._world.rank == 0 and entry.exact else None}

    def step(self, title: str, seed: int) -> float:
        made = self._made[title]
        made.prepare(*self._draw(seed))
        self._world.barrier()
        return self._meter.measure(title, made.step)

    def usage(self, title: str) -> tuple[float, float]:
        return self._meter.usage(title)

    def kept(self, title: str) -> int:
        """Bytes that a silent contestant was given to send."""
        return self._made[title].kept()

    def reference(self) -> dict[str, Any]:
        """Plain torch in double precision."""
        import torch

        torch.set_num_threads(common.cores())
        model = self._model().double()
        x, target = self._draw(0)
        loss = torch.nn.functional.mse_loss(model(x.double()), target.double())
        loss.backward()
        return {"loss": loss.item(), "grads": [p.grad for p in model.parameters()]}

    def _draw(self, seed: int) -> tuple[Any, Any]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        shape = (self._batch, 4, *(self._width,) * 3)
        x = torch.empty(shape).uniform_(-1, 1, generator=generator)
        return x, torch.empty(self._batch, 4).uniform_(-1, 1, generator=generator)

    def _model(self) -> Any:
        import torch

        from pydist.models import CosmoFlow

        torch.manual_seed(0)
        return CosmoFlow(self._width, batch_norm=self._batch_norm, dropout=0.0)

    def _make(self, entry: Entry) -> Any:
        import cosmoflow_contestants as c

        if entry.allreduce:
            return c.AllReduce(self._model())
        if entry.spatial is None:
            return c.Plain(self._model(), entry.threads, entry.onednn)
        halo, gradients = entry.silent == BOUND, entry.silent != FULL
        return c.Pydist(self._model(), self._world, entry.spatial, halo, gradients, entry.share)


if __name__ == "__main__":
    sys.exit(main())
