"""Measures a training step of CosmoFlow (forward, backward, Adam) on 1 rank and split over more.

The references are plain torch, and the no-exchange bound: the same shards, kernels and optimizer on
all ranks, with silent transports. Runs with all, some and none of the messages, in the same rounds,
give the cost of halos and statistics over the bound, and that of reducing gradients: the difference
of steps, compared with a bare MPI all-reduce of all their bytes; and the waits, compared with an
all-reduce of the exposed bytes (gradients in flight at the end of backward, and parameters that the
ranks then gather). Batch norm is on (its statistics span the ranks), dropout off. One thread per
rank; fresh data each step; loss and gradients of all contestants that exchange are first compared
with torch in double precision: their error may be at most four times that of plain torch in single
precision.

    python benchmarks/python/cosmoflow_step.py --width 128
    python benchmarks/python/cosmoflow_step.py --width 64 --ranks 2 4 8
    python benchmarks/python/cosmoflow_step.py --width 64 --ranks 2 4 8 --threads
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import common
import jobs
from step_ranks import StepRanks

TOLERANCE = 5e-3
"""Maximum error of loss and gradients; that of single-precision torch is 2e-3 at 64³."""
FACTOR, FLOOR = 4, 1e-4
"""Maximum error: this many times that of plain torch, or `FLOOR` if larger."""
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
    "exposed_mb": "exposed MB",
    "exposed_gradients": "waited, s",
    "exposed_all_reduce": "bare all-reduce, s",
    "exposed_ratio": "ratio",
    "over_2_ranks": "over 2 ranks",
    "floor": "floor",
}
FULL, HALO, BOUND = "", ", gradients not reduced", ", nothing exchanged"
ALL = "all gradients"
EXPOSED = ", bare all-reduce of what stays exposed"


@dataclass(frozen=True)
class Entry:
    """Contestant that a job runs, with its options."""

    job: str
    title: str
    threads: int = 1
    onednn: bool = False
    spatial: tuple[int, int, int] | None = None
    silent: str = FULL
    share: Literal["auto", "never"] = "auto"
    allreduce: str = ""
    """Size of a bare all-reduce: `ALL`, or another contestant's title for its exposed bytes."""

    @property
    def exact(self) -> bool:
        """Whether the results are those of one device."""
        return not self.allreduce and self.silent == FULL


def entries(ranks: Sequence[int], quick: bool = False) -> list[Entry]:
    """Returns all contestants; in a quick run one of each kind."""
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
                made.append(Entry(f"split-{count}", title + EXPOSED, allreduce=title))
        if count > 1:
            name, spatial = next(iter(SPLITS[count].items()))
            title = f"pydist, {count} ranks, {name}, optimizer's step not shared"
            made.append(Entry(f"split-{count}", title, spatial=spatial, share="never"))
            title = f"bare all-reduce of the gradients, {count} ranks"
            made.append(Entry(f"split-{count}", title, allreduce=ALL))
    return made


# -- the driver -----------------------------------------------------------------------------


def main() -> None:
    parser = common.parser(__doc__, rounds=6)
    parser.add_argument("--width", type=int, default=64, help="edge of the cube (64)")
    parser.add_argument("--batch", type=int, default=1, help="samples a step (1)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=sorted(SPLITS))
    parser.add_argument("--no-batch-norm", action="store_true", help="leave out batch norm")
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--threads", action="store_true", help="ranks are threads of one process")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    width, rounds = (32, 2) if options.quick else (options.width, options.rounds)
    setting = {"width": width, "batch": options.batch, "batch_norm": not options.no_batch_norm}

    def start(ranks: int, threads: int, malloc: bool) -> Any:
        as_threads = ranks if options.threads and ranks > 1 else 0
        text = json.dumps({**setting, "malloc": malloc, "as_threads": as_threads})
        mpi = "threads" if as_threads else options.mpi
        return lambda: jobs.Job(__file__, ranks, ["--worker", text], mpi, threads)

    known = {"plain": start(1, 2, False), "plain-malloc": start(1, 2, True)}
    known.update({f"split-{count}": start(count, 1, True) for count in options.ranks})
    all_of_them = entries(options.ranks, options.quick)
    used = {e.job for e in all_of_them}
    with jobs.running(**{name: job for name, job in known.items() if name in used}) as started:
        library = started[f"split-{options.ranks[-1]}"].ask("library")[0]
        described = common.machine(mpi_library=library)
        reference = started["plain"].ask("reference")[0]
        errors: dict[Entry, float | None] = {}
        for entry in all_of_them:
            answers = started[entry.job].ask("check", entry=entry)
            errors[entry] = compare(entry, answers, reference, next(iter(errors.values()), None))
        seconds = jobs.interleave(
            all_of_them,
            rounds,
            lambda e, seed: max(started[e.job].ask("step", title=e.title, seed=seed)),
        )
        waited = {
            e.title: max(started[e.job].ask("exposed_seconds", title=e.title)) for e in all_of_them
        }
        exposed = {
            e.allreduce: started[e.job].ask("nbytes", title=e.title)[0]
            for e in all_of_them
            if e.allreduce
        }
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
    costs = cost_rows(all_of_them, seconds, waited, exposed)
    print("\nwhat the exchanges cost (paired by round)")
    common.show(tuple(COSTS.values()), [tuple(cost.values()) for cost in costs])
    setting["ranks_are"] = "threads" if options.threads else "processes"
    result = {"machine": described, **setting, "rows": rows, "costs": costs, "bytes_kept": kept}
    name = "cosmoflow_threads" if options.threads else "cosmoflow_step"
    common.write(result, f"{name}_{width}", options)


def cost_rows(
    all_of_them: Sequence[Entry],
    seconds: dict[Entry, list[float]],
    waited: dict[str, float],
    exposed: dict[str, int],
) -> list[dict[str, Any]]:
    """Returns the costs of halos, statistics and gradients, and of more ranks, for each split.

    Args:
        all_of_them: the contestants.
        seconds: times of each contestant by round.
        waited: seconds that a step waits for gradients and parameters, by title.
        exposed: bytes that a step waits for, by title.

    With more ranks than cores, the floor is the bound on the same number of ranks: it has the
    same thin shards and crowded cores, without messages. Both are relative to the first split on 2
    ranks.
    """
    by_title = {e.title: seconds[e] for e in all_of_them}
    median = {title: common.summary(taken)["median"] for title, taken in by_title.items()}
    bare = {e.job: median[e.title] for e in all_of_them if e.allreduce == ALL}
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
            row["exposed_mb"] = exposed[e.title] / 1e6
            row["exposed_gradients"] = waited[e.title]
            row["exposed_all_reduce"] = median[e.title + EXPOSED]
            row["exposed_ratio"] = waited[e.title] / median[e.title + EXPOSED]
            if two is not None:
                row["over_2_ranks"] = median[e.title] / two
                row["floor"] = median[e.title + BOUND] / two
        found.append(row)
    return found


def compare(
    entry: Entry,
    answers: Sequence[dict[str, Any]],
    reference: dict[str, Any],
    of_torch: float | None,
) -> float | None:
    """Returns the largest error of loss and gradients, relative to each tensor's largest value.

    Args:
        entry: the contestant.
        answers: answers of its ranks.
        reference: results in double precision.
        of_torch: error of plain torch; None if the contestant is plain torch.

    Raises:
        SystemExit: the error is too large.
    """
    if not entry.exact:
        return None
    error = max(abs(a["loss"] - reference["loss"]) / abs(reference["loss"]) for a in answers)
    largest = max(float(g.abs().max()) for g in reference["grads"])
    for mine, true in zip(answers[0]["grads"], reference["grads"], strict=True):
        scale = max(float(true.abs().max()), 1e-3 * largest)
        error = max(error, float((mine.double() - true).abs().max()) / scale)
    allowed = TOLERANCE
    if of_torch is not None:
        allowed = min(TOLERANCE, max(FLOOR, FACTOR * of_torch))
    if not error < allowed:
        raise SystemExit(f"{entry.title} is wrong: its error is {error:.1e}, above {allowed:.1e}")
    return error


# -- the ranks ------------------------------------------------------------------------------


_MAKING = threading.Lock()  # of models: threads share the random numbers


def work(width: int, batch: int, batch_norm: bool, malloc: bool, as_threads: int) -> None:
    """Runs a rank of one of the jobs, or all of them."""
    import torch

    import pydist
    from pydist import memory

    def rank(world: Any) -> None:
        ranks = _Ranks(world, width, batch, batch_norm, bool(as_threads))
        jobs.serve(world.rank, lambda what, **details: getattr(ranks, what)(**details))

    if as_threads:
        torch.set_num_threads(1)
        if malloc:
            memory.keep_freed_memory()
        pydist.run_local(rank, as_threads, timeout=1e6)
    else:
        rank(pydist.init(keep_freed_memory=malloc).world)


class _Ranks(StepRanks):
    def __init__(
        self, world: Any, width: int, batch: int, batch_norm: bool, is_thread: bool
    ) -> None:
        super().__init__(world, is_thread)
        self._width, self._batch = width, batch
        self._batch_norm = batch_norm
        self._exposed_seconds: dict[str, list[float]] = {}

    def step(self, title: str, seed: int) -> float:
        made = self._made[title]
        before = made.exposed_seconds
        taken = super().step(title, seed)
        self._exposed_seconds.setdefault(title, []).append(made.exposed_seconds - before)
        return taken

    def exposed_seconds(self, title: str) -> float:
        """Returns the median time that a step waits for gradients and parameters, in seconds."""
        return statistics.median(self._exposed_seconds[title])

    def nbytes(self, title: str) -> int:
        """Returns the size of a bare all-reduce, in bytes."""
        return self._made[title].nbytes

    def _loss(self, output: Any, target: Any) -> Any:
        import torch

        return torch.nn.functional.mse_loss(output, target)

    def _draw(self, seed: int) -> tuple[Any, Any]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        shape = (self._batch, 4, *(self._width,) * 3)
        x = torch.empty(shape).uniform_(-1, 1, generator=generator)
        return x, torch.empty(self._batch, 4).uniform_(-1, 1, generator=generator)

    def _model(self) -> Any:
        import torch

        from pydist.models import CosmoFlow

        with _MAKING:
            torch.manual_seed(0)
            return CosmoFlow(self._width, batch_norm=self._batch_norm, dropout=0.0)

    def _make(self, entry: Entry) -> Any:
        import cosmoflow_contestants as c

        if entry.allreduce == ALL:
            return c.AllReduce(self._world, sum(p.numel() for p in self._model().parameters()))
        if entry.allreduce:
            return c.AllReduce(self._world, self._exposed(self._made[entry.allreduce]))
        if entry.spatial is None:
            return c.Plain(self._model(), entry.threads, entry.onednn)
        halo, gradients = entry.silent == BOUND, entry.silent != FULL
        return c.Pydist(self._model(), self._world, entry.spatial, halo, gradients, entry.share)

    def _exposed(self, made: Any) -> int:
        """Returns the number of exposed elements in a step, the maximum over all ranks."""
        import torch

        made.prepare(*self._draw(1))
        elements = torch.tensor([int(made.exposed()) // 4])
        self._world.all_reduce(elements, "max")
        return int(elements)


if __name__ == "__main__":
    main()
