"""What adds a halo slab's part the fastest: tensor-core kernel, tiled kernel, or cuDNN and an add.

On one CUDA device, for layers of CosmoFlow and of the 3D U-Net; seconds are medians of events.

    python benchmarks/python/slab_kernels.py --dtype bfloat16
"""

from __future__ import annotations

import math
import sys
from functools import partial

import torch
from common import machine, parser, show, write

from pydist._loader import native
from pydist.backend import slab_choice
from pydist.backend.slabs import ROLES, SlabProblem, refusal, run

# Channels in and out, and the slab's spatial extents.
LAYERS = {
    "CosmoFlow 1, depth": (4, 16, (1, 128, 128)),
    "CosmoFlow 1, width": (4, 16, (128, 128, 1)),
    "CosmoFlow 2": (16, 32, (1, 64, 64)),
    "CosmoFlow 3": (32, 64, (1, 32, 32)),
    "CosmoFlow 4": (64, 128, (1, 16, 16)),
    "CosmoFlow 5": (128, 256, (1, 8, 8)),
    "U-Net, 128³": (32, 64, (1, 128, 128)),
    "U-Net, 64³": (64, 64, (64, 1, 64)),
    "U-Net, 32³": (128, 256, (1, 32, 32)),
}


def problem(
    layer: str, role: str, dtype: torch.dtype, channels_last: bool, tf32: bool
) -> SlabProblem:
    """A slab in front of the first of four planes of outputs, or of their gradient."""
    ci, co, slab = LAYERS[layer]
    block = tuple(4 if n == 1 else n for n in slab)
    before = tuple(-1 if n == 1 else 0 for n in slab)
    weight, origin, one = (co, ci, 3, 3, 3), (0, 0, 0), (1, 1, 1)
    shapes = {
        "forward": ((1, ci, *slab), weight, (1, co, *block)),
        "dgrad": ((1, co, *slab), weight, (1, ci, *block)),
        "wgrad": ((1, ci, *slab), (1, co, *block), weight),
    }[role]
    return SlabProblem(
        role, *shapes, before, origin, one, one, one, 1, dtype, channels_last, "cuda", tf32
    )


def measured(case: SlabProblem, like: torch.Tensor) -> dict[str, float]:
    """Seconds of every kernel, after its result has been compared with the library's."""
    operands = [slab_choice.filled(s, case, like) for s in (case.first, case.second, case.target)]
    results = {}
    for name in case.candidates:
        if refusal(name, case, *operands):
            continue
        target = operands[2].clone()
        run(name, case, *operands[:2], target, case.first_lo, case.target_lo)
        results[name] = target.double()
    scale = float(results["library"].abs().max())
    for name, result in results.items():
        error = float((result - results["library"]).abs().max()) / scale
        if not error <= 2**-6:
            sys.exit(f"{name} and the library differ by {error:.1e}: {case}")
    where = case.first_lo, case.target_lo
    return {
        name: slab_choice.seconds_of(partial(run, name, case, *operands, *where))
        for name in results
    }


def main() -> None:
    made = parser(__doc__, rounds=1)
    made.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    made.add_argument("--plain", action="store_true", help="contiguous, not channels-last")
    made.add_argument("--tf32", action="store_true", help="cuDNN and pydist may round to tf32")
    options = made.parse_args()
    if not native.has_cuda or not torch.cuda.is_available():
        sys.exit("slab_kernels: needs a CUDA device, torch and pydist built with CUDA")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = options.tf32
    like = torch.empty(1, device="cuda")
    rows, gains, choices = [], [], []
    for layer in list(LAYERS)[: 2 if options.quick else None]:
        for role in ROLES:
            dtype = getattr(torch, options.dtype)
            case = problem(layer, role, dtype, not options.plain, options.tf32)
            times = measured(case, like)
            (chosen,) = slab_choice.pick([{layer: times}]).values()
            gains.append(times["library"] / times[chosen])
            names = ("library", "plain", "mma", "tf32")
            rows.append([layer, role, *(times.get(n, math.nan) * 1e6 for n in names), chosen])
            choices.append({"layer": layer, "role": role, "seconds": times, "chosen": chosen})
    show(["layer", "role", "library µs", "plain µs", "mma µs", "tf32 µs", "chosen"], rows)
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    print(f"chosen against library, geometric mean: {mean:.2f}x")
    device = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    facts = {"dtype": options.dtype, "channels_last": not options.plain, "tf32": options.tf32}
    write(
        {"machine": machine(**device), **facts, "gain": mean, "layers": choices},
        f"slab_kernels_{options.dtype}",
        options,
    )


if __name__ == "__main__":
    main()
