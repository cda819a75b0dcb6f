"""`nn.MultiheadAttention` and torch's transformer layers on split tokens, to second order."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.attention import forced
from support.equivalence import (
    Task,
    check_function,
    check_network,
    layout_at,
    on_ranks,
    randn,
    shard,
)
from support.networks.small import initialized

SHAPE = (2, 4, 7)  # samples, channels, tokens
POINTS = {"2": [[0, 3, 7]], "3, one empty": [[0, 2, 2, 7]]}
HIDDEN = torch.arange(7).expand(2, 7) > torch.tensor([[5], [3]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)


def multi_head(**options):
    return initialized(nn.MultiheadAttention(4, 2, **{"batch_first": True} | options))


def encoder(**options):
    return initialized(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, **options))


NETWORKS = {
    "weights": (multi_head, lambda net, x: net(x, x, x)[0] * net(x, x, x)[1].sum(-1, keepdim=True)),
    "fused": (multi_head, lambda net, x: net(x, x, x, need_weights=False)[0]),
    "tokens first": (
        lambda: multi_head(batch_first=False),
        lambda net, x: net(*[x.transpose(0, 1)] * 3, need_weights=False)[0],
    ),
    "causal": (
        multi_head,
        lambda net, x: net(x, x, x, need_weights=False, is_causal=True, attn_mask=CAUSAL)[0],
    ),
    "padded": (
        lambda: multi_head(bias=False),
        lambda net, x: net(x, x, x, key_padding_mask=HIDDEN, attn_mask=CAUSAL < 0)[0],
    ),
    "padded, fused": (
        multi_head, lambda net, x: net(x, x, x, need_weights=False, key_padding_mask=HIDDEN)[0],
    ),
    "other keys": (
        lambda: multi_head(kdim=3, vdim=5),
        lambda net, x: net(x, randn(2, 3, 3), randn(2, 3, 5), need_weights=False)[0],
    ),
    "plain queries": (
        multi_head, lambda net, x: net(randn(2, 3, 4), x, x, need_weights=False)[0],
    ),
    "more keys": (
        lambda: multi_head(add_bias_kv=True, add_zero_attn=True),
        lambda net, x: net(x, x, x, need_weights=False)[0],
    ),
    "unbatched": (multi_head, lambda net, x: net(x[0], x[0], x[0])[0]),
    "encoder": (encoder, lambda net, x: net(x)),
    "encoder, evaluated": (lambda: encoder(norm_first=True).eval(), lambda net, x: net(x, CAUSAL)),
    "decoder": (
        lambda: initialized(nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True)),
        lambda net, x: net(x * 2, x),
    ),
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("form", ["ring", "gather"])
@pytest.mark.parametrize(("make", "call"), NETWORKS.values(), ids=NETWORKS)
def test_to_second_order(make, call, form, points):
    net = make()
    names = [name for name, _ in net.named_parameters()]

    def function(x, *parameters):
        own = copy.deepcopy(net)  # the rank-threads share the network

        def called(*args, **kwargs):
            given = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(own, given, args, kwargs)

        return call(called, x.mT)

    parameters = [p.detach() for p in net.parameters()]
    with forced(form), sdpa_kernel(SDPBackend.MATH):
        check_function(function, randn(*SHAPE), parameters, points, second_order=True)


class Voxels(nn.Module):
    """Transformer of the voxels of a volume."""

    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])


@pytest.mark.parametrize("channel", [1, 2])
def test_a_transformer_of_voxels(channel):
    x, target = randn(2, 4, 5, 3, 2), randn(2, 4, 5, 3, 2, seed=1)
    task = Task(initialized(Voxels()), x, target, nn.functional.mse_loss)
    check_network(task, (2, 1, 2), axes={"channel": channel})
    check_network(task, (2, 1, 1), 2, axes={"channel": channel})


def test_evaluation_without_gradients():
    """torch's fast path, which only plain tensors take, computes the expected result."""
    net = nn.TransformerEncoder(encoder(), 2).eval()

    def body(mesh):
        x = randn(*SHAPE).mT
        with torch.no_grad():
            found = copy.deepcopy(net)(shard(x, layout_at(mesh, x.shape, [[0, 3, 7], None])))
            assert (found.full_tensor() - net(x)).abs().max() < 1e-12

    on_ranks((2, 1, 1), body)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_with_hidden_tokens():
    """torch's fast path returns 0 for the hidden tokens; the others are those of one device."""
    net = nn.TransformerEncoder(encoder(), 2).eval()
    whole = randn(*SHAPE).mT
    with torch.no_grad():
        expected = net(whole, src_key_padding_mask=HIDDEN)

    def body(mesh):
        x = shard(whole, layout_at(mesh, whole.shape, [[0, 3, 7], None]))
        with torch.no_grad():
            found = copy.deepcopy(net)(x, src_key_padding_mask=HIDDEN).full_tensor()
        assert (found - expected)[~HIDDEN].abs().max() < 1e-12

    on_ranks((2, 1, 1), body)
