"""Measures the cost of the checks between ranks: ledger, checksums, hashes of numbers, watchdog.

Two ranks train a MONAI UNet on 32^3. In each round every variant takes a step: all checks on, each
of them off, and all off. A check is disabled by replacing its functions with empty ones; nothing
else changes. Each includes its part of the proof that ranks exchange at the end of a backward; of
the watchdog, only the phases that steps report are disabled, not its thread. Shown is the median
over rounds of the time of a step with all checks minus that of the variant.

    python benchmarks/python/checks.py
"""

from __future__ import annotations

import argparse
import json

import common

SIZE = 32
CHECKS = ("ledger", "checksums", "numbers", "watchdog")
VARIANTS: dict[str, tuple[str, ...]] = {
    "all on": (),
    **{f"without {check}": (check,) for check in CHECKS},
    "all off": CHECKS,
}
HEAD = ("step", "median, ms", "least, ms", "cost, ms", "cost, %")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    options = common.rank_options(__doc__, 400)
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    times: dict[str, list[float]] = common.on_ranks(__file__, options)
    rows, shown = [], []
    for variant, seconds in times.items():
        step, cost = common.summary(seconds), common.paired(times["all on"], seconds)
        rows.append({"variant": variant, "step": step, "cost": cost})
        costs = (cost * 1e3, cost / step["median"] * 100) if cost else (None, None)
        shown.append((variant, step["median"] * 1e3, step["min"] * 1e3, *costs))
    common.show(HEAD, shown)
    common.write({"machine": machine, "rows": rows}, "checks", options)


def measure(options: argparse.Namespace) -> None:
    """Measures on one rank: each round has a step of every variant, in the same order on all."""
    import torch  # the parent process does not need it
    from monai.networks.nets.unet import UNet

    import pydist

    mesh = pydist.init(spatial=(2, 1, 1))
    torch.manual_seed(0)
    net = UNet(3, 1, 2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2)
    model = pydist.parallelize(net, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = pydist.distribute_tensor(torch.randn(1, 1, SIZE, SIZE, SIZE), mesh)
    target = pydist.distribute_tensor(torch.rand(1, 2, SIZE, SIZE, SIZE), mesh)

    def step() -> None:
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(10):
        step()
    empty = empty_functions()
    variants = {
        variant: [patch for check in checks for patch in empty[check]]
        for variant, checks in VARIANTS.items()
    }
    steps = dict.fromkeys(variants, step)
    times = common.in_turns(steps, options.rounds, mesh.world.barrier, variants)
    if mesh.rank == 0:
        options.rank.write_text(json.dumps(times))


def empty_functions() -> dict[str, list[common.Patch]]:
    """Returns the patches that disable each check."""
    from pydist._loader import native
    from pydist.comm.interface.ledger import Ledger
    from pydist.exchange import consistency
    from pydist.exchange.consistency import Consistency
    from pydist.exchange.history import NO_HISTORY
    from pydist.tensor import sharded

    return {
        "ledger": [
            (Ledger, "note", lambda *_, **__: None),
            (consistency, "_calls", lambda *_: []),
        ],
        "checksums": [
            (Consistency, "prove_equal", lambda *_: None),
            (Consistency, "sum_parameters", lambda *_: None),
            (Consistency, "_checksums", lambda *_: []),
        ],
        "numbers": [
            (consistency, "_histories", lambda *_: []),
            (sharded, "history_of", lambda *_: NO_HISTORY),
            (sharded, "remember", lambda *_: None),
        ],
        "watchdog": [
            (native, "enter_phase", lambda *_: None),
            (native, "leave_phase", lambda: None),
        ],
    }


if __name__ == "__main__":
    main()
