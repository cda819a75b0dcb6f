"""Calls that return indices, counts, addresses or strides: global values, or refused by name."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pydist import ShardedTensor
from pydist.errors import NotSupported
from support.equivalence import layout_at, on_ranks, randint, shard

SHAPE = (2, 4, 6, 4, 4)
LAYOUTS = {
    "2 uneven": ([[0, 2, 6], None, None], (2, 1, 1)),
    "3 with an empty shard": ([[0, 1, 1, 6], None, None], (3, 1, 1)),
    "2x2": ([[0, 2, 6], [0, 1, 4], None], (2, 2, 1)),
}

GLOBAL = """
torch.where(x > 0)
torch.where(x > 9)
torch.where(x)
torch.nonzero(x)
torch.nonzero(x[:, :, 3] > 2, as_tuple=True)
torch.argwhere(x > 2)
x.nonzero()
(x[:, 1] == 3).nonzero(as_tuple=True)
x.count_nonzero()
x.count_nonzero(2)
x.argmax()
x.argmax(2)
x.argmin()
x.argmin(1)
x.max(2)
x.min(1)
x.median(1)
x.mode(1)
x.cummax(1)
x.topk(2, 1)[0]
x.sort(dim=1, stable=True)
torch.argsort(x, dim=1, stable=True)
F.max_pool3d(x, 2, return_indices=True)
F.max_pool3d(x, 3, 2, 1, return_indices=True)
F.adaptive_max_pool3d(x, (2, 2, 1), return_indices=True)
torch.bincount(x.long().flatten())
torch.isin(x, torch.tensor([1.0, 3.0]))
F.one_hot(x.long())
x.numel()
x.nelement()
x.element_size()
x.shape
x.size()
x.size(2)
x.dim()
x.ndim
len(x)
x.is_contiguous()
x.tolist()
x.sum().item()
x.is_leaf
torch.numel(x)
[t.shape for t in x]
[t.shape for t in x.split(4, 2)]
x.any(2)
x.all()
x.unique()
torch.unique(x, return_counts=True)
torch.unique_consecutive(x)
torch.histc(x, 4)
torch.equal(x, x)
torch.allclose(x, x)
x.median()
torch.equal(x, x + 1)
torch.equal(x, x[:1])
torch.allclose(x, x + 1)
torch.histc(x, 5, -2, 9)
x.sort(dim=2, stable=True)
x.topk(2, 2)[0]
x.kthvalue(3, 2)[0]
torch.tensor(x.numpy())
torch.tensor(np.asarray(x))
x[x > 3]
x.masked_select(x > 3)
""".strip().splitlines()

REFUSED = """
x.stride()
x.storage_offset()
x.data_ptr()
x.storage()
x.untyped_storage()
x.__dlpack__()
x.nbytes
x._version
x._base
torch.searchsorted(torch.tensor([1.0, 2.0]), x)
torch.bucketize(x, torch.tensor([1.0, 2.0]))
torch.searchsorted(x, torch.tensor([1.0]))
torch.is_same_size(x, x)
torch.nonzero_static(x, size=3)
x.is_contiguous(memory_format=torch.channels_last_3d)
torch.multinomial(x[0, :, 0, 0], 1)
""".strip().splitlines()


def _run(call, x):
    return _whole(eval(call, {"torch": torch, "F": F, "np": np, "x": x}))


def _whole(value):
    if isinstance(value, ShardedTensor):
        return value.full_tensor()
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return [_whole(each) for each in value]
    return value


def _equal(mine, theirs):
    if isinstance(theirs, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(theirs, list):
        pairs = zip(mine, theirs, strict=True)
        return len(mine) == len(theirs) and all(_equal(m, t) for m, t in pairs)
    return mine == theirs


def _numbers(mesh, points):
    values = randint(5, *SHAPE).double()
    return shard(values, layout_at(mesh, SHAPE, points)).detach()


@pytest.mark.parametrize("where", LAYOUTS)
def test_indices_and_counts_are_those_of_the_whole_tensor_on_all_ranks(where):
    points, spatial = LAYOUTS[where]

    def body(mesh):
        x = _numbers(mesh, points)
        return [_run(call, x) for call in GLOBAL]

    x = randint(5, *SHAPE).double()
    expected = [_run(call, x) for call in GLOBAL]
    for found in on_ranks(spatial, body):
        wrong = [call for call, mine, theirs in zip(GLOBAL, found, expected, strict=True)
                 if not _equal(mine, theirs)]  # fmt: skip
        assert not wrong


def test_addresses_strides_and_what_needs_the_whole_are_refused_by_name():
    points, spatial = LAYOUTS["3 with an empty shard"]

    def body(mesh):
        x = _numbers(mesh, points)
        answered = []
        for call in REFUSED:
            try:
                _run(call, x)
            except NotSupported:
                continue
            answered.append(call)
        return answered

    assert on_ranks(spatial, body) == [[], [], []]


def test_indices_select_what_they_were_taken_from():
    x = randint(5, *SHAPE).double()
    expected = x[torch.where(x > 2)]

    def body(mesh):
        own = _numbers(mesh, LAYOUTS["2x2"][0])
        return own[torch.where(own > 2)].full_tensor()

    for found in on_ranks((2, 2, 1), body):
        assert torch.equal(found, expected)
