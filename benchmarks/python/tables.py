"""Writes docs/performance.md: the results in benchmarks/results as tables.

python benchmarks/python/tables.py > docs/performance.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import plan_accuracy
from device_tables import device_parts
from formatting import ratio_text, result_of, table, three_digits

SPLITS = ("depth", "height", "width")

INTRODUCTION = """\
# Performance

Measurements on one small machine: 2 cores, one thread per rank, Open MPI. Contestants of one run
took turns: a row of the first table, a column of the second. Other figures are from other runs,
when the machine was faster or slower by up to 40 %, and from other commits: compare ratios. The
figures are medians. Every contestant of a step was first checked with a double-precision reference.
`benchmarks/results` has the full results, with commit, quartiles, page
faults, errors and the machine; `tools/bench NAME` repeats one, and
`python benchmarks/python/tables.py > docs/performance.md` makes this page. The last part is from
one GPU.
"""

STEP = """\
## A training step

Seconds: forward, backward, Adam; batch 1. In brackets: speedup over plain torch with both cores.
"Of the bound": the time of the same shards, kernels and optimizer on both ranks without
exchanges, divided by pydist's time (for CosmoFlow, halo and statistics only).
"""

STACK = """\
## The same split in other implementations

Four 3×3×3 convolutions with ReLU, 4 → 16 → 16 → 16 → 16 channels, forward and backward, on 2 ranks:
time divided by pydist's; above 1 is slower than pydist. "+ malloc" has pydist's allocator settings,
"+ oneDNN" its convolution path as well. At 48³, a shard is smaller than torch's own minimum
for oneDNN convolutions.
"""

HALO = """\
## A halo exchange

Time of packing, sending and unpacking one face between 2 ranks, divided by that of bare MPI
messages of the same size (the faster of persistent and immediate calls), with a send buffer
rewritten each time.
"""

MEMORY = """\
## Memory

Resident memory per rank of a 128³ CosmoFlow step, beyond model and optimizer:
"""

ACTIVATIONS = """\
Memory of activations, counted by the allocator's events (peak of a step):
"""


FRONTIER = """\
## The largest image

Edge of the largest image that a 2D U-Net trains on with {limit:g} MiB per rank of activations,
their gradients and buffers, counted by the allocator's events. Naive: stages of equally many
layers, with skips through all stages between. Model-aware: stages of equal memory, with direct
skips. Spatial: the image is cut. Composed: two stages, and each cuts the image over half of
the ranks. Composed, levels: three quarters of the ranks cut it in the levels with most pixels,
the others in the levels between.
"""

FRONTIER_WITH_STATE = """\
The same with {limit:g} MiB per rank, which also hold the weights of the whole network, and the
gradients and Adam's two moments of the weights that the rank trains.
"""

FORMS = """\
## Channels on two ranks

Milliseconds of a training step of four convolutions with norms and ReLUs, whose channels are cut,
by the form of their exchanges: all-reduced sums, scattered sums, gathered inputs; the form that
pydist chooses for each layer; and the same layers cut along depth.
"""

ATTENTION = """\
## Attention between voxels

Forward and backward of attention with 64 channels in 4 heads on 2 ranks: speedup over plain torch
on one rank with one thread. "No exchange": the same queries, with keys that are there already.
"""

TRANSFORMERS = """\
A training step of MONAI's transformers, unmodified, batch 1, in seconds. pydist's allocator, with
which the third column runs torch, keeps freed memory: most of the gain over torch as it comes.
"""

UNEQUAL = """\
## Ranks of unequal speed

Seconds of a training step of CosmoFlow 128³ on two ranks, one of which shares its core with a busy
process: with equal parts, and with the parts that `pydist balance` chooses. Ideal: the work of both
ranks divided by the sum of their speeds, plus communication and waiting.
"""

PLANS = """\
## Plans

Seconds of a step of two samples, forward, backward and Adam, as `pydist plan` predicts them and as
measured on the meshes in turns; and megabytes at the peak of a step, predicted and counted.
"""

SERVING = """\
## A server

Latency of `pydist serve`: a U-Net segments a volume of 64³ by windows of 32³, dealt out to the
ranks. Each client sends its next request when it has the last answer.
"""

REVISIONS = """\
## Steps of two revisions

Steps before and after the change to named axes and one form of each mechanism (from commit
{before}). Ranks of both revisions took turns: the median over rounds of the time after divided by
the time before, with its quartiles.
"""


def main() -> None:
    """Prints the page."""
    sys.stdout.write(page())


def page() -> str:
    """Returns the page, as Markdown."""
    parts = [INTRODUCTION, STEP, _steps(), STACK, _stack(), HALO, _halo(), MEMORY, _memory()]
    parts += [ACTIVATIONS, _activations(), *_frontier(), FORMS, _forms(), ATTENTION, _attention()]
    parts += [TRANSFORMERS, _transformers(), UNEQUAL, _unequal(), PLANS, _plans()]
    parts += [SERVING, _serving(), *_revisions(), *device_parts()]
    return "\n".join(parts)


def _steps() -> str:
    names = ("cosmoflow_step_64", "cosmoflow_step_128", "unet_step_monai_96", "unet_step_paper_64")
    titles = ("CosmoFlow, 64³", "CosmoFlow, 128³", "MONAI UNet, 96³", "the paper's U-Net, 64³")
    head = ["", "torch, 2 threads", "pydist, 1 rank", *(f"2 ranks, {s}" for s in SPLITS)]
    return table(
        [*head, "of the bound"],
        [[title, *_step_row(result_of(name))] for title, name in zip(titles, names, strict=True)],
    )


def _step_row(result: Mapping[str, Any]) -> Iterator[str]:
    rows = {row["name"]: row for row in result["rows"]}
    torch = rows["plain torch, 2 threads"]["median"]
    yield three_digits(torch)
    ours = ["pydist, 1 rank", *(f"pydist, 2 ranks, {split}" for split in SPLITS)]
    for name in ours:
        seconds = rows[name]["median"]
        yield f"{three_digits(seconds)} ({torch / seconds:.2f}×)"
    costs = {cost["name"]: 1 / cost["halo_and_statistics"] for cost in result.get("costs", ())
             if cost["halo_and_statistics"]}  # fmt: skip
    bounds = costs or {name: rows[name]["of_bound"] for name in ours}
    yield " / ".join(f"{bounds[name]:.2f}" for name in ours[1:])


def _stack() -> str:
    results = [result_of(f"conv_stack_{width}") for width in (48, 64, 128)]
    columns = [{row["name"]: row["over_pydist"] for row in each["rows"]} for each in results]
    rows = [[name, *(f"{column[name]:.2f}" for column in columns)] for name in columns[0]]
    shown = table(["", "48³", "64³", "128³"], rows)
    absent = {each["name"]: each["reason"] for each in results[0]["not_run"]}
    absences = [f"{name} ({reason})" for name, reason in absent.items() if "+" not in name]
    return shown + ("\nNot run: " + "; ".join(absences) + ".\n" if absences else "")


def _halo() -> str:
    rows = result_of("halo_exchange")["rows"]
    sizes = sorted({row["bytes"] for row in rows})
    kinds = list(dict.fromkeys((row["face"], row["layout"]) for row in rows))
    ratios = {(row["face"], row["layout"], row["bytes"]): row["over_bare"] for row in rows}
    return table(
        ["face", *(f"{size >> 10} KiB" for size in sizes)],
        [
            [", ".join(kind), *(ratio_text(ratios.get((*kind, size))) for size in sizes)]
            for kind in kinds
        ],
    )


def _memory() -> str:
    return table(
        ["", "ranks", "allocator", "MB per rank", "of one rank"],
        [
            [r["name"], str(r["ranks"]), r["malloc"], f"{r['step_mb']:.0f}", ratio_text(r["ratio"])]
            for r in result_of("memory_128")["rows"]
        ],
    )


def _activations() -> str:
    named = {"MONAI UNet, 96³": "monai_96", "the paper's U-Net, 64³": "paper_64"}
    return table(
        ["network", "", "ranks", "MB per rank", "of one rank"],
        [
            [
                title,
                row["name"],
                str(row["ranks"]),
                f"{row['peak_mb']:.0f}",
                ratio_text(row["ratio"]),
            ]
            for title, name in named.items()
            for row in result_of(f"activations_{name}")["rows"]
        ],
    )


def _frontier() -> Iterator[str]:
    result, with_state = result_of("memory_frontier"), result_of("memory_frontier_state")
    yield FRONTIER.format(limit=result["limit_mib"])
    yield _edges(result)
    yield FRONTIER_WITH_STATE.format(limit=with_state["limit_mib"])
    yield _edges(with_state)


def _edges(result: Mapping[str, Any]) -> str:
    edges: dict[tuple[int, int], dict[tuple[int, str], int]] = {}
    for row in result["rows"]:
        of_network = edges.setdefault((row["features"], row["levels"]), {})
        of_network[row["ranks"], row["division"]] = row["edge"]
    divisions = ("naive", "model-aware", "spatial", "composed", "composed, levels")
    return table(
        ["channels, levels", "ranks", "one rank", *divisions],
        [
            [", ".join(map(str, network)), str(ranks)]
            + [str(found[1, "one rank"])]
            + [str(found.get((ranks, division), "")) for division in divisions]
            for network, found in edges.items()
            for ranks in (2, 4, 8)
        ],
    )


def _forms() -> str:
    rows = result_of("channel_forms")["rows"]
    forms = list(dict.fromkeys(row["form"] for row in rows))
    times = {(row["layers"], row["form"]): row["step"]["median"] * 1e3 for row in rows}
    return table(
        ["", *forms],
        [
            [layers, *(f"{times[layers, form]:.1f}" for form in forms)]
            for layers in dict.fromkeys(row["layers"] for row in rows)
        ],
    )


def _transformers() -> str:
    names = "plain torch, 2 threads", "plain torch, 2 threads + malloc", "pydist, 2 ranks, depth"
    rows = []
    titles = {"unetr": "UNETR", "swin_unetr": "SwinUNETR"}
    for network, width in (("unetr", 96), ("swin_unetr", 64), ("swin_unetr", 96)):
        found = result_of(f"unet_step_{network}_{width}")["rows"]
        steps = {row["name"]: row["median"] for row in found}
        times = (three_digits(steps[name]) for name in names)
        rows.append((f"{titles[network]}, {width}³", *times))
    return table(("", "torch, 2 threads", "with the allocator", "pydist, 2 ranks"), rows)


def _attention() -> str:
    rows = result_of("attention")["rows"]
    forms = [f for f in dict.fromkeys(row["form"] for row in rows) if f != "one rank"]
    found = {(row["tokens"], row["form"]): row["speedup"] for row in rows}
    return table(
        ["", *forms],
        [
            [tokens, *(ratio_text(found.get((tokens, form))) for form in forms)]
            for tokens in dict.fromkeys(row["tokens"] for row in rows)
        ],
    )


def _unequal() -> str:
    rows = []
    for row in result_of("unequal_ranks")["rows"]:
        even, balanced = row["even"], row["balanced"]
        parts = " : ".join(map(str, balanced["sizes"]))
        times = [even["seconds"], balanced["seconds"], row["ideal"]]
        gain = ratio_text(even["seconds"] / balanced["seconds"])
        rows.append([row["axis"], parts, *map(three_digits, times), gain])
    return table(["axis", "balanced parts", "even, s", "balanced, s", "ideal, s", "speedup"], rows)


def _plans() -> str:
    def cells(row: Mapping[str, Any]) -> list[str]:
        taken, predicted = row["measured"]["median"], row["step"]
        of_step = sum(row["memory"][part] for part in plan_accuracy.COUNTED)
        counted = row["counted"]
        return [
            *(three_digits(predicted), three_digits(taken), ratio_text(predicted / taken)),
            *(f"{of_step / 1e6:.0f}", f"{counted / 1e6:.0f}", ratio_text(of_step / counted)),
        ]

    head = ["network", "mesh", "predicted, s", "measured, s", "ratio", "MB predicted", "counted"]
    rows = result_of("plan_accuracy")["rows"]
    # A row that an earlier run has measured names its commit.
    names = [
        f"{row['network']} (at {row['commit']})" if "commit" in row else row["network"]
        for row in rows
    ]
    return table(
        [*head, "ratio"],
        [[name, row["mesh"], *cells(row)] for name, row in zip(names, rows, strict=True)],
    )


def _serving() -> str:
    return table(
        ["ranks", "clients", "p50, ms", "p99, ms", "requests/s"],
        [
            [str(row["ranks"]), str(row["clients"])]
            + [f"{row[each] * 1e3:.0f}" for each in ("p50", "p99")]
            + [ratio_text(row["requests_per_second"])]
            for row in result_of("serving")["rows"]
        ],
    )


def _revisions() -> Iterator[str]:
    result = result_of("revisions")
    yield REVISIONS.format(before=result["before"])
    yield table(
        ["", "ranks", "before, s", "after, s", "after / before"],
        [
            [row["step"].removesuffix(", 1 rank"), str(row["ranks"])]
            + [three_digits(row[when]["median"]) for when in ("before", "after")]
            + ["{:.2f} ({:.2f} – {:.2f})".format(ratio["median"], *ratio["quartiles"])]
            for row in result["rows"]
            for ratio in [row["after_over_before"]]
        ],
    )


if __name__ == "__main__":
    main()
