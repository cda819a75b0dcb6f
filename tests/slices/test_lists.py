"""Tests of calls on lists of sharded weights, as averages and optimizers of users make."""

from __future__ import annotations

import pytest
import torch

from support.equivalence import assert_same
from support.networks.sliced import network, on_channels, parallel, weights

CALLS = {
    "average": lambda e, p: (torch._foreach_mul_(e, 0.9), torch._foreach_add_(e, p, alpha=0.1)),
    "average at once": lambda e, p: torch._foreach_lerp_(e, p, 0.1),
    "factors": lambda e, p: torch._foreach_mul_(e, [0.5 + i for i in range(len(e))]),
    "named": lambda e, p: torch._foreach_add_(e, other=p, alpha=0.5),
    "numbers": lambda e, p: torch._foreach_add_(e, scalars=[1.0] * len(e)),
    "number": lambda e, p: torch._foreach_add_(e, 2.0),
    "differences": torch._foreach_sub_,
    "quotients": torch._foreach_div_,
    "copies": lambda e, p: torch._foreach_copy_(e, p, non_blocking=True),
    "zeros": lambda e, p: torch._foreach_zero_(e),
    "bounds": lambda e, p: (torch._foreach_clamp_min_(e, -0.1), torch._foreach_clamp_max_(e, 0.1)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_lists_are_those_of_one_device(call):
    def run(model):
        parameters = [p.detach() for p in model.parameters()]
        averages = [2 * p + 1 for p in parameters]
        call(averages, parameters)
        call(parameters, averages)
        return [a if a.__class__ is torch.Tensor else a.full_tensor() for a in averages], model

    def split(mesh):
        found, model = run(parallel(mesh))
        return found, weights(model)

    expected, whole = run(network())
    for found, values in on_channels(split):
        assert_same(found, expected)
        assert_same(values, weights(whole))


def test_lists_of_different_lengths():
    def body(mesh):
        one = [p.detach() for p in parallel(mesh).parameters()]
        with pytest.raises(RuntimeError, match="lists of 4 and 2 tensors"):
            torch._foreach_add_(one, one[:2])

    on_channels(body)
