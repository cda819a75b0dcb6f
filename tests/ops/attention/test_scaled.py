"""Attention over split tokens equals one device, in every form of exchange, to second order."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pydist import Layout, Partition, ShardedTensor, Split
from pydist.errors import UsageError
from pydist.ops.attention import blocks, ring
from support.attention import forced
from support.equivalence import Cut, check_function, error, layout_at, on_ranks, randn, shard

attention = F.scaled_dot_product_attention
SHAPE = (2, 3, 4, 7)  # samples, heads, channels, tokens
POINTS = {"2": [[0, 3, 7]], "3, one empty": [[0, 2, 2, 7]], "2, one empty": [[0, 7, 7]]}
FORMS = ("ring", "gather")


def mask(rows=7, hidden=2):
    """Returns a mask under which one query attends to no key."""
    allowed = randn(rows, 7, seed=9) > -0.3
    allowed[hidden] = False
    return allowed


def self_attention(x, *args, **kwargs):
    return attention(x.mT, x.mT * 2, x.mT + 1, *args, **kwargs)


def cross(x, queries, **kwargs):
    return attention(queries, x.mT, x.mT * 2, **kwargs)


CALLS = {
    "tokens": self_attention,
    "causal": lambda x: self_attention(x, is_causal=True),
    "a mask": lambda x: self_attention(x, mask()),
    "a sharded mask": lambda x: self_attention(x, x.detach()[:1].mT @ x.detach()[:1] > 0),
    "an additive mask": lambda x: self_attention(x, randn(3, 1, 7, seed=8), scale=0.3),
    "a mask with a gradient": lambda x: self_attention(x, (x.mT @ x).square()),
    "fewer channels of values": lambda x: attention(x.mT, x.mT, x.mT[..., :3]),
    "groups of heads": lambda x: attention(
        torch.cat([x, x * 2], 1).mT, x.mT, x.mT, randn(6, 7, 7), enable_gqa=True
    ),
    "one sample of keys": lambda x: attention(x.mT, x[:1].mT, x[:1].mT),
    "one head of queries": lambda x: attention(x[:, :1].mT, x.mT, x.mT),
    "keys without samples": lambda x: attention(x.mT, x[0].mT, x[0].mT),
    "no batch dims": lambda x: attention(x[0, 0].mT, x[1, 0].mT, x[1, 1].mT),
    "five dims": lambda x: attention(*(t.unflatten(1, (3, 1)).mT for t in (x, x * 2, x))),
    "plain keys": lambda x: attention(x.mT, randn(2, 3, 5, 4), randn(2, 3, 5, 3)),
    "plain values": lambda x: attention(x.mT, x.mT, randn(2, 3, 7, 4)),
    "plain queries": lambda x: cross(x, randn(2, 3, 5, 4)),
    "plain queries, causal": lambda x: cross(x, randn(3, 5, 4), is_causal=True),
    "plain queries, masked": lambda x: cross(x, randn(2, 3, 5, 4), attn_mask=mask(5)),
    "gathered queries": lambda x: cross(x, x.sum(-1, keepdim=True).mT),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, form, points):
    with forced(form):
        check_function(call, randn(*SHAPE), (), points)
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernels have no second derivative
            check_function(call, randn(*SHAPE), (), points, second_order=True)


@pytest.mark.parametrize("name", ["causal", "a mask", "an additive mask", "one head of queries"])
def test_queries_in_several_parts(name, monkeypatch):
    monkeypatch.setattr(ring, "MOST_QUERIES", 2)
    with forced("ring"):
        check_function(CALLS[name], randn(*SHAPE), (), POINTS["2"])


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_a_volume_split_along_three_axes(form):
    def call(x):
        tokens = x.flatten(2).mT
        return attention(tokens, tokens * 2, tokens, is_causal=True)

    points = [[0, 1, 3], [0, 0, 2], [0, 1, 3]]
    with forced(form), sdpa_kernel(SDPBackend.MATH):
        check_function(call, randn(2, 4, 3, 2, 3), (), points, second_order=True)


@pytest.mark.parametrize("points", [[0, 1, 3, 5, 5], [0, 0, 5]], ids=str)
def test_ranks_without_tokens_have_a_second_derivative(points):
    """Of channels that are not contiguous, torch computes attention by parts, which have one."""

    def call(x):
        heads = x.flatten(2).mT.unflatten(2, (2, 2)).transpose(1, 2)
        return attention(heads, heads * 2, heads)

    with forced("gather"):
        check_function(call, randn(2, 4, 5, 2, 3), (), [points, None, None], second_order=True)


def test_axes_in_another_order_than_the_meshs():
    """A split may number the ranks otherwise than their group does."""
    x = randn(1, 1, 7, 4)
    whole = attention(x, x * 2, x, is_causal=True)

    def body(mesh):
        split = Split(("height", "depth"), Partition([0, 1, 3, 3, 7]))
        y = shard(x, Layout(mesh, x.shape, [None, None, split, None]))
        found = attention(y, y * 2, y, is_causal=True)
        assert found.layout.splits[2] == split
        assert error(found.full_tensor().detach(), whole) < 1e-12

    with forced("ring"):
        on_ranks((2, 2, 1), body)


OPTIONS = {"all": {}, "causal": {"is_causal": True}, "masked": {"attn_mask": mask()}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_split_tokens_and_channels(options):
    def call(x):
        return attention(x, x * 2, x + 1, **options)

    with sdpa_kernel(SDPBackend.MATH):
        for points in ([[0, 3, 7], [0, 1, 4]], [[0, 0, 7], [0, 4, 4]]):
            check_function(call, randn(2, 3, 7, 4), (), points, second_order=True)


@st.composite
def cases(draw):
    extents = st.integers(1, 9)
    queries, keys = draw(extents), draw(extents)
    parts = draw(st.integers(2, 3))

    def points(n):
        inner = sorted(draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1)))
        return [[0, *inner, n]]

    def operand(tokens, channels, seed):
        batch = [draw(st.sampled_from([1, n])) for n in (2, 3)][draw(st.integers(0, 2)) :]
        return randn(*batch, channels, tokens, seed=seed)

    q, k = operand(queries, 4, 1), operand(keys, 4, 2)
    v = randn(*k.shape[:-2], draw(st.sampled_from([2, 4])), keys, seed=3)
    kind = draw(st.sampled_from(["none", "causal", "bool", "additive"]))
    return q, k, v, points(queries), points(keys), draw(st.booleans()), kind


@given(cases(), st.sampled_from(FORMS))
def test_random_shapes_and_splits(case, form):
    q, k, v, of_q, of_k, is_whole, kind = case
    given_mask = {"bool": mask, "additive": lambda rows: randn(rows, 7, seed=5)}.get(kind)
    rows, columns = q.shape[-1], k.shape[-1]
    allowed = None if given_mask is None else given_mask(max(rows, 3))[:rows]
    if allowed is not None:
        allowed = torch.cat([allowed, allowed], 1)[:, :columns]

    def call(q, k, v):
        return attention(q.mT, k.mT, v.mT, allowed, is_causal=kind == "causal")

    beside = [Cut(k, of_k), Cut(v, of_k)]
    if is_whole:  # the queries are first: keys and values may be whole
        beside = [Cut(k, [None]), Cut(v, of_k)]
    with forced(form):
        check_function(call, q, (), of_q, beside=beside)


def test_a_mask_may_hide_all_keys_with_the_smallest_number():
    """Scores that are all the same huge number: their mean is that of all values."""
    hiding = torch.zeros(7, 7, dtype=torch.float64)
    hiding[4] = torch.finfo(torch.float64).min
    with forced("ring"), sdpa_kernel(SDPBackend.MATH):
        check_function(lambda x: self_attention(x, hiding), randn(*SHAPE), (), POINTS["2"])
    with forced("ring"):
        x = randn(*SHAPE).mT
        whole = (x @ x.mT / 2 + hiding).softmax(-1) @ x

        def body(mesh):
            y = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2"])).mT
            assert error(attention(y, y, y, hiding).full_tensor().detach(), whole) < 1e-12

        on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, form):
    exact = self_attention(randn(*SHAPE)).detach()
    alone = error(self_attention(randn(*SHAPE).to(dtype)).double(), exact)

    def body(mesh):
        x = shard(randn(*SHAPE).to(dtype), layout_at(mesh, SHAPE, POINTS["2"]))
        y = self_attention(x)
        assert y.dtype == dtype
        assert error(y.full_tensor().detach().double(), exact) <= 2 * alone
        (y.float() ** 2).sum().backward()
        return x.grad.full_tensor().double()

    with forced(form):
        found = on_ranks((2, 1, 1), body)[0]
    x = randn(*SHAPE).requires_grad_()
    (self_attention(x) ** 2).sum().backward()
    assert error(found, x.grad) < 2 ** (-4 if dtype == torch.bfloat16 else -7)


def test_a_mask_in_fp32_beside_half_precision_is_not_rounded():
    bias = torch.linspace(-60, 0, 7).float() + randn(7, 7, seed=6).float()
    x = randn(*SHAPE).bfloat16()
    exact = self_attention(x.double(), bias.double())
    alone = error(self_attention(x, bias).double(), exact)

    def body(mesh):
        y = shard(x, layout_at(mesh, SHAPE, POINTS["2"]))
        (found := self_attention(y, bias)).float().square().sum().backward()
        return found.full_tensor().detach().double(), y.grad.full_tensor().double()

    with forced("ring"):
        found, grad = on_ranks((2, 1, 1), body)[0]
    assert error(found, exact) <= 1.2 * alone
    whole = x.double().requires_grad_()
    self_attention(whole, bias.double()).square().sum().backward()
    assert error(grad, whole.grad) < 2**-4


def test_autocast():
    def body(mesh):
        x = shard(randn(*SHAPE).float(), layout_at(mesh, SHAPE, POINTS["2"]))
        with torch.autocast("cpu", torch.bfloat16):
            return self_attention(x).dtype, self_attention(x, dropout_p=0.1).dtype

    for form in FORMS:
        with forced(form):
            assert set(sum(on_ranks((2, 1, 1), body), ())) == {torch.bfloat16}


@pytest.mark.parametrize("form", FORMS)
def test_scores_under_autocast_are_those_of_one_device(form):
    """The probability is so small that nothing is dropped."""
    x, target = randn(1, 2, 32, 128).bfloat16().float() * 1.5, randn(1, 2, 128, 32).float()

    def results(x, **options):
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            y = self_attention(x, **options)
        (y.to(x.dtype) * target.to(x.dtype)).sum().backward()
        return y.detach(), x.grad

    def body(mesh):
        y = shard(x, layout_at(mesh, x.shape, [[0, 50, 128]]))
        return [t.full_tensor() for t in results(y, dropout_p=1e-9)]

    exact = results(x.double().requires_grad_())
    alone = results(x.clone().requires_grad_())
    with forced(form):
        found = on_ranks((2, 1, 1), body)[0]
    # Backward of a ring, as of fused kernels, uses the rounded result.
    for bound, *same in zip((1.1, 5), found, alone, exact, strict=True):
        one, other, right = (t.double() for t in same)
        assert error(one, right) <= bound * error(other, right)


def test_bad_arguments():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2"])).mT
        with pytest.raises(RuntimeError, match="exclude each other"):
            attention(x, x, x, mask(), is_causal=True)
        with pytest.raises(UsageError, match="dropout probability 2: 0 to 1"):
            attention(x, x, x, dropout_p=2)
        with pytest.raises(RuntimeError, match="of the same dtype expected"):
            attention(x, x.float(), x)
        with pytest.raises(RuntimeError, match=r"attn_mask of torch\.int64; bool"):
            attention(x, x, x, mask().long())
        with pytest.raises(RuntimeError, match="at least 2 dims expected"):
            attention(x, x[0, 0, 0], x)
        with pytest.raises(RuntimeError, match="2 heads of queries, 3 of keys"):
            attention(x[:, :2], x, x, enable_gqa=True)
        with pytest.raises(RuntimeError, match="do not fit together"):
            attention(x, x[..., :2], x)
        assert isinstance(attention(x, x, x), ShardedTensor)

    on_ranks((2, 1, 1), body)


class Largest(TorchDispatchMode):
    """Recorder of the largest tensor that any call returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.nbytes)
        return result


@pytest.mark.parametrize("form", FORMS)
def test_no_rank_of_a_ring_holds_all_keys(form):
    shape = (1, 2, 128, 4)

    def body(mesh):
        x = shard(randn(*shape), layout_at(mesh, shape, [[0, 32, 64, 96, 128], None]))
        with Largest() as largest:
            attention(x, x, x).square().sum().backward()
        return largest.size

    with forced(form):
        found = max(on_ranks((4, 1, 1), body))
    block, keys = 8 * 2 * 32 * (4 + 4), 8 * 2 * 128 * 4  # bytes
    if form == "ring":
        assert block <= found < 1.1 * block  # a message also has a stamp
    else:
        assert found >= keys > 1.9 * block


def test_a_rank_that_fails_within_a_ring_ends_the_others(monkeypatch):
    class Fault(Exception):
        pass

    faulty = threading.local()

    def attend(*operands):
        if faulty.here:
            raise Fault
        return blocks.attend(*operands)

    def body(mesh):
        faulty.here = mesh.rank == 1
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2"])).mT
        attention(x, x, x)

    monkeypatch.setattr(ring, "attend", attend)
    with forced("ring"), pytest.raises(Fault):
        on_ranks((2, 1, 1), body)
