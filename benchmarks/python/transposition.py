"""Step time of calls that mix the elements of a split dim, on two ranks.

Each rank has one thread. In each round every contestant takes a step, forward and backward, of a
call on 64³ voxels × 16 channels (a displacement of up to 3 voxels for samples at a grid):

- "split": the volume is cut over both ranks,
- "gathered": each rank computes the call on `x.full_tensor()`,
- "one rank": plain torch on one rank, while the other waits.

    python benchmarks/python/transposition.py
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import common

EXTENT, CHANNELS = 64, 16
DISPLACEMENT = 3  # voxels
HEAD = ("call", "form", "median, ms", "least, ms", "one rank / form")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    options = common.rank_options(__doc__, 8)
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    results: dict[str, Any] = common.on_ranks(__file__, options)
    rows, shown = [], []
    for call, found in results.items():
        steps = {form: common.summary(seconds) for form, seconds in found.items()}
        for form, step in steps.items():
            ratio = steps["one rank"]["median"] / step["median"]
            rows.append({"call": call, "form": form, "step": step, "speedup": ratio})
            shown.append((call, form, *(step[k] * 1e3 for k in ("median", "min")), ratio))
    common.show(HEAD, shown)
    common.write({"machine": machine, "rows": rows}, "transposition", options)


def measure(options: argparse.Namespace) -> None:
    """Measures on one rank: each round has a step of every contestant, in the same order."""
    import torch  # the parent process does not need it
    import torch.nn.functional as F

    import pydist

    mesh = pydist.init(spatial=(2, 1, 1))
    world = mesh.world
    extent = 8 if options.quick else EXTENT
    torch.manual_seed(0)
    whole = torch.randn(1, CHANNELS, extent, extent, extent)
    theta = torch.eye(3, 4)[None]
    base = F.affine_grid(theta, list(whole.shape), align_corners=False)
    grid = base + (torch.rand_like(base) * 2 - 1) * 2 * DISPLACEMENT / extent
    x: Any = pydist.distribute_tensor(whole, mesh).detach().requires_grad_()
    cut_grid = pydist.distribute_tensor(grid, mesh, {1: "depth"}).detach()
    full = whole.clone().requires_grad_()

    def spectrum(x: Any, _: Any) -> Any:
        return torch.fft.irfftn(torch.fft.rfftn(x, dim=(2, 3, 4)), s=x.shape[2:], dim=(2, 3, 4))

    def sorted_values(x: Any, _: Any) -> Any:
        return x.sort(2).values

    def sums(x: Any, _: Any) -> Any:
        return x.cumsum(2)

    def samples(x: Any, grid: Any) -> Any:
        return F.grid_sample(x, grid, align_corners=False)

    results: dict[str, Any] = {}
    calls = {
        "rfftn and irfftn": spectrum, "sort": sorted_values, "cumsum": sums, "grid_sample": samples,
    }  # fmt: skip
    for name, call in calls.items():

        def split(call: Any = call) -> None:
            call(x, cut_grid).sum().backward()

        def gathered(call: Any = call) -> None:
            call(x.full_tensor(), grid).sum().backward()

        def one_rank(call: Any = call) -> None:
            if world.rank == 0:
                call(full, grid).sum().backward()

        steps: dict[str, Any] = {"split": split, "gathered": gathered, "one rank": one_rank}
        common.in_turns(steps, 1, world.barrier)
        results[name] = common.in_turns(steps, options.rounds, world.barrier)
    if world.rank == 0:
        options.rank.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
