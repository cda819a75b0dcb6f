"""Split maximum unpooling equals the one-device run, for any indices."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist.errors import UsageError
from pydist.ops.pool import unpool
from support.equivalence import Cut, layout_at, on_ranks, randint, shard
from support.equivalence.exact import check_exact, whole_numbers
from support.equivalence.strategies import WindowCase, cuts, windows

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
UNPOOL = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=25)
def test_back_to_where_a_pooling_found_them(dims, data):
    """Overlapping windows may name one position several times, with values other than maxima."""
    case: WindowCase = data.draw(windows(dims=dims, dilations=1, pooling=True))
    geometry = case.kernel, case.stride, case.padding

    def there_and_back(x):
        y, indices = MAX[dims](x, *geometry, return_indices=True)
        return UNPOOL[dims](y * y + y, indices, *geometry, output_size=extents)

    x = whole_numbers(2, 2, *case.extents)
    _, indices = MAX[dims](x, *geometry, return_indices=True)
    # If torch refuses the input's extents as the output size, the indices mean other positions.
    extents = [
        n if abs(n - (usual := (m - 1) * s + k - 2 * p)) < s else usual
        for n, m, k, s, p in zip(case.extents, indices.shape[2:], *geometry, strict=True)
    ]
    if indices.max() >= torch.Size(extents).numel():
        return
    check_exact(there_and_back, x, case.points)


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=15)
def test_to_any_place(dims, data):
    extents = tuple(data.draw(st.integers(1, 5)) for _ in range(dims))
    x = whole_numbers(2, 2, *extents)
    most = torch.Size(2 * n for n in extents).numel()
    indices = randint(most, *x.shape, seed=data.draw(st.integers(0, 99), "seed"))
    points = data.draw(cuts(extents))
    check_exact(lambda x, i: UNPOOL[dims](x, i, 2, stride=2), x, points, Cut(indices, points))


def test_the_last_value_stays_whatever_the_order_in_which_they_are_written():
    """As on a GPU, `found` starts from a scatter that wrote in another order."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(2, 3, 40, generator=generator, requires_grad=True)
    places = torch.randint(12, (2, 3, 40), generator=generator)
    expected = torch.zeros(2, 3, 12)
    for n, c, i in itertools.product(range(2), range(3), range(40)):
        expected[n, c, places[n, c, i]] = values[n, c, i].detach()
    found = torch.zeros(2, 3, 12).scatter(2, places.flip(2), values.flip(2))
    assert not torch.equal(found, expected)
    unpool._let_last_stay(found, places, values)
    assert torch.equal(found, expected)
    found.backward(weights := torch.rand(2, 3, 12, generator=generator))
    assert torch.equal(values.grad, weights.gather(2, places)), "all get the gradient of the place"


def test_indices_cut_otherwise_plain_and_without_a_batch_dim():
    x = whole_numbers(2, 2, 4, 4, 4)
    indices = randint(512, *x.shape)
    check_exact(
        lambda x, i: F.max_unpool3d(x, i, 2), x, [[0, 1, 4], None, None],
        Cut(indices, [[0, 3, 4], None, None]),
    )  # fmt: skip
    check_exact(lambda x: F.max_unpool3d(x, indices, 2), x, [[0, 1, 4], None, None])
    check_exact(lambda x: F.max_unpool3d(x[1], indices[1], 2), x, [[0, 1, 4], None, None])


WRONG = {
    "another shape": (lambda x, i: F.max_unpool3d(x, i[:, :1], 2), "index for every value"),
    "another type": (lambda x, i: F.max_unpool3d(x, i.float(), 2), "int64"),
    "beyond the result": (lambda x, i: F.max_unpool3d(x, i + 2000, 2), "beyond"),
    "below zero on one rank": (lambda x, i: F.max_unpool3d(x, i - (i > 300) * 999, 2), "beyond"),
    "a size too far off": (lambda x, i: F.max_unpool3d(x, i, 2, output_size=(8, 8, 6)), "less"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_on_all_ranks(call, message):
    def body(mesh):
        layout = layout_at(mesh, (1, 2, 4, 4, 4), [[0, 2, 4], None, None])
        x = shard(whole_numbers(1, 2, 4, 4, 4), layout)
        indices = shard(torch.arange(0, 512, 4).view(1, 2, 4, 4, 4) % 512, layout)
        with pytest.raises(UsageError, match=message):
            call(x, indices)

    on_ranks((2, 1, 1), body)
