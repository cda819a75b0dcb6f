"""What passes over memory that make two layers save: leaky ReLU + average pool, norm + PReLU.

Times forward and backward of CosmoFlow's block (convolution, leaky ReLU in place, average pool)
with the ReLU left to the pool and, interleaved, made apart (`PYDIST_FUSED_POOL=0`), with the
convolution and without it; and of an instance norm with a PReLU behind, fused and, as the norm's
result is asked for in between, apart. On one rank or several:

    python benchmarks/python/fused_activations.py --width 128
    pydist run -n 2 benchmarks/python/fused_activations.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import common
import torch
import torch.nn.functional as F
from torch import Tensor

import pydist
from pydist import ShardedTensor
from pydist.mesh import Mesh
from pydist.ops.convolution.deferred_relu import DeferredOutputs
from pydist.ops.pooling.relu_pool import VARIABLE

CHANNELS = 16


def outputs(x: ShardedTensor) -> ShardedTensor:
    """A copy as a convolution leaves it: unseen, so that what is done to it next may wait."""
    y = cast(ShardedTensor, x * 1.0)
    y._deferred = DeferredOutputs(y._shard)
    return y


def block(x: ShardedTensor, weight: Tensor, fused: bool) -> Tensor:
    os.environ[VARIABLE] = str(int(fused))
    return F.avg_pool3d(F.leaky_relu(F.conv3d(x, weight, padding=1), 0.01, inplace=True), 3, 2, 1)


def pool(x: ShardedTensor, weight: Tensor, fused: bool) -> Tensor:
    os.environ[VARIABLE] = str(int(fused))
    return F.avg_pool3d(F.leaky_relu(outputs(x), 0.01, inplace=True), 3, 2, 1)


def norm(x: ShardedTensor, weight: Tensor, fused: bool) -> Tensor:
    y = cast(ShardedTensor, F.instance_norm(outputs(x)))
    if not fused:
        y.to_local()
    return F.prelu(y, weight)


def gradient(function: Callable[[], Tensor], x: ShardedTensor) -> Tensor:
    (found,) = torch.autograd.grad(function().square().sum(), x)
    return cast(ShardedTensor, found).to_local()


def timed(function: Callable[[], Tensor], world: pydist.comm.Transport) -> float:
    world.barrier()
    start = time.perf_counter()
    y = function()
    y.backward(torch.ones_like(y))
    if y.is_cuda:
        torch.cuda.synchronize()
    world.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = common.parser(__doc__, rounds=15)
    parser.add_argument("--width", type=int, default=128, help="edge of the cube (128)")
    parser.add_argument("--in-channels", type=int, default=4, help="of the convolution (4)")
    options = parser.parse_args()
    width = 16 if options.quick else options.width
    rounds = 2 if options.quick else options.rounds
    world = pydist.init().world
    mesh = Mesh(world, 1, (world.size, 1, 1))
    generator = torch.Generator().manual_seed(0)

    def cube(channels: int) -> ShardedTensor:
        x = torch.randn(1, channels, *(width,) * 3, generator=generator)
        return pydist.distribute_tensor(x, mesh)

    weight = torch.randn(CHANNELS, options.in_channels, 3, 3, 3, generator=generator) / 10
    slope = torch.full((1,), 0.25)
    cases = {
        "convolution, leaky ReLU, pool": (block, cube(options.in_channels), weight),
        "leaky ReLU, pool": (pool, cube(CHANNELS), weight),
        "instance norm, PReLU": (norm, cube(CHANNELS), slope),
    }
    rows = []
    for name, (function, x, parameter) in cases.items():
        x.requires_grad_()
        parameter.requires_grad_()
        ways = {fused: partial(function, x, parameter, fused) for fused in (True, False)}
        one, two = (gradient(way, x) for way in ways.values())
        if not torch.allclose(one, two, rtol=1e-4, atol=1e-5):
            raise SystemExit(f"{name}: fused and apart differ")
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for i in range(rounds + 2):
            for fused, way in ways.items():
                found = timed(way, world)
                if i >= 2:
                    seconds[fused].append(found)
        medians = {n: statistics.median(seconds[f]) for n, f in (("fused", True), ("apart", False))}
        saved = common.paired(seconds[False], seconds[True])
        rows.append({"name": name, **medians, "saved": saved})
    if world.rank:
        return
    print(f"{CHANNELS} channels, {width}³, {world.size} ranks: seconds of forward and backward")
    keys = ("name", "fused", "apart", "saved")
    common.show(("", *keys[1:]), [tuple(row[key] for key in keys) for row in rows])
    result = {"machine": common.machine(ranks=world.size), "width": width, "rows": rows}
    common.write(result, f"fused_activations_{width}_{world.size}", options)


if __name__ == "__main__":
    main()
