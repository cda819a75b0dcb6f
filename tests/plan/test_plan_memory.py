"""Tests of predicted memory against the tensors that a real step keeps for backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from monai.networks.nets import UNet
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pydist import Mesh, ShardedTensor, distribute_tensor, parallelize
from pydist.comm import Transport, run_local
from pydist.grid import SPATIAL_AXES, Grid
from pydist.models import CosmoFlow, UNet3d
from pydist.plan import StepModel, Training, estimate_step, load_hardware, trace_network
from pydist.tensor import local_of
from pydist.tensor.wrapper import tensors_of


def monai() -> nn.Module:
    """A network whose norms are large enough for pydist's own passes on one rank as well."""
    return UNet(3, 1, 2, (16, 32), (2,), num_res_units=1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cosmoflow": (lambda: CosmoFlow(32, dropout=0.0), (4, 32, 32, 32)),
    "cosmoflow with norms": (lambda: CosmoFlow(32, batch_norm=True, dropout=0.0), (4, 32, 32, 32)),
    "unet3d": (lambda: UNet3d(1, 2, features=16, levels=2), (1, 16, 16, 16)),
    "monai": (monai, (1, 48, 48, 48)),
}
IN_A_STEP = ("gradients", "activations", "transient", "halos", "copies")
"""Parts of a plan that are allocated in a step."""
MESHES: dict[str, dict[str, int]] = {
    "1 rank": {}, "depth 2": {"depth": 2}, "width 2": {"width": 2}, "channel 2": {"channel": 2},
}  # fmt: skip


def saved_tensors(output: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that the nodes of a graph have saved."""
    nodes, seen = [output.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        saved = [getattr(node, name) for name in names] + [*getattr(node, "saved_tensors", ())]
        for each in saved:
            yield from tensors_of(each)


def kept_for_backward(output: Tensor, given: list[Tensor], gathers: bool) -> int:
    """Counts the bytes of memories that a graph keeps, without given ones.

    A copy in another memory format counts once with its source: kernels' choices decide on those.

    Args:
        output: of the network.
        given: tensors that do not count.
        gathers: whether layers gather channels.
    """
    known = {x.untyped_storage().data_ptr() for x in given}
    found = list[Tensor]()
    for x in saved_tensors(output):
        at = x.untyped_storage().data_ptr()
        if at in known or not x.untyped_storage().nbytes():
            continue
        known.add(at)
        if not any(is_copy(x, other, gathers) for other in [*given, *found]):
            found.append(x)
    return sum(x.untyped_storage().nbytes() for x in found)


def is_copy(x: Tensor, other: Tensor, gathers: bool) -> bool:
    if gathers and x.stride() == other.stride():
        return False  # two layers have gathered the same input, each for itself
    return x.shape == other.shape and torch.equal(x, other)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NETWORKS)
def test_activations_are_those_that_a_real_step_keeps(name: str, mesh: str) -> None:
    made, sample = NETWORKS[name]
    grid = Grid.of(MESHES[mesh])
    ranks, spatial = grid.size(), [grid.size((axis,)) for axis in SPATIAL_AXES]
    torch.manual_seed(0)
    networks, batch = [made() for _ in range(ranks)], torch.rand(2, *sample)

    def step(world: Transport) -> int:
        mine = Mesh(world, 1, spatial, axes={"channel": grid.size(("channel",))})
        network = parallelize(networks[world.rank], mine)
        x = distribute_tensor(batch, mine, dict(enumerate(SPATIAL_AXES, start=2)))
        output = network(x)
        own = local_of(output) if isinstance(output, ShardedTensor) else output
        given = [local_of(x), *network.parameters(), *network.buffers()]
        return kept_for_backward(own, given, "channel" in mesh)

    real = max(run_local(step, ranks))
    model = StepModel(
        trace_network(made(), sample, lambda output: output.mean()),
        Training(batch=2),
        load_hardware("cpu"),
    )
    memory = estimate_step(model, grid).memory
    predicted = memory["activations"] + memory["halos"]
    assert 0.95 <= predicted / real <= 1.10


def counted(step: Callable[[], object]) -> int:
    """Returns the peak of torch's CPU allocator in a step, in bytes above its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events: Any = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


PEAKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cosmoflow with norms": (lambda: CosmoFlow(64, batch_norm=True, dropout=0.0), (4, 64, 64, 64)),
    "unet3d": (lambda: UNet3d(1, 2, features=16, levels=2), (1, 32, 32, 32)),
    "monai": (lambda: UNet(3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2), (1, 64, 64, 64)),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_that_of_the_allocator(name: str) -> None:
    made, sample = PEAKS[name]
    torch.manual_seed(0)
    network = made()
    model = StepModel(
        trace_network(made(), sample, lambda output: output.square().mean()),
        Training(batch=2),
        load_hardware("cpu"),
    )
    memory = estimate_step(model, Grid.of({})).memory
    predicted = sum(memory[kind] for kind in IN_A_STEP)

    def body(world: Transport) -> int:
        mesh = Mesh(world)
        parallelize(network, mesh)
        x = distribute_tensor(torch.rand(2, *sample), mesh, dict(enumerate(SPATIAL_AXES, start=2)))

        def step() -> None:
            network.zero_grad()
            network(x).square().mean().backward()

        step()
        return counted(step)

    (peak,) = run_local(body, 1)
    assert 0.94 <= predicted / peak <= 1.10
