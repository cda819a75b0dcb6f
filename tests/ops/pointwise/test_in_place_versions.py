"""In-place calls on tensors that checkpointing has saved: the change is detected."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pydist import layout_for_sample
from support.equivalence import on_ranks, randn, shard

CHANGES = {
    "leaky_relu": lambda x: F.leaky_relu_(x, 0.1),
    "add": lambda x: x.add_(1.0),
    "dropout": lambda x: F.dropout(x, 0.5, inplace=True),
    "assignment": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "fill": lambda x: x.zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_checkpoint_kept(change):
    """Recomputation would start from the changed input."""

    def run(x):
        def part(y):
            change(y)
            return y.square()

        checkpoint(part, x.requires_grad_() * 1, use_reentrant=False).sum().backward()

    def rank(mesh):
        x = randn(1, 4, 8, 4, 4)
        for each in (x, shard(x, layout_for_sample(mesh, x.shape))):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run(each)

    on_ranks((2, 1, 1), rank)
