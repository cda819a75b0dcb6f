"""The largest image that a 2D U-Net trains on under a limit of memory per rank.

For each way to divide the network over ranks, the image's edge is increased until the peak of a
rank exceeds the limit. Shown is the largest edge that fits; JSON has the peaks of both, and of the
next edge, which does not fit. The peak is that of torch's allocator in a step of one image,
forward and backward, above its start: activations, their gradients and buffers, by the profiler's
events. Weights, their gradients and the optimizer's state are there before; JSON has their bytes
per rank, and with --state they count too. Memory of oneDNN and MPI does not count.

- one rank: the whole network, by pydist and by plain torch.
- naive: stages of equal numbers of layers; a skip goes through all stages between.
- model-aware: stages of equal memory, as planned; skips go directly.
- spatial: the image is cut over all ranks.
- composed: two stages of equal memory, and each cuts the image over half of the ranks.
- composed, levels: three quarters of the ranks cut the image in the levels with most pixels, on the
  way down and up, and the others in the levels between; of equal memory.

Stages are planned on the largest image whose calls one rank can measure within the limit (weights
do not count there); with --state their plan counts the state, too.

    python benchmarks/python/memory_frontier.py
    python benchmarks/python/memory_frontier.py --state --limit 192
    python benchmarks/python/memory_frontier.py --overhead   # times of 2 ranks, on an idle machine
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import common
import jobs

NETWORKS: Sequence[tuple[int, int]] = ((16, 3), (16, 4), (32, 3), (32, 4))
"""Channels of the first level, and levels."""
RANKS = (1, 2, 4, 8)
SPATIAL: Mapping[int, Sequence[int]] = {
    1: (1, 1, 1), 2: (1, 2, 1), 3: (1, 3, 1), 4: (1, 2, 2), 6: (1, 3, 2), 8: (1, 4, 2)
}  # fmt: skip
PLAIN, ONE = "plain torch", "one rank"
NAIVE, AWARE, IN_SPACE = "naive", "model-aware", "spatial"
COMPOSED, BY_LEVELS = "composed", "composed, levels"
STEP = 16
"""Between edges: images of 4 levels have multiples of 16."""
SAMPLE = 64
CLASSES = 2
PUBLISHED = {64: 2.54, 128: 1.84, 256: 1.42, 512: 1.14}
"""Time of a layer-wise parallel U-Net on 8 V100 relative to one, by edge; from slides on it."""
HEAD = ("features", "levels", "ranks", "division", "edge", "MiB", "/ one rank's", "/ naive")


def main() -> None:
    """Searches the edges, measures times, or runs a rank."""
    parser = common.parser(__doc__, rounds=7)
    parser.add_argument("--limit", type=float, default=64.0, help="MiB per rank (64)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, choices=RANKS)
    parser.add_argument("--state", action="store_true", help="count weights and Adam's state, too")
    parser.add_argument("--overhead", action="store_true", help="measure times instead")
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
    elif options.rank is not None:
        times(options)
    elif options.overhead:
        overhead(options)
    else:
        frontier(options)


# -- edges ----------------------------------------------------------------------------------


def frontier(options: argparse.Namespace) -> None:
    """Searches the largest edge of every division of every network."""
    networks = NETWORKS
    if options.quick:
        options.limit, options.ranks, networks = 2.0, [1, 4], ((4, 2),)
    machine = common.machine(threads_per_rank=1)
    rows = []
    for ranks in options.ranks:
        made = {"job": lambda n=ranks: jobs.Job(__file__, n, ["--worker"], options.mpi)}
        with jobs.running(**made) as started:
            job = started["job"]
            for features, levels in networks:
                network = {"features": features, "levels": levels}
                planned = planning_edge(job, network, options.limit) if ranks > 1 else SAMPLE
                for division in divisions(ranks):
                    row: dict[str, Any] = {**network, "ranks": ranks}
                    prepared = job.ask(
                        "prepare", division=division, edge=planned, state=options.state, **network
                    )
                    states = [each["state_mib"] for each in prepared]
                    counted = states if options.state else [0.0] * ranks
                    if max(counted) >= options.limit:
                        print(*row.values(), division, "its state exceeds the limit", sep=" | ")
                        continue
                    found = search(partial(peaks_of, job), options.limit, counted)
                    row |= {"division": division, **found}
                    row["state_mib"], row["planned_on"] = states, planned
                    row["loss"], row["plan"] = prepared[-1]["loss"], prepared[0]["plan"]
                    rows.append(row)
                    print(*row.values(), sep=" | ", flush=True)
    compare(rows)
    print(f"largest edge of an image under {options.limit:g} MiB per rank, and its peak")
    common.show(HEAD, [line(row, rows) for row in rows])
    common.show(("goal", "features", "levels", "ranks", "found", "holds"), goals(rows))
    result = {"machine": machine, "limit_mib": options.limit, "step": STEP, "rows": rows}
    name = "memory_frontier_state" if options.state else "memory_frontier"
    common.write(result, name, options)


def divisions(ranks: int) -> Sequence[str]:
    """Returns the divisions of a network over a number of ranks."""
    if ranks == 1:
        return PLAIN, ONE
    return (NAIVE, AWARE, IN_SPACE, *((COMPOSED, BY_LEVELS) if ranks > 2 else ()))


def planning_edge(job: jobs.Job, network: Mapping[str, int], limit: float) -> int:
    """Returns the largest edge of an image whose calls a rank can measure within the limit."""

    def peak(edge: int) -> list[float]:
        return job.ask("recorded", edge=edge, **network)[:1]

    edge: int = search(peak, limit, [0.0])["edge"]
    return edge


def peaks_of(job: jobs.Job, edge: int) -> list[float]:
    """Returns the peak of each rank in a step of an image."""
    return job.ask("peak", edge=edge)


def search(
    peaks: Callable[[int], list[float]], limit: float, held: Sequence[float]
) -> dict[str, Any]:
    """Returns the largest edge whose peak is within the limit, and the peaks around it.

    Args:
        peaks: returns the MiB that each rank needs at an edge.
        limit: MiB of each rank.
        held: MiB of each rank that count besides.
    """

    @cache
    def peak(edge: int) -> list[float]:
        return [own + each for own, each in zip(peaks(edge), held, strict=True)]

    edge = SAMPLE
    fits, exceeds = 0, 0
    while not fits or exceeds != fits + STEP:
        most = max(peak(edge))
        if most <= limit:
            fits = edge
        else:
            exceeds = edge
        # Activations grow with the square of the edge.
        growing = (limit - max(held)) / (most - max(held))
        guess = STEP * math.floor(edge * math.sqrt(growing) / STEP)
        guess = max(guess, fits + STEP)
        edge = min(guess, exceeds - STEP) if exceeds else guess
        if not edge:
            raise SystemExit(f"{limit} MiB are too few for an image of {STEP}²")
    return {"edge": fits, "peaks_mib": peak(fits), "next_mib": max(peak(exceeds))}


def compare(rows: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the divisions of a network have the same loss."""
    for row in rows:
        whole = found(rows, row, ranks=1, division=PLAIN)
        if whole is not None and not math.isclose(row["loss"], whole["loss"], rel_tol=1e-4):
            raise SystemExit(f"{row} has another loss than {whole}")


def found(
    rows: Sequence[Mapping[str, Any]], like: Mapping[str, Any], **other: Any
) -> Mapping[str, Any] | None:
    """Returns the row that differs from another one in some columns; `None` if there is none."""
    keys = ("features", "levels", "ranks", "division")
    wanted = {key: other.get(key, like[key]) for key in keys}
    return next((r for r in rows if all(r[k] == v for k, v in wanted.items())), None)


def line(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Returns a row of the table."""
    one = found(rows, row, ranks=1, division=ONE)
    naive = found(rows, row, division=NAIVE)
    shown = [row[key] for key in ("features", "levels", "ranks", "division", "edge")]
    ratios = [each and row["edge"] / each["edge"] for each in (one, naive)]
    return (*shown, max(row["peaks_mib"]), *ratios)


def goals(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns what was to be reached, and whether it was."""
    lines: list[tuple[Any, ...]] = []
    for aware in rows:
        if aware["division"] != AWARE:
            continue
        naive, spatial = (found(rows, aware, division=name) for name in (NAIVE, IN_SPACE))
        if naive is None or spatial is None:
            continue
        composed = [found(rows, aware, division=name) for name in (COMPOSED, BY_LEVELS)]
        where = aware["features"], aware["levels"], aware["ranks"]
        least = 4 / 3 if aware["ranks"] == max(RANKS) else 1.0
        ratio = aware["edge"] / naive["edge"]
        lines.append((f"model-aware / naive >= {least:.2f}", *where, ratio, ratio >= least))
        ratio = spatial["edge"] / aware["edge"]
        lines.append(("spatial / model-aware >= 1", *where, ratio, ratio >= 1))
        if edges := [each["edge"] for each in composed if each is not None]:
            ratio = max(edges) / max(each["edge"] for each in (aware, spatial, naive))
            lines.append(("composed / best other >= 1", *where, ratio, ratio >= 1))
    return lines


# -- times ----------------------------------------------------------------------------------


def overhead(options: argparse.Namespace) -> None:
    """Shows the time of two stages of equal memory, relative to one rank's."""
    machine = common.machine(threads_per_rank=1)
    measured = common.on_ranks(__file__, options, options.mpi)
    rows: list[dict[str, Any]] = []
    for edge, each in measured.items():
        one, aware = (common.summary(each[name]) for name in (ONE, AWARE))
        row = {"edge": int(edge), ONE: one, AWARE: aware}
        ratio = aware["median"] / one["median"]
        rows.append({**row, "ratio": ratio, "published": PUBLISHED[int(edge)]})
    print("seconds of a step of one image, U-Net of 16 channels and 4 levels, 2 ranks")
    names = ("edge", ONE, AWARE, "ratio", "published")
    cells = [[str(r["edge"]), r[ONE]["median"], r[AWARE]["median"], *map(r.get, names[3:])]
             for r in rows]  # fmt: skip
    common.show(names, cells)
    common.write({"machine": machine, "rows": rows}, "image_overhead", options)


def times(options: argparse.Namespace) -> None:
    """Writes seconds of steps by edge; the second rank waits while the first one is alone."""
    import pydist

    world = pydist.init().world
    measured = {}
    for edge in (64,) if options.quick else PUBLISHED:
        x, target = batch(edge)
        one = Contestant(world.split(world.rank, 0), ONE, 16, 4)
        aware = Contestant(world, AWARE, 16, 4)
        steps: dict[str, Callable[[], object]] = {
            ONE: partial(one.step, x, target) if world.rank == 0 else int,
            AWARE: partial(aware.step, x, target),
        }
        for step in (*steps.values(), *steps.values()):
            step()
        measured[edge] = common.in_turns(steps, options.rounds, world.barrier)
    if world.rank == 0:
        options.rank.write_text(json.dumps(measured))


# -- the ranks ------------------------------------------------------------------------------


def work() -> None:
    """Runs a rank of one of the jobs."""
    import os

    os.environ["PYDIST_TUNE"] = "0"  # kernels are the same in every run, and so is their memory
    import pydist

    world = pydist.init().world
    contestant: list[Contestant] = []

    def answer(what: str, **details: Any) -> Any:
        if what == "recorded":
            return recorded(**details) if world.rank == 0 else 0.0
        if what == "prepare":
            contestant[:] = []
            gc.collect()
            contestant.append(Contestant(world, **details))
            return contestant[0].prepare()
        return contestant[0].peak(**details)

    jobs.serve(world.rank, answer)


def recorded(features: int, levels: int, edge: int) -> float:
    """Returns the MiB that one rank needs at once to measure the calls of a network."""
    from pydist.models import UNet2d
    from pydist.stages.record import record

    model, (x, _) = UNet2d(1, CLASSES, features, levels), batch(edge)
    return common.peak(lambda: record(model, (x,), repeats=1)) / 2**20


def batch(edge: int) -> tuple[Any, Any]:
    """Returns an image and the classes of its pixels."""
    import torch

    generator = torch.Generator().manual_seed(edge)
    x = torch.rand(1, 1, edge, edge, generator=generator)
    return x, torch.randint(CLASSES, (1, edge, edge), generator=generator)


class Contestant:
    """Network that is divided over ranks in a given way.

    Args:
        world: the ranks.
        division: how it is divided.
        features: channels of the first level.
        levels: levels of the network.
        edge: of the image on which stages are planned.
        state: whether their plan counts gradients and Adam's state.
    """

    def __init__(
        self, world: Any, division: str, features: int, levels: int, edge: int = SAMPLE,
        state: bool = False,
    ) -> None:  # fmt: skip
        import torch

        import pydist
        from pydist.models import UNet2d
        from pydist.stages import Stages, pipeline

        torch.manual_seed(0)
        self.model, self.world = UNet2d(1, CLASSES, features, levels), world
        self.plan, self.run, self.mesh = "", None, None
        sample, _ = batch(edge)
        if division in (ONE, IN_SPACE):
            self.mesh = pydist.Mesh(world, 1, tuple(SPATIAL[world.size]))
            pydist.parallelize(self.model, self.mesh)
        elif division != PLAIN:
            meshes, order = meshes_of(division, world.size)
            stages = Stages(world, meshes, order=order)
            naive = equal_layers(self.model, sample, world.size)
            how: dict[str, Any] = {"balance": "memory", "state": 3.0 if state else 0.0}
            if division == NAIVE:
                how = {"cuts": naive, "skips": "relay"}
            self.mesh = stages.mesh
            self.run = pipeline(self.model, stages, sample, **how)
            self.plan = str(self.run.plan)

    def step(self, x: Any, target: Any) -> Any:
        """Runs forward and backward of a batch; returns the loss."""
        import torch

        import pydist

        entropy = torch.nn.functional.cross_entropy
        if self.mesh is not None:
            x = pydist.distribute_tensor(x, self.mesh, {2: "height", 3: "width"})
        if self.run is not None:
            return self.run.step(x, target, entropy)
        loss = entropy(self.model(x), target)
        loss.backward()
        return loss.detach()

    def prepare(self) -> dict[str, Any]:
        """Takes a step, after which the gradients exist; returns what is known of the rank."""
        loss = float(self.step(*batch(SAMPLE)))
        every = list(self.model.parameters())
        weights = sum(p.nbytes for p in every)
        trained = sum(p.nbytes for p in every if p.grad is not None)
        # Each rank has all weights; gradients, and two moments of Adam, of those that it trains.
        return {"loss": loss, "plan": self.plan, "state_mib": (weights + 3 * trained) / 2**20}

    def peak(self, edge: int) -> float:
        """Returns the peak of a step, in MiB above its start."""
        x, target = batch(edge)
        gc.collect()
        self.world.barrier()
        return common.peak(lambda: self.step(x, target)) / 2**20


def meshes_of(division: str, ranks: int) -> tuple[list[Any], Sequence[int] | None]:
    """Returns the meshes of stages, and the mesh of each stage if one has several."""
    if division == COMPOSED:
        return [{"spatial": tuple(SPATIAL[ranks // 2])}] * 2, None
    if division == BY_LEVELS:
        parts = ranks - ranks // 4, ranks // 4
        return [{"spatial": tuple(SPATIAL[n])} for n in parts], (0, 1, 0)
    return [{}] * ranks, None


def equal_layers(model: Any, sample: Any, stages: int) -> list[str]:
    """Returns the layers at which stages begin that have equally many layers."""
    import torch

    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: called.append(path))
        for path, module in model.named_modules()
        if not any(module.children())
    ]
    with torch.no_grad():
        model.eval()(sample)
    model.train()
    for hook in hooks:
        hook.remove()
    return [called[len(called) * stage // stages] for stage in range(1, stages)]


if __name__ == "__main__":
    main()
