"""Measures a training step of a 3D U-Net (forward, backward, Adam) on 1 rank and split over 2.

MONAI's UNet (residual units, instance norm, PReLU, transposed convolutions of stride 2), the U-Net
of the paper, or MONAI's SwinUNETR or UNETR (split over depth), all unmodified. The references are
plain torch, and the no-exchange bound: the same shards, kernels and optimizer on both ranks, with
silent transports. Cross-entropy over three classes; one thread per rank; fresh data each step; loss
and gradients of all contestants that exchange are first compared with torch in double precision.

    python benchmarks/python/unet_step.py --network monai --width 96
    python benchmarks/python/unet_step.py --network paper --width 64
    python benchmarks/python/unet_step.py --network swin_unetr --width 96 --few
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import jobs
from step_ranks import StepRanks

CLASSES = 3
TOLERANCE = 2e-2
BOUND = ", nothing exchanged"
SPLITS = {"depth": (2, 1, 1), "height": (1, 2, 1), "width": (1, 1, 2)}
WIDTHS = {"monai": 96, "paper": 64, "swin_unetr": 64, "unetr": 96}
"""Edge of the cube, by network; at 96³ SwinUNETR fits into 24 GB only with --few."""
TRANSFORMERS = ("swin_unetr", "unetr")


@dataclass(frozen=True)
class Entry:
    """Contestant that a job runs, with its options."""

    job: str
    title: str
    threads: int = 1
    spatial: tuple[int, int, int] | None = None
    silent: bool = False

    @property
    def exact(self) -> bool:
        """Whether the results are those of one device."""
        return not self.silent


def entries(depth_only: bool, few: bool) -> list[Entry]:
    """Returns the contestants, with all splits or with one; few: torch's, and two ranks."""
    made = [
        Entry("plain", "plain torch, 2 threads", 2),
        Entry("plain-malloc", "plain torch, 2 threads + malloc", 2),
    ]
    if not few:
        made.append(Entry("one", "pydist, 1 rank", spatial=(1, 1, 1)))
    for name, spatial in list(SPLITS.items())[: 1 if depth_only else None]:
        title = f"pydist, 2 ranks, {name}"
        made.append(Entry("two", title, spatial=spatial))
        if not few:
            made.append(Entry("two", title + BOUND, spatial=spatial, silent=True))
    return made


def main() -> None:
    parser = common.parser(__doc__, rounds=4)
    parser.add_argument("--network", choices=list(WIDTHS), default="monai")
    parser.add_argument("--width", type=int, help=f"edge of the cube {WIDTHS}")
    parser.add_argument("--few", action="store_true", help="without 1 rank, and without bounds")
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    width, rounds = options.width or WIDTHS[options.network], options.rounds
    if options.quick:
        width, rounds = 64 if options.network == "swin_unetr" else 16, 2
    setting = {"network": options.network, "width": width}

    def start(ranks: int, threads: int, malloc: bool) -> Any:
        text = json.dumps({**setting, "malloc": malloc})
        return lambda: jobs.Job(__file__, ranks, ["--worker", text], options.mpi, threads)

    all_of_them = entries(options.quick or options.network in TRANSFORMERS, options.few)
    made = {
        "plain": start(1, 2, False), "plain-malloc": start(1, 2, True),
        "one": start(1, 1, True), "two": start(2, 1, True),
    }  # fmt: skip
    with jobs.running(**{name: made[name] for name in {e.job: 0 for e in all_of_them}}) as started:
        described = common.machine(mpi_library=started["two"].ask("library")[0])
        reference = started["plain"].ask("reference")[0]
        errors = {
            e: compare(e, started[e.job].ask("check", entry=e), reference) for e in all_of_them
        }
        seconds = jobs.interleave(
            all_of_them,
            rounds,
            lambda e, seed: max(started[e.job].ask("step", title=e.title, seed=seed)),
        )
        kept = [max(started[e.job].ask("kept", title=e.title)) for e in all_of_them if e.silent]
    if not all(kept):
        raise SystemExit("a silent contestant was not asked to send anything")
    median = {e.title: common.summary(seconds[e])["median"] for e in all_of_them}
    rows = []
    for e in all_of_them:
        row = {"name": e.title, "job": e.job, **common.summary(seconds[e]), "error": errors[e]}
        row["over_torch"] = median["plain torch, 2 threads"] / median[e.title]
        exact = e.spatial in SPLITS.values() and not e.silent
        bound = median.get(e.title + BOUND)
        row["of_bound"] = bound / median[e.title] if exact and bound else None
        rows.append(row)
    print(f"{options.network}, {width}³, batch 1, seconds a step, {rounds} rounds")
    columns = ("median", "min", "over_torch", "of_bound", "error")
    head = ("", "median", "min", "torch 2 threads / it", "bound / it", "error")
    common.show(head, [(r["name"], *(r[c] for c in columns)) for r in rows])
    result = {"machine": described, **setting, "rows": rows}
    common.write(result, f"unet_step_{options.network}_{width}", options)


def compare(
    entry: Entry, answers: Sequence[dict[str, Any]], reference: dict[str, Any]
) -> float | None:
    """Returns the largest error of loss and gradients, |Δ| / |reference| in the Euclidean norm.

    Not in the largest element: a ReLU whose input is zero except for rounding may go either way,
    which shows in single weights (torch's own errors are up to 2e-2). Biases before a norm have
    only rounding as gradients, so the scale of a tensor is at least 1e-3 of the largest one's.
    """
    if not entry.exact:
        return None
    error = max(abs(a["loss"] - reference["loss"]) / abs(reference["loss"]) for a in answers)
    largest = max(float(g.norm()) for g in reference["grads"])
    for mine, true in zip(answers[0]["grads"], reference["grads"], strict=True):
        scale = max(float(true.norm()), 1e-3 * largest)
        error = max(error, float((mine.double() - true).norm()) / scale)
    if not error < TOLERANCE:
        raise SystemExit(f"{entry.title} is wrong: its error is {error:.1e}, above {TOLERANCE}")
    return error


# -- the ranks ------------------------------------------------------------------------------


def work(network: str, width: int, malloc: bool) -> None:
    """Runs a rank of one of the jobs."""
    import pydist

    world = pydist.init(keep_freed_memory=malloc).world
    ranks = _Ranks(world, network, width)
    jobs.serve(world.rank, lambda what, **details: getattr(ranks, what)(**details))


def make_network(network: str, width: int) -> Any:
    """Creates a network with the same weights at every call."""
    import torch

    torch.manual_seed(0)
    if network == "paper":
        from pydist.models import UNet3d

        return UNet3d(classes=CLASSES)
    if network == "swin_unetr":
        from monai.networks.nets.swin_unetr import SwinUNETR

        return SwinUNETR(1, CLASSES, feature_size=12)
    if network == "unetr":
        from monai.networks.nets.unetr import UNETR

        return UNETR(1, CLASSES, (width,) * 3)
    from monai.networks.nets.unet import UNet

    channels = (16, 32, 64) if width < 32 else (16, 32, 64, 128, 256)
    return UNet(3, 1, CLASSES, channels, (2,) * (len(channels) - 1), num_res_units=2)


class _Ranks(StepRanks):
    def __init__(self, world: Any, network: str, width: int) -> None:
        super().__init__(world)
        self._network, self._width = network, width

    def _loss(self, output: Any, target: Any) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(output, target)

    def _draw(self, seed: int) -> tuple[Any, Any]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        shape = (1, 1, *(self._width,) * 3)
        x = torch.empty(shape).uniform_(-1, 1, generator=generator)
        return x, torch.randint(0, CLASSES, (1, *shape[2:]), generator=generator)

    def _model(self) -> Any:
        return make_network(self._network, self._width)

    def _make(self, entry: Entry) -> Any:
        import cosmoflow_contestants as c

        if entry.spatial is None:
            return c.Plain(self._model(), entry.threads, loss=self._loss)
        return c.Pydist(
            self._model(), self._world, entry.spatial, entry.silent, entry.silent, loss=self._loss
        )


if __name__ == "__main__":
    main()
