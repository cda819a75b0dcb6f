"""Tests of direct calls to parts of a parallelized model, on sample groups of unequal size."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import distribute_tensor, parallelize
from pydist.errors import NotSupported
from support.equivalence import assert_equal, on_ranks
from support.equivalence.groups import cut, inputs, on_groups, parts, results


class Coder(nn.Module):
    """Encoder with batch norm and dropout, followed by a decoder."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(
            nn.Conv3d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm3d(4),
            nn.SiLU(),
            nn.Dropout3d(dropout),
        )
        self.decoder = nn.Sequential(nn.Conv3d(4, 3, 3, padding=1), nn.ReLU(inplace=True))
        self.double()

    def forward(self, x):
        return self.decoder(self.encode(x))

    def encode(self, x):
        """Applies the layers one by one instead of the encoder."""
        for layer in self.encoder:
            x = layer(x)
        return x


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("given", ["plain", "sharded"])
@pytest.mark.parametrize("sizes", [(2, 1), (3, 2, 0)], ids=str)
@pytest.mark.parametrize("make", [Coder, partial(Coder, 0.5)], ids=["plain", "dropout"])
def test_a_step_through_parts_is_that_of_the_whole_batch(make, sizes, given, spatial):
    def step(model, rows, mesh):
        factor = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        x = inputs(sum(sizes))[rows]
        is_cut = given == "sharded" or (mesh is not None and mesh.size == 1)  # 1 rank: uncut
        x = cut(x, mesh) if is_cut else x
        hidden = model.encoder(x)
        loss = model.decoder(hidden).square().mean() + hidden.sin().mean()
        (factor * loss).backward()
        return results(model) | {"factor": factor.grad}

    on_groups(make, step, sizes, spatial)


def methods(model, x):
    return model.decoder(model.encode(x))


def after_the_whole(model, x):
    model(x).sin().mean().backward()
    return methods(model, x)


def frozen(model, x):
    model.encoder.requires_grad_(False).eval()
    with torch.no_grad():
        hidden = model.encoder(x)
    return model.decoder(hidden)


def checkpointed(model, x):
    model.encoder[3].eval()
    hidden = checkpoint(model.encoder, x, use_reentrant=False)
    return checkpoint(model.decoder, hidden, use_reentrant=False)


def in_evaluation(model, x):
    model.eval()
    return model.decoder(model.encoder(x))


def after_one_that_raised(model, x):
    def refuse(*_):
        raise ArithmeticError

    handle = model.encoder[2].register_forward_pre_hook(refuse)
    with pytest.raises(ArithmeticError):
        model.encoder(x)
    handle.remove()
    return model.decoder(model.encoder(x))


def copied(model, x):
    return copy.deepcopy(model.decoder)(model.encoder(x))


@pytest.mark.parametrize(
    "call",
    [methods, after_the_whole, frozen, checkpointed, in_evaluation, after_one_that_raised, copied],
)
def test_parts_in_other_ways(call):
    def step(model, rows, mesh):
        call(model, cut(inputs(3)[rows], mesh)).square().mean().backward()
        return results(model)

    on_groups(Coder, step, (2, 1))
    on_groups(partial(Coder, 0.5), step, (2, 1))


def test_groups_may_weigh_the_same():
    """The options of the model hold for its parts: here each group acts as a DDP process."""
    made = Coder()

    def body(mesh):
        model = parallelize(copy.deepcopy(made), mesh, batch_norm="group", group_weight="equal")
        model.encoder[3].eval()
        x = distribute_tensor(inputs(3)[parts(mesh, (2, 1))], mesh)
        model.decoder(model.encoder(x)).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    means = []
    for rows in (slice(0, 2), slice(2, 3)):
        model = copy.deepcopy(made)
        model.encoder[3].eval()
        model(inputs(3)[rows]).square().mean().backward()
        means.append({name: p.grad for name, p in model.named_parameters()})
    expected = {name: (grad + means[1][name]) / 2 for name, grad in means[0].items()}
    for found in on_ranks((2, 1, 1), body, 2):
        assert_equal(found, expected)


def test_parts_called_with_batches_that_groups_share_differently_are_refused_in_one_backward():
    def body(mesh):
        model = parallelize(Coder(), mesh)
        hidden = [
            model.encoder(distribute_tensor(inputs(sum(sizes))[parts(mesh, sizes)], mesh))
            for sizes in ((2, 1), (2, 2))
        ]
        with pytest.raises(NotSupported, match="one backward pass through batches"):
            sum(each.square().mean() for each in hidden).backward()

    on_ranks((1, 1, 1), body, 2)
