"""Training steps on two ranks of unequal speed, with even parts and with those of `pydist balance`.

Rank 1 computes every convolution twice, and so really works twice as long for the same part.
CosmoFlow 64^3 is cut along its depth, and by channels. After the search for parts, even and
balanced ones are measured in turn. The ideal is the work of both ranks, by the time of the fast
one, over the sum of the speeds, plus the communication and waiting of a step with balanced parts.

    python benchmarks/python/unequal_ranks.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Literal

import common

AXES: dict[str, dict[str, Any]] = {"depth": {"spatial": (2, 1, 1)}, "channel": {"channel": 2}}
HEAD = ("axis", "even", "s", "balanced", "s", "even / balanced", "ideal, s", "balanced / ideal")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    parser = common.parser(__doc__, rounds=5)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    rows = common.on_ranks(__file__, options)
    common.show(HEAD, [shown(row) for row in rows])
    common.write({"machine": machine, "rows": rows}, "unequal_ranks", options)


def shown(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a row of the table."""
    sizes = [" + ".join(map(str, row[name]["sizes"])) for name in ("even", "balanced")]
    even, balanced, ideal = row["even"]["seconds"], row["balanced"]["seconds"], row["ideal"]
    return row["axis"], sizes[0], even, sizes[1], balanced, even / balanced, ideal, balanced / ideal


def measure(options: argparse.Namespace) -> None:
    """Measures both axes, on one rank."""
    import pydist
    from pydist.data import UniverseOptions, generate_universes
    from pydist.train.balancing import axis_of, find_parts
    from pydist.train.balancing import measure as measured
    from pydist.train.config import Config, CosmoFlowConfig, DataConfig, MeshConfig, TrainConfig

    world = pydist.init(spatial=(2, 1, 1)).world
    width: Literal[32, 64] = 32 if options.quick else 64
    steps = 2 if options.quick else 10
    data = options.rank.parent / "data"
    if world.rank == 0:
        generate_universes(data, UniverseOptions(count=2, width=width, box_width=width))
    else:
        repeat_convolutions()
    world.barrier()
    rows = []
    for name, parts in AXES.items():
        config = Config(
            model=CosmoFlowConfig(width=width),
            data=DataConfig(path=data),
            mesh=MeshConfig(**parts),
            train=TrainConfig(batch=1),
        )
        axis = axis_of(config, 2)
        rounds: list[Any] = []
        best = find_parts(config, world, axis, steps, 5, rounds.append)
        pairs = [
            [measured(config, world, axis, each.sizes, steps) for each in (rounds[0], best)]
            for _ in range(options.rounds)
        ]
        even, balanced = (middle(each) for each in zip(*pairs, strict=True))
        fast, slow = even["busy"]
        ideal = 2 * fast / (1 + fast / slow) + balanced["seconds"] - max(balanced["busy"])
        row = {"axis": name, "even": even, "balanced": balanced, "ideal": ideal}
        rows.append({**row, "search": [asdict(each) for each in rounds]})
    if world.rank == 0:
        options.rank.write_text(json.dumps(rows))


def middle(rounds: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the medians of rounds with the same parts."""
    busy = [median(each) for each in zip(*(r.busy for r in rounds), strict=True)]
    return {"sizes": rounds[0].sizes, "busy": busy, "seconds": median(r.seconds for r in rounds)}


def repeat_convolutions() -> None:
    """Lets this process compute each convolution, and each of its gradients, twice."""
    from pydist.backend.conv_kernels import ConvKernels

    run: Callable[..., Any] = ConvKernels._run

    def repeated(self: Any, kernel: Callable[[], Any]) -> Any:
        run(self, kernel)
        return run(self, kernel)

    ConvKernels._run = repeated  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
