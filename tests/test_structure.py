"""Tests of model comparison: ranks with different models get an error before any exchange."""

from __future__ import annotations

import pytest
from torch import nn

import pydist
from pydist.comm import run_local
from pydist.errors import UsageError
from pydist.mesh import Mesh


def net(layers: int = 1, **options) -> nn.Sequential:
    return nn.Sequential(*(nn.Conv3d(2, 2, 3, padding=1, **options) for _ in range(layers)))


def frozen() -> nn.Sequential:
    model = net()
    model[0].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: net(2), r"module '1' differs between the ranks: absent on rank 0, Conv3d"),
        (lambda: net().eval(), r"the model differs .* Sequential \(train\) on rank 0, Sequential"),
        (frozen, r"'0.bias' differs .* 2 float32 on cpu on rank 0, 2 float32 on cpu, frozen on"),
        (lambda: net().double(), r"'0.weight' differs .* float32 on cpu on rank 0, .* float64"),
        (lambda: net(dilation=2), r"module '0''s settings differs .* dilation=\(2, 2, 2\)"),
        (lambda: net(bias=False), r"'0''s settings differs .* bias=False on rank 1"),
    ],
)
def test_the_first_difference_is_named_on_all_ranks(other, message):
    def body(world):
        model = other() if world.rank == 1 else net()
        with pytest.raises(UsageError, match=message):
            pydist.parallelize(model, Mesh(world, spatial=(2, 1, 1)))
        assert "_pydist_path" not in model.__dict__

    run_local(body, 2)


def test_equal_models_of_ranks_with_different_values_are_taken():
    run_local(lambda world: pydist.parallelize(net(), Mesh(world, spatial=(3, 1, 1))), 3)


def test_one_rank_may_have_parameters_without_a_shape():
    run_local(lambda world: pydist.parallelize(nn.LazyConv3d(2, 3), Mesh(world)), 1)
