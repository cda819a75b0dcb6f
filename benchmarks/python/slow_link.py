"""Measures a training step with each form of gradient reduction, over an emulated slow link.

Ranks of this machine train CosmoFlow; `links.SlowTransport` delays what they send to ranks on other
emulated hosts, as messages on a connection of some bandwidth and latency would be. Each round has a
step of every form at every speed, in random order. Before anything is timed, gradients of forms
that change nothing, or round once, are compared with those of the dense form.

Beside the measured step there is the time for which its bytes occupy the link. A step takes at
least that or its time without the emulation, and at most their sum: the difference is what overlap
with backward hides. Bytes are also computed from the shapes of the parameters, by the formulas of
`computed`, and must agree with those that the emulation counts.

    python benchmarks/python/slow_link.py
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

LAYOUTS: dict[str, tuple[str, int, tuple[int, int, int]]] = {
    "2 hosts of 1 rank, 2 groups": ("ab", 2, (1, 1, 1)),
    "2 hosts of 2 ranks, 4 groups": ("aabb", 4, (1, 1, 1)),
    "2 hosts of 2 ranks, 2 groups": ("aabb", 2, (2, 1, 1)),
}
"""Hosts of the ranks, number of sample groups, and the parts of a sample."""
SPEEDS: dict[str, tuple[float, float] | None] = {
    "none": None,
    "10 Gb/s": (10e9, 1e-4),
    "1 Gb/s": (1e9, 1e-4),
    "100 Mb/s": (100e6, 1e-4),
}
"""Bandwidth in bits per second, and latency in seconds."""
FORMS = ("dense", "torus", "hierarchical", "fp16", "bf16", "powersgd", "dgc")
TWO_RANKS = ("dense", "fp16", "bf16", "powersgd", "dgc")
"""Forms that are not the dense one with a rank on each host."""
TOLERANCE = {"torus": 1e-4, "hierarchical": 1e-4, "fp16": 1e-2, "bf16": 3e-2}
"""Largest error of the gradients, relative to their norm."""
RANK, DENSITY = 4, 0.001
HEAD = ("layout", "form", "MB", *(f"{name}: link, step" for name in SPEEDS))


def main() -> None:
    """Runs the layouts one after the other and shows their measurements, or runs one rank."""
    parser = common.parser(__doc__, rounds=7)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layout", default="", help="only this layout")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    rows: list[dict[str, Any]] = []
    for layout, (hosts, _, _) in LAYOUTS.items():
        if options.layout in ("", layout):
            more = ["--layout", layout]
            rows += common.on_ranks(__file__, options, ranks=len(hosts), more=more)
    common.show(HEAD, [line(row) for row in rows])
    even = break_even(shapes(options.quick))
    result = {"machine": machine, "speeds": SPEEDS, "rows": rows, "break_even": even}
    common.write(result, "slow_link", options)


def line(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a row of the table."""
    times = [
        f"{row['link'][name]:.3f}, {row['steps'][name]['median']:.3f}"
        if name in row["steps"]
        else ""
        for name in SPEEDS
    ]
    return row["layout"], row["form"], row["bytes"] / 1e6, *times


def measure(options: argparse.Namespace) -> None:
    """Measures a layout on one rank."""
    import torch
    from links import Network, SlowTransport, Speed

    import pydist
    from pydist.gradients.forms import topology

    hosts, groups, spatial = LAYOUTS[options.layout]
    world = pydist.init().world
    network = Network(options.rank.parent / "network", hosts)
    slow = SlowTransport(world, network, range(world.size))
    with common.replaced([(topology, "own_host", lambda rank: hosts[rank])]):
        mesh = pydist.Mesh(slow, groups, spatial)
        forms = FORMS if world.size > 2 else TWO_RANKS
        made = {form: Contestant(form, mesh, options.quick) for form in forms}
    counted: dict[str, float] = {}
    for form, contestant in made.items():
        for _ in range(1 if options.quick else 3):
            network.carried = 0.0
            contestant.step()
        carried = torch.tensor([network.carried])
        world.all_reduce(carried)
        counted[form] = float(carried) / len(set(hosts))
    compare(made)

    def at(speed: Speed | None, step: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            network.speed = speed
            try:
                step()
            finally:
                network.speed = None

        return run

    used = [*SPEEDS][:: 2 if options.quick else 1]
    speeds = {n: Speed(*each) if (each := SPEEDS[n]) else None for n in used}
    steps = {f"{f}, {n}": at(speed, made[f].step) for f in forms for n, speed in speeds.items()}
    times = common.in_turns(steps, options.rounds, world.barrier)
    rows = []
    for form in forms:
        plan = {
            "layout": options.layout, "form": form, "bytes": counted[form],
            "computed": computed(form, hosts, groups, shapes(options.quick)),
            "link": {n: 0.0 if s is None else s.seconds(counted[form]) for n, s in speeds.items()},
            "steps": {name: common.summary(times[f"{form}, {name}"]) for name in speeds},
        }  # fmt: skip
        rows.append(plan)
    if world.rank == 0:
        options.rank.write_text(json.dumps(rows))


class Contestant:
    """CosmoFlow that one rank trains with a form of gradient reduction."""

    def __init__(self, form: str, mesh: Any, quick: bool) -> None:
        """Makes the network, with the same weights for each form."""
        import torch

        import pydist
        from pydist.gradients import DGC, PowerSGD

        torch.manual_seed(0)
        model = network_of(quick)
        settings: dict[str, Any] = {"powersgd": PowerSGD(RANK, start=0), "dgc": DGC(DENSITY)}
        self.model = pydist.parallelize(model, mesh, gradients=settings.get(form, form))
        momentum = 0.0 if form == "dgc" else 0.9
        self._optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum, fused=True)
        draw = torch.Generator().manual_seed(mesh.data_index)
        self._x = torch.empty(1, *model.input_shape).uniform_(0, 1, generator=draw)
        self._target = torch.empty(1, 4).uniform_(-1, 1, generator=draw)
        self.first: list[Any] | None = None
        """Gradients of the first step."""

    def step(self) -> None:
        """Takes a training step."""
        import torch

        self._optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(self._x), self._target)
        loss.backward()
        if self.first is None:
            self.first = [p.grad.clone() for p in self.model.parameters()]
        self._optimizer.step()


def compare(made: dict[str, Contestant]) -> None:
    """Compares gradients with those of the dense form."""
    expected = made["dense"].first
    assert expected is not None
    for form, contestant in made.items():
        for mine, whole in zip(contestant.first or (), expected, strict=True):
            off = float((mine - whole).norm() / whole.norm())
            assert off < TOLERANCE.get(form, math.inf), f"{form}: off by {off:.1e}"
        contestant.first = []


def network_of(quick: bool) -> Any:
    """Returns the network."""
    from pydist.models import CosmoFlow

    variant: Any = "mlperf" if quick else "paper"
    return CosmoFlow(32 if quick else 64, dropout=0.0, variant=variant)


def shapes(quick: bool) -> list[tuple[int, ...]]:
    """Returns the shapes of the network's parameters."""
    return [tuple(p.shape) for p in network_of(quick).parameters()]


def compressed(form: str, given: list[tuple[int, ...]]) -> tuple[int, int]:
    """Returns elements that PowerSGD or DGC sends in compressed form, and as they are.

    PowerSGD: r (n + m) of a gradient [n, m], as two factors. DGC: positions and values.
    """
    thin = plain = 0
    for shape in given:
        n, whole = shape[0], math.prod(shape)
        m = whole // n
        if len(shape) > 1 and form == "dgc":
            thin += 2 * math.ceil(DENSITY * whole)
        elif len(shape) > 1 and whole > 2 * RANK * (n + m):
            thin += RANK * (n + m)
        else:
            plain += whole
    return thin, plain


def computed(form: str, hosts: str, groups: int, given: list[tuple[int, ...]]) -> float:
    """Returns the bytes that leave each of two hosts in a step, without small messages.

    Args:
        form: the form.
        hosts: the host of each rank, of equally many on two hosts.
        groups: number of sample groups: one rank each, or a host each.
        given: shapes of the parameters.
    """
    elements, ranks = sum(map(math.prod, given)), len(hosts)
    ring = 2 * (ranks - 1) / ranks if groups == ranks else 1
    if form in ("torus", "hierarchical"):
        return 4 * elements
    if form == "dense":
        return 4 * elements * 2 * (ranks - 1) / ranks
    if form in ("fp16", "bf16"):
        # Straight messages: each rank sends its part to all others, half of them on this host.
        return 2 * elements * (ranks / 2 if groups == ranks else 1)
    thin, plain = compressed(form, given)
    if form == "powersgd":
        return 4 * (thin + plain) * ring
    return 4 * (thin * (ranks**2 / 4 if groups == ranks else 1) + plain * ring)


def break_even(given: list[tuple[int, ...]]) -> dict[str, Any]:
    """Returns the numbers of groups from which a group sends more with DGC than with others.

    In an all-gather a group sends its T bytes to G - 1 others; in a reduction 2 (G - 1) / G of its
    row of B bytes. These are equal at G = 2 B / T.
    """
    elements = sum(map(math.prod, given))
    thin, plain = compressed("dgc", given)
    low, rest = compressed("powersgd", given)
    rows = {"dense": elements, "bf16": elements / 2, "powersgd": low + rest}
    return {
        "elements": elements, "dgc_elements": thin, "dgc_plain": plain,
        "powersgd_elements": low, "powersgd_plain": rest,
        "groups": {form: 2 * (row - plain) / thin for form, row in rows.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
