"""Operand dtypes that torch refuses to combine: a mesh refuses them as well."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pydist import distribute_tensor, parallelize
from pydist.errors import UsageError
from support.equivalence import layout_at, on_ranks, randn, shard

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32]
LAYERS = {
    "conv": lambda: nn.Conv3d(2, 4, 3, padding=1),
    "pointwise": lambda: nn.Conv3d(2, 4, 1),
    "transposed": lambda: nn.ConvTranspose3d(2, 4, 2, 2),
    "batch norm": lambda: nn.BatchNorm3d(2),
    "instance norm": lambda: nn.InstanceNorm3d(2, affine=True),
    "group norm": lambda: nn.GroupNorm(1, 2),
    "layer norm": lambda: nn.LayerNorm([2, 4, 4, 4]),
    "linear": lambda: nn.Linear(4, 3),
    "prelu": nn.PReLU,
}


def outcome(layer, x):
    """Returns the dtype of the result, or "refused"."""
    try:
        return str(layer(x).dtype)
    except (RuntimeError, UsageError, NotImplementedError):
        return "refused"


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_torch_and_a_mesh_take_the_same_types(layer, spatial):
    found, expected = {}, {}
    for of_layer in (torch.float32, torch.float64, torch.bfloat16):
        for of_input in TYPES:
            made = LAYERS[layer]().to(of_layer)
            x = randn(1, 2, 4, 4, 4).to(of_input)

            def body(mesh, made=made, x=x):
                own = parallelize(copy.deepcopy(made), mesh)
                return outcome(own, distribute_tensor(x, mesh))

            expected[of_layer, of_input] = outcome(made, x)
            found[of_layer, of_input] = on_ranks(spatial, body)[0]
    assert found == expected


def test_what_would_fit_is_said():
    conv, norm = nn.Conv3d(2, 4, 3), nn.GroupNorm(1, 2)

    def body(mesh):
        x = distribute_tensor(randn(1, 2, 4, 4, 4), mesh)
        with pytest.raises(UsageError, match=r"input of torch\.float64 and parameters of"):
            conv(x)
        with pytest.raises(UsageError, match="or float32 with float16 or bfloat16 input"):
            norm(x)

    on_ranks((2, 1, 1), body)


EMPTY_UNDER_AUTOCAST = {
    "cdist": (torch.float32, lambda x: torch.cdist(x, x + 1)),
    "prod over a dim": (torch.bfloat16, lambda x: x.prod(2)),
    "prod of all": (torch.bfloat16, lambda x: x.prod()),
}


@pytest.mark.parametrize(("dtype", "call"), EMPTY_UNDER_AUTOCAST.values(), ids=EMPTY_UNDER_AUTOCAST)
def test_a_rank_with_an_empty_block_follows_autocast(dtype, call):
    """Such a rank computes something else, for which autocast may have another rule."""
    x = randn(2, 8, 3).to(dtype)

    def body(mesh):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(shard(x, layout_at(mesh, x.shape, [[0, 3, 3, 8], None])))
            y = y if type(y) is torch.Tensor else y.full_tensor()
            torch.testing.assert_close(y.detach(), call(x), rtol=2**-6, atol=1e-5)

    on_ranks((3, 1, 1), body)
