"""Measures the step time of attention between voxels on two ranks, in each form of exchange.

Each rank has one thread. In each round every contestant takes a step, forward and backward, of
`scaled_dot_product_attention` with 64 channels in 4 heads:

- "ring", "gather" and the chosen form (`pydist/ops/attention/forms.py`),
- "written out": the same by matrix products and a softmax, for few tokens,
- "no exchange": the same queries on each rank with keys that are there already,
- "one rank": plain torch on one rank, while the other waits.

    python benchmarks/python/attention.py
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import common

CASES = {"8³ tokens": 8, "12³ tokens": 12, "24³ tokens": 24}
HEADS, CHANNELS = 4, 64
MOST_WRITTEN_OUT = 4096  # tokens: the scores of more would fill the memory
HEAD = ("tokens", "form", "median, ms", "least, ms", "one rank / form", "form / no exchange")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    options = common.rank_options(__doc__, 4)
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    results: dict[str, Any] = common.on_ranks(__file__, options)
    rows, shown = [], []
    for case, found in results.items():
        steps = {form: common.summary(seconds) for form, seconds in found["seconds"].items()}
        alone, bound = (steps[name]["median"] for name in ("one rank", "no exchange"))
        for form, step in steps.items():
            chosen = {"chosen": found["chosen"]} if form == "chosen" else {}
            ratios = alone / step["median"], step["median"] / bound
            rows.append({
                "tokens": case, "form": form, **chosen, "step": step,
                "speedup": ratios[0], "over_bound": ratios[1],
            })  # fmt: skip
            shown.append((case, form, *(step[k] * 1e3 for k in ("median", "min")), *ratios))
    common.show(HEAD, shown)
    common.write({"machine": machine, "rows": rows}, "attention", options)


def measure(options: argparse.Namespace) -> None:
    """Measures on one rank: each round has a step of every contestant, in the same order."""
    import torch  # the parent process does not need it
    import torch.nn.functional as F

    import pydist
    from pydist.layout import Layout, split_along
    from pydist.ops.attention import scaled
    from pydist.ops.attention.forms import attention_form

    mesh = pydist.init(spatial=(2, 1, 1))
    world = mesh.world
    chosen: list[str] = []

    def noted(*args: Any) -> str:
        chosen.append(attention_form(*args))
        return chosen[-1]

    results: dict[str, Any] = {}
    for case, extent in CASES.items():
        tokens = (4 if options.quick else extent) ** 3
        shape = (1, HEADS, tokens, CHANNELS // HEADS)
        layout = Layout(mesh, shape, [None, None, split_along(mesh, tokens, "depth"), None])
        torch.manual_seed(0)
        whole = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        box = layout.box
        q, k, v = (
            pydist.ShardedTensor.from_local(
                t.detach()[:, :, box.lo[2] : box.hi[2]].clone().requires_grad_(), layout
            )
            for t in whole
        )
        own = q.to_local().detach().clone().requires_grad_()

        def attend(q: Any = q, k: Any = k, v: Any = v) -> None:
            F.scaled_dot_product_attention(q, k, v).sum().backward()

        def written_out(q: Any = q, k: Any = k, v: Any = v) -> None:
            ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).sum().backward()

        def no_exchange(own: Any = own, whole: Any = whole) -> None:
            F.scaled_dot_product_attention(own, *whole[1:]).sum().backward()

        def one_rank(whole: Any = whole) -> None:
            if world.rank == 0:
                F.scaled_dot_product_attention(*whole).sum().backward()

        steps: dict[str, Any] = {"ring": attend, "gather": attend, "chosen": attend}
        if tokens <= MOST_WRITTEN_OUT:
            steps["written out"] = written_out
        steps |= {"no exchange": no_exchange, "one rank": one_rank}
        patches: dict[str, list[common.Patch]] = {name: [] for name in steps}
        for form in ("ring", "gather"):
            patches[form] = [(scaled, "attention_form", lambda *_, form=form: form)]
        patches["chosen"] = [(scaled, "attention_form", noted)]
        common.in_turns(steps, 1, world.barrier, patches)
        chosen.clear()
        seconds = common.in_turns(steps, options.rounds, world.barrier, patches)
        results[case] = {"seconds": seconds, "chosen": chosen[0]}
    if world.rank == 0:
        options.rank.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
