"""Random numbers of the shape of a sharded weight: equal in all groups, new in each step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pydist.errors import NotSupported
from support.networks.sliced import backward, batch, on_channels, parallel

DRAWS = {
    "normal": torch.randn_like,
    "uniform": lambda w: torch.rand_like(w.grad),
    "bernoulli": lambda w: torch.bernoulli(torch.full_like(w, 0.5)),
    "dropout": lambda w: F.dropout(torch.ones_like(w), 0.5),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_equal_in_all_groups_and_splits(draw):
    def body(mesh):
        model = parallel(mesh)
        backward(model, batch(mesh))
        if mesh.data_index == 1:  # a group may draw for its samples alone
            with torch.no_grad():
                torch.rand_like(batch(mesh))
        return draw(model[0].weight).full_tensor().detach()

    first, *others = on_channels(body, data=2) + on_channels(body, channel=3)
    for other in others:
        assert torch.equal(other, first)


def test_new_in_each_step():
    def body(mesh):
        model, x = parallel(mesh), batch(mesh)
        drawn = [torch.randn_like(model[0].weight)]
        for _ in range(70):
            drawn += [torch.randn_like(model[0].weight) for _ in range(2)]
            F.dropout(model(x), 0.5)
        return [float(noise.to_local()[0, 0]) for noise in drawn]

    found = on_channels(body)[0]
    assert len(set(found)) == len(found) == 141


def test_under_checkpoints_refused():
    def body(mesh):
        model, x = parallel(mesh), batch(mesh)
        dropped = checkpoint(lambda: F.dropout(model[0].weight, 0.5).sin(), use_reentrant=False)
        with pytest.raises(NotSupported, match="of a sharded weight, under activation checkpoint"):
            (F.linear(x, dropped)).square().mean().backward()

    on_channels(body)
