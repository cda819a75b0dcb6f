"""Recurrent layers over unsplit and split sequences, split against whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pydist.errors import NotSupported
from support.equivalence import check_function, layout_at, on_ranks, randn, shard

SHAPE = (4, 5, 3)
"""[sequence, batch, features]"""
POINTS = {
    "batch": [None, [0, 2, 5], None],
    "batch, one part empty": [None, [0, 2, 2, 5], None],
    "sequence": [[0, 1, 4], None, None],
    "both": [[0, 1, 4], [0, 3, 5], None],
}
LAYERS = {
    "GRU": lambda: nn.GRU(3, 2, dtype=torch.float64),
    "LSTM": lambda: nn.LSTM(3, 2, 2, bidirectional=True, dtype=torch.float64),
    "RNN": lambda: nn.RNN(3, 2, nonlinearity="relu", bias=False, dtype=torch.float64),
}


def called(layer, weights, *args):
    """Calls a layer with these weights; on a copy, as rank-threads share it."""
    names = [name for name, _ in layer.named_parameters()]
    parameters = dict(zip(names, weights, strict=True))
    return torch.func.functional_call(copy.deepcopy(layer), parameters, args)


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_to_second_order(make, points):
    layer = make()
    weights = [randn(*p.shape, seed=i) for i, p in enumerate(layer.parameters())]

    def call(x, *weights):
        y, states = called(layer, weights, x)
        states = states if isinstance(states, tuple) else (states,)
        return y * 2 + sum(state.sum() for state in states)

    check_function(call, randn(*SHAPE), weights, points, second_order=True)


def test_batch_first_over_depth():
    """As over the planes of a volume; the state is given."""
    layer = nn.GRU(2, 3, batch_first=True, dtype=torch.float64)
    weights = [randn(*p.shape, seed=i) for i, p in enumerate(layer.parameters())]

    def call(x, *weights):
        x = x.permute(0, 3, 4, 2, 1).flatten(0, 2)  # [voxels of a plane, depth, channels]
        state = x[None, :, 0, :1].expand(1, -1, 3) * 0.5
        return called(layer, weights, x, state)[0]

    check_function(call, randn(2, 2, 4, 3, 2), weights, [[0, 1, 4], [0, 2, 3], None])


def test_no_sequence_is_refused():
    layer = nn.GRU(3, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Expected sequence length"):
        layer(randn(0, 5, 3))

    def body(mesh):
        x = shard(randn(0, 5, 3), layout_at(mesh, (0, 5, 3), POINTS["batch"]))
        with pytest.raises(RuntimeError, match="Expected sequence length"):
            layer(x)

    on_ranks((1, 2, 1), body)


def test_dropout_between_layers_is_refused():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["batch"]))
        with pytest.raises(NotSupported, match="dropout between its layers"):
            nn.GRU(3, 2, 2, dropout=0.5, dtype=torch.float64)(x)

    on_ranks((1, 2, 1), body)
