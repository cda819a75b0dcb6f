"""Tests of predicted memory against the tensors that a real step keeps for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from monai.networks.nets import UNet
from torch import Tensor, nn

from pydist import Mesh, distribute_tensor, parallelize
from pydist.comm import Transport, run_local
from pydist.grid import SPATIAL_AXES, Grid
from pydist.models import CosmoFlow, UNet3d
from pydist.plan import StepModel, Training, load_hardware, trace_network
from pydist.tensor import local_of


def monai() -> nn.Module:
    return UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cosmoflow": (lambda: CosmoFlow(32, dropout=0.0), (4, 32, 32, 32)),
    "cosmoflow with norms": (lambda: CosmoFlow(32, batch_norm=True, dropout=0.0), (4, 32, 32, 32)),
    "unet3d": (lambda: UNet3d(1, 2, features=4, levels=2), (1, 16, 16, 16)),
    "monai": (monai, (1, 32, 32, 32)),
}
MESHES = {"1 rank": (1, 1, 1), "depth 2": (2, 1, 1), "width 2": (1, 1, 2)}


def kept_for_backward(output: Tensor, given: list[Tensor]) -> int:
    """Counts the bytes of memories that the nodes of a graph have saved, without given ones."""
    known = {x.untyped_storage().data_ptr() for x in given}
    found: dict[int, int] = {}
    nodes, seen = [output.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_")]
        saved = [getattr(node, name) for name in names] + [*getattr(node, "saved_tensors", ())]
        for x in saved:
            for each in x if isinstance(x, tuple | list) else (x,):
                if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known:
                    storage = each.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NETWORKS)
def test_activations_are_those_that_a_real_step_keeps(name: str, mesh: str) -> None:
    made, sample = NETWORKS[name]
    spatial = MESHES[mesh]
    torch.manual_seed(0)
    networks = [made() for _ in range(max(spatial))]

    def step(world: Transport) -> int:
        mine = Mesh(world, spatial=spatial)
        network = parallelize(networks[world.rank], mine)
        x = distribute_tensor(torch.zeros(2, *sample), mine, dict(enumerate(SPATIAL_AXES, start=2)))
        output = network(x)
        own = local_of(output) if hasattr(output, "_layout") else output
        return kept_for_backward(own, [local_of(x), *network.parameters(), *network.buffers()])

    real = max(run_local(step, max(spatial)))
    model = StepModel(
        trace_network(made(), sample, lambda output: output.mean()),
        Training(batch=2),
        load_hardware("cpu"),
    )
    memory = model.estimate(Grid.of(dict(zip(SPATIAL_AXES, spatial, strict=True)))).memory
    predicted = memory["activations"] + memory["halos"] + memory["copies"]
    assert 0.95 <= predicted / real <= 1.10
