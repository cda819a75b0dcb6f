"""Measures steps of layers along the channel axis in each form of exchange and in the chosen one.

Two ranks train four convolutions, each with an instance norm and a ReLU, whose channels are cut
(`channel = 2`). In each round every form takes a step: "sum", "scatter" and "gather" in all layers
that have a choice (see `pydist/ops/coarsening.py`), and the chosen forms; beside them the same
layers cut along depth.

    python benchmarks/python/channel_forms.py
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import common

CASES = {
    "16 channels, 48³": ((16, 16, 16, 16), 48),
    "8 and 32 channels, 48³": ((32, 8, 32, 8), 48),
    "64 channels, 16³": ((64, 64, 64, 64), 16),
    "128 channels, 8³": ((128, 128, 128, 128), 8),
    "256 channels, 4³": ((256, 256, 256, 256), 4),
}
FORMS = ("sum", "scatter", "gather")
HEAD = ("layers", "form", "median, ms", "least, ms", "sum / form")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    options = common.rank_options(__doc__, 20)
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    results: dict[str, Any] = common.on_ranks(__file__, options)
    rows, shown = [], []
    for case, found in results.items():
        base = common.summary(found["seconds"]["sum"])["median"]
        for form, seconds in found["seconds"].items():
            step = common.summary(seconds)
            chosen = {"chosen": found["chosen"]} if form == "chosen" else {}
            rows.append({"layers": case, "form": form, **chosen, "step": step})
            shown.append((case, form, *(step[k] * 1e3 for k in ("median", "min")),
                          base / step["median"]))  # fmt: skip
    common.show(HEAD, shown)
    common.write({"machine": machine, "rows": rows}, "channel_forms", options)


def measure(options: argparse.Namespace) -> None:
    """Measures on one rank: each round has a step in every form, in the same order on all."""
    import torch  # the parent process does not need it
    from torch import nn

    import pydist
    from pydist.mesh import Mesh
    from pydist.ops.coarsening import channel_form
    from pydist.ops.conv import split_channels

    choose = channel_form
    chosen: list[str] = []

    def noted(*args: Any) -> str:
        chosen.append(choose(*args))
        return chosen[-1]

    world = pydist.init().world
    results: dict[str, Any] = {}
    for case, (channels, size) in CASES.items():
        extent = 4 if options.quick else size

        def step_on(mesh: Mesh, channels: tuple[int, ...] = channels, extent: int = extent) -> Any:
            torch.manual_seed(0)
            layers: list[nn.Module] = []
            for before, after in zip((4, *channels), channels, strict=False):
                layers += [
                    nn.Conv3d(before, after, 3, padding=1), nn.InstanceNorm3d(after), nn.ReLU(True)
                ]  # fmt: skip
            model = pydist.parallelize(nn.Sequential(*layers), mesh)
            x = pydist.distribute_tensor(torch.randn(1, 4, *(extent,) * 3), mesh)

            def step() -> None:
                model.zero_grad()
                model(x).square().mean().backward()

            return step

        # A mesh of each form, as plans of layers are kept by their layouts.
        steps = {
            name: step_on(Mesh(world, 1, (1, 1, 1), axes={"channel": world.size}))
            for name in (*FORMS, "chosen")
        }
        steps["depth"] = step_on(Mesh(world, 1, (world.size, 1, 1)))
        patches: dict[str, list[common.Patch]] = {
            form: [(split_channels, "channel_form", lambda *_, form=form: form)] for form in FORMS
        }
        patches |= {"chosen": [(split_channels, "channel_form", noted)], "depth": []}
        common.in_turns(steps, 2, world.barrier, patches)
        chosen.clear()
        seconds = common.in_turns(steps, options.rounds, world.barrier, patches)
        found = [form for form in FORMS if form in chosen]
        results[case] = {"seconds": seconds, "chosen": ", ".join(found)}
    if world.rank == 0:
        options.rank.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
