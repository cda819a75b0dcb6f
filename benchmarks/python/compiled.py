"""What torch.compile gains on a CPU: for whole networks, and for regions between exchanges.

A step is forward, backward and SGD, with one thread per rank. In each round every contestant takes
a step:

- "torch", "torch, compiled": the whole network on one rank, as it is and by Inductor;
- "pydist", "pydist, regions": two ranks, as it is, and with the regions that exchange nothing
  compiled on each rank's shard. Regions of SwinUNETR are each block's second half (layer norm,
  linear, GELU, linear), regions of the UNet the last PReLU of each unit with the residual sum.

Losses and gradients of the two forms are first compared.

    python benchmarks/python/compiled.py
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from typing import Any

import common

NETWORKS = ("MONAI UNet, 96³", "SwinUNETR, 96³")
FORMS = ("torch", "torch, compiled", "pydist", "pydist, regions")
HEAD = ("network", "form", "median, s", "least, s", "as it is / form")
TOLERANCE = 2e-2  # as in `unet_step.py`; single-precision torch has such errors at 96³


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    options = common.rank_options(__doc__, 9)
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    rows, shown = [], []
    for network, seconds in common.on_ranks(__file__, options).items():
        steps = {form: common.summary(each) for form, each in seconds.items()}
        for form, step in steps.items():
            gain = steps[form.partition(",")[0]]["median"] / step["median"]
            rows.append({"network": network, "form": form, "step": step, "gain": gain})
            shown.append((network, form, step["median"], step["min"], gain))
    common.show(HEAD, shown)
    common.write({"machine": machine, "rows": rows}, "compiled", options)


def measure(options: argparse.Namespace) -> None:
    """Measures the steps of each network in every form on one rank; rank 0 writes the results."""
    import torch

    import pydist

    mesh = pydist.init(spatial=(2, 1, 1))  # sets the allocator, for all contestants
    results = {}
    for name in NETWORKS:
        width = 64 if options.quick else 96
        torch.manual_seed(0)
        plain = make_network(name)
        x = torch.rand(1, 1, *(width,) * 3)
        split = pydist.distribute_tensor(x, mesh)
        model = pydist.parallelize(copy.deepcopy(plain), mesh)
        steps = {"pydist": step_of(model, split), "pydist, regions": step_of(model, split)}
        if mesh.rank == 0:
            steps["torch"] = step_of(plain, x)
            steps["torch, compiled"] = step_of(torch.compile(copy.deepcopy(plain)), x)
        else:
            steps |= dict.fromkeys(FORMS[:2], lambda: None)
        patches = {"pydist, regions": [compiled_region(name)]}
        with common.replaced(patches["pydist, regions"]):
            compare(copy.deepcopy(model), copy.deepcopy(plain), split, x)
        common.in_turns(steps, 4, mesh.world.barrier, patches)  # compiles, chooses kernels
        order = {form: steps[form] for form in FORMS}
        results[name] = common.in_turns(order, options.rounds, mesh.world.barrier, patches)
    if mesh.rank == 0:
        options.rank.write_text(json.dumps(results))


def make_network(name: str) -> Any:
    """Returns a network of MONAI, as it is."""
    from monai.networks.nets.swin_unetr import SwinUNETR
    from monai.networks.nets.unet import UNet

    if name.startswith("Swin"):
        return SwinUNETR(1, 2, feature_size=12)
    return UNet(3, 1, 2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2)


def step_of(model: Any, x: Any) -> Callable[[], None]:
    """Returns a training step of a model."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(model: Any, plain: Any, split: Any, x: Any) -> None:
    """Compares gradients of a parallelized model and of the plain network."""
    import torch

    model(split).square().mean().backward()
    plain(x).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=0, atol=TOLERANCE * scale + 1e-6, msg=name
            )


def compiled_region(name: str) -> common.Patch:
    """Returns the patch that computes a kind of region by Inductor, on each rank's shard."""
    import torch
    import torch.nn.functional as F
    from monai.networks.blocks.convolutions import ResidualUnit
    from monai.networks.nets.swin_unetr import SwinTransformerBlock

    import pydist

    @torch.compile(dynamic=False)
    def second_half(
        x: Any, norm: Any, bias: Any, weight_1: Any, bias_1: Any, weight_2: Any, bias_2: Any
    ) -> Any:
        x = F.layer_norm(x, norm.shape, norm, bias)
        return F.linear(F.gelu(F.linear(x, weight_1, bias_1)), weight_2, bias_2)

    def forward_part2(self: Any, x: Any) -> Any:
        if not isinstance(x, pydist.ShardedTensor):
            return self.drop_path(self.mlp(self.norm2(x)))
        layers = self.norm2, self.mlp.linear1, self.mlp.linear2
        weights = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
        return pydist.ShardedTensor.from_local(second_half(x.to_local(), *weights), x.layout)

    @torch.compile(dynamic=False)
    def activated_sum(x: Any, slope: Any, residual: Any) -> Any:
        return F.prelu(x, slope) + residual

    def unit(self: Any, x: Any) -> Any:
        residual, last = self.residual(x), self.conv[-1]
        if not isinstance(x, pydist.ShardedTensor) or not hasattr(last, "adn"):
            return self.conv(x) + residual
        x = last.adn.N(last.conv(self.conv[:-1](x)))
        local = activated_sum(x.to_local(), last.adn.A.weight, residual.to_local())
        return pydist.ShardedTensor.from_local(local, x.layout)

    if name.startswith("Swin"):
        return SwinTransformerBlock, "forward_part2", forward_part2
    return ResidualUnit, "forward", unit


if __name__ == "__main__":
    main()
