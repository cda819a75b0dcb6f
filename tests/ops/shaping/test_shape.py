"""Reordering, adding and expanding dims: the splits move with their dims."""

from __future__ import annotations

import pytest
import torch

from pydist.errors import UsageError
from support.equivalence import Cut, check_function, layout_at, on_ranks, randn, shard
from support.equivalence.splits import SHAPE
from support.equivalence.splits import THREE_SPLITS as POINTS

CALLS = {
    "unsqueeze": lambda x: x.unsqueeze(2).unsqueeze(-1),
    "unsqueeze(axis)": lambda x: torch.unsqueeze(x, axis=1),
    "permute": lambda x: x.permute(4, 0, 2, 1, 3) * 2,
    "permute of a tuple": lambda x: torch.permute(x, (0, 2, 3, 4, 1)),
    "permute(dims)": lambda x: x.permute(dims=(1, 0, 2, 4, 3)),
    "transpose": lambda x: x.transpose(1, 2),
    "transpose, negative": lambda x: torch.transpose(x, -1, 0),
    "transpose by names": lambda x: x.transpose(dim1=1, dim0=3) + x.swapaxes(axis0=3, axis1=1),
    "swapdims": lambda x: torch.swapdims(x, 2, 4),
    "t, T, mT": lambda x: x[0, :, :, 0, 0].t() * x[0, 0, :, :1, 0].T.sum() * x[:1].mT.sum(),
    "movedim": lambda x: x.movedim(1, -1),
    "moveaxis of many": lambda x: torch.moveaxis(x, (4, 0), (1, 2)),
    "permuted, then met by its like": lambda x: x.transpose(2, 3).transpose(2, 3) * x,
    "atleast_3d": lambda x: torch.atleast_3d(x[0, 0, :, 0]) * 2,
    "atleast of two": lambda x: sum(t.sum() for t in torch.atleast_2d(x[0, 0, 0, 0], x[0])),
    "expand": lambda x: x[:, :1].expand(-1, 3, 5, 4, 3) * x,
    "expand a split dim of one": lambda x: x[:, :, 1:2].expand(2, 3, 5, 4, -1) * x,
    "expand to more dims": lambda x: x.expand(2, *SHAPE),
    "expand_as": lambda x: x.mean((2, 3, 4), keepdim=True).expand_as(x) * x,
    "plain.expand_as": lambda x: randn(3, 1, 1, 1).expand_as(x) * x,
    "broadcast_to": lambda x: torch.broadcast_to(x[:, :, :1], SHAPE) * x,
    "broadcast_tensors": lambda x: sum(torch.broadcast_tensors(x[:1], randn(3, 1, 1, 3), x)),
    "numel, size, len": lambda x: x * x.size(0) + x.numel() + len(x) + x.shape[2] + x.dim(),
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(lambda x: call(x * x), randn(*SHAPE), (), points, second_order=True)


def test_a_parameter_expanded_as_a_sharded_tensor():
    check_function(
        lambda x, p, y: p.expand_as(x) * x + y.expand_as(x).exp() * p,
        randn(*SHAPE), [randn(3, 1, 1, 1, seed=1)], [[0, 2, 5], [0, 4, 4], None],
        beside=[Cut(randn(1, 4, 3, seed=2), [None, [0, 1, 4], None])],
        second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: x.view(7, 7), RuntimeError),
        (lambda x: x[5], IndexError),
        (lambda x: x.unsqueeze(9), IndexError),
        (lambda x: x.flatten(9), IndexError),
        (lambda x: x.flatten(3, 1), RuntimeError),
        (lambda x: x.unflatten(1, (2, 2)), RuntimeError),
        (lambda x: x.transpose(0, 7), IndexError),
        (lambda x: x.permute(0, 1), RuntimeError),
        (lambda x: x.permute(0, 1, 1, 2, 3), RuntimeError),
        (lambda x: x.movedim((0, 1), (2,)), RuntimeError),
        (lambda x: x.t(), RuntimeError),
        (lambda x: x.expand(2, 3, 6, 4, 3), RuntimeError),
        (lambda x: x.expand(4, 3), RuntimeError),
        (lambda x: x[..., :2].expand_as(x), RuntimeError),
        (lambda x: x.expand_as(x[:, :1]), RuntimeError),
        (lambda x: x[0, 0, :, :, :, 0], IndexError),
        (lambda x: x[:, :, ::-1], ValueError),
        (lambda x: x[:, :, 5], IndexError),
        (lambda x: x[:, torch.ones(4, dtype=torch.bool)], IndexError),
        (lambda x: x.select(2, 5), IndexError),
        (lambda x: x.narrow(2, 3, 3), RuntimeError),
        (lambda x: x.narrow(2, 6, 0), IndexError),
        (lambda x: x.split([2, 2], 2), RuntimeError),
        (lambda x: x.split(0, 2), RuntimeError),
        (lambda x: x.chunk(0, 2), RuntimeError),
        (lambda x: x.tensor_split(0, 2), RuntimeError),
        (lambda x: torch.gather(x, 1, torch.zeros(2, 1, 6, 4, 3, dtype=torch.int64)), RuntimeError),
        (lambda x: torch.cat([x, x[:, :, :, :1]], 1), (RuntimeError, UsageError)),
        (lambda x: x.repeat(2, 2), RuntimeError),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2]), 2), RuntimeError),
        (lambda x: x @ x, RuntimeError),
        (lambda x: torch.bmm(x, x), RuntimeError),
        (lambda x: torch.bmm(x[0, :2, 0], x[0, :, 0].mT), RuntimeError),
        (lambda x: torch.matmul(x, torch.tensor(1.0)), RuntimeError),
        (lambda x: torch.einsum("ncdhw,nc->c", x), RuntimeError),
        (lambda x: torch.einsum("nc->c", x), RuntimeError),
        (lambda x: x.sum(9), IndexError),
        (lambda x: x.softmax(9), IndexError),
        (lambda x: x.long().softmax(4), RuntimeError),
    ],
)  # fmt: skip
def test_what_is_wrong_in_torch_is_wrong_here(call, kind):
    """The error has torch's kind, and there is no wrong result."""
    with pytest.raises(kind):
        call(randn(*SHAPE))

    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [None, None, [0, 1, 3]]))
        with pytest.raises(kind):
            call(x)

    on_ranks((1, 1, 2), body)
