"""Views in torch: after in-place changes, split runs equal the one-device run or refuse use."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from pydist import ShardedTensor, parallelize
from pydist.errors import NotSupported
from support.equivalence import error, layout_at, on_ranks, randn, shard, whole_of

SHAPE = (2, 4, 6, 4, 4)
LAYOUTS = {
    "1": ([], (1, 1, 1)),
    "2 uneven": ([[0, 2, 6], None, None], (2, 1, 1)),
    "3 with an empty and a thin shard": ([[0, 1, 1, 6], None, None], (3, 1, 1)),
    "2x2": ([[0, 2, 6], [0, 1, 4], None], (2, 2, 1)),
}
STALE = "in torch one may be a view of the other"

CALLS = """
x.flatten()
x.flatten(2)
x.flatten(3)
x.reshape(2, -1)
x.view(2, 4, 6, 16)
x.view(8, 6, 16)
x.view(2, 2, 2, 6, 4, 4)
x.ravel()
x.unflatten(2, (3, 2))
x.view_as(y)
x[:]
x[:, :, 0]
x[:, :, 5]
x[:, 1]
x[..., 0]
x[:, :, 1:5]
x[:, :, ::2]
x[:, :, 1:5, 1, ::2]
x[None, :, :, 2]
x.select(2, 3)
x.narrow(2, 1, 4)
x.split(2, 2)
x.chunk(2, 2)
x.chunk(3, 1)
x.tensor_split(4, 2)
x.unbind(1)
x.unbind(2)
x.transpose(1, 2)
x.permute(0, 2, 3, 4, 1)
x.movedim(1, -1)
x.mT
x.unsqueeze(0)
x[:, :, 3:4].squeeze(2)
x[:, :1].squeeze()
x.expand(2, 4, 6, 4, 4)
x[:, :, 2:3].expand(2, 4, 6, 4, 4)
x[:, :, 2:3].expand_as(y)
torch.broadcast_tensors(x[:, :, 2:3], y)
torch.broadcast_tensors(x)
torch.atleast_3d(x)
torch.atleast_3d([x])
x.detach()
x.data
x.real
x.conj()
x.positive()
x.double()
x.to(y)
x.contiguous()
F.dropout(x, 0.5, training=False)
x.flatten(2).transpose(1, 2)
x.flatten(2)[:, :, 3]
x.flatten(2).view(2, 4, 6, 4, 4)
x[:, :, 0][:, 1]
x.unbind(2)[3].unbind(1)
x.detach().flatten(2)
x.clone()
x.repeat(1, 1, 1, 1, 1)
torch.cat([x], 2)
torch.stack([x])
torch.roll(x, 0, 2)
F.pad(x, (0, 0, 0, 0, 0, 0))
F.interpolate(x, scale_factor=1)
F.avg_pool3d(x, 1)
x[:, :, torch.tensor([1, 2])]
x.index_select(1, torch.tensor([0, 1, 2, 3]))
""".strip().splitlines()

MAYBE = """
x.transpose(1, 2).contiguous()
x.transpose(1, 2).flatten(1, 2)
x.permute(0, 2, 3, 4, 1).flatten(1, 3)
x[:, :, 1:3].flatten(1)
x.to(memory_format=torch.channels_last_3d)
x.contiguous(memory_format=torch.channels_last_3d)
""".strip().splitlines()
"""Calls that copy in torch depending on the full tensor's strides, unknown to the shards."""


def _after_change(call, change, x, y):
    """Returns the unchanged side's tensors, after an in-place change of the other side."""
    with torch.no_grad():
        results = [t for t in tree_leaves(eval(call)) if isinstance(t, torch.Tensor)]
        if change == "base":
            x.mul_(3)
        elif change == "detached base":
            x.detach().mul_(3)
        else:
            results[0].mul_(3)
        return [whole_of(t).clone() for t in ([x] if change == "result" else results)]


def _sharded(mesh, points, seed=0):
    return shard(randn(*SHAPE, seed=seed), layout_at(mesh, SHAPE, points)).detach()


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("change", ["base", "detached base", "result"])
def test_changes_of_a_base_and_of_its_view_reach_the_other_or_refuse_its_use(where, change):
    points, spatial = LAYOUTS[where]
    outcomes = {}

    def body(mesh):
        found = []
        for call in (*CALLS, *MAYBE):
            x, y = _sharded(mesh, points), _sharded(mesh, points, seed=1)
            try:
                found.append(_after_change(call, change, x, y))
            except RuntimeError as error:
                found.append(_refusal(error))
        return found

    found = on_ranks(spatial, body)
    for i, call in enumerate((*CALLS, *MAYBE)):
        try:
            whole = _after_change(call, change, randn(*SHAPE), randn(*SHAPE, seed=1))
        except RuntimeError as error:
            whole = _refusal(error)
        outcomes[call] = {_judged(ranks[i], whole) for ranks in found}
        assert len(outcomes[call]) == 1, (call, outcomes[call])  # all ranks agree
    wrong = [call for call, said in outcomes.items() if "wrong" in said]
    assert not wrong
    refused = {call for call, said in outcomes.items() if "refused" in said}
    if where == "1":
        assert not refused
    else:
        assert {"x.flatten()", "x[:, :, 0]", "x.select(2, 3)"} <= refused
        kept = {"x[:, 1]", "x[:, :, 1:5]", "x.transpose(1, 2)", "x.detach()", "x.chunk(2, 2)"}
        assert not refused & (kept | set(CALLS[CALLS.index("x.clone()") :]))


def _refusal(error):
    """Returns the kind of refusal: stale use (pydist), or in place on an expanded tensor (both)."""
    if isinstance(error, NotSupported) and STALE in str(error):
        return "stale"
    if "single memory location" in str(error):
        return "expanded"
    raise error


def _judged(found, whole):
    if found == "stale":
        return "refused"
    if "expanded" in (found, whole):
        return "right" if found == whole else "wrong"
    pairs = list(zip(found, whole, strict=True))
    return "right" if all(f.shape == w.shape and error(f, w) == 0 for f, w in pairs) else "wrong"


# -- ways to change -------------------------------------------------------------------------


def _dead_base(x):
    view = (base := x * 1).flatten(2)
    base.mul_(2)
    del base
    gc.collect()
    return view


def _chain(x):
    view = x.flatten(2).transpose(1, 2)[:, 3].unsqueeze(0)
    x.add_(1)
    return view


def _other_view(x):
    view = x[:, :, 0]
    x.transpose(1, 2)[:, 0].relu_() if not isinstance(x, ShardedTensor) else x.mT.relu_()
    return view


def _assigned(x):
    view = x[:, :, 0]
    x[:, 1] = 3.0
    return view


def _data(x):
    view = x[:, :, 0]
    x.data.mul_(2)
    return view


def _own_shard(x):
    view = x[:, :, 0]
    (x.to_local() if isinstance(x, ShardedTensor) else x).mul_(2)
    return view


def _shard_of_a_copy(x):
    view = x[:, :, 0]
    (view.to_local() if isinstance(view, ShardedTensor) else view).mul_(2)
    del view
    gc.collect()
    return x


def _copy_of_a_copy(x):
    x.flatten(2)[:, :, 1].zero_()
    return x


def _swapped(x):
    view, other = x[:, :, 0], x * 1
    torch.utils.swap_tensors(x, other)
    other.mul_(2)
    return view


def _dropped_out(x):
    view = x[:, :, 0]
    F.dropout(x, 0.5, True, inplace=True)
    return view


@pytest.mark.parametrize(
    "program",
    [_dead_base, _chain, _other_view, _assigned, _data, _own_shard, _shard_of_a_copy,
     _copy_of_a_copy, _swapped, _dropped_out],
)  # fmt: skip
def test_a_stale_tensor_is_refused_whichever_way_the_other_was_changed(program):
    def body(mesh):
        stale = program(_sharded(mesh, [[0, 2, 6], [0, 1, 4], None]))
        assert "stale" in repr(stale)
        with pytest.raises(NotSupported, match=STALE):
            stale * 1
        with pytest.raises(NotSupported, match=STALE):
            stale.full_tensor()

    on_ranks((2, 2, 1), body)


def _adds_to_a_slice(x):
    x[:, :, 0] += 1
    x[:, :, 5] *= 2
    x[0, :, 2, 1:] -= 3
    return [x]


def _changes_one_element_of_several(x):
    first, second = x[:, :, 0], x[:, :, 1]
    first.mul_(2)
    return [first, second]


def _changes_other_channels(x):
    a, b = x[:, :2], x[:, 2:]
    tokens = a.flatten(2)
    b.sigmoid_()
    return [tokens, x]


def _changes_the_copy_alone(x):
    tokens = (x * 1).flatten(2)
    tokens.relu_()
    return [tokens, tokens[:, :, 3]]


def _changes_a_view_made_later(x):
    x.mul_(2)
    tokens = x.flatten(2)
    x.add_(0 * x)
    return [x, x.flatten(2)] if tokens is not None else []


@pytest.mark.parametrize(
    "program",
    [_adds_to_a_slice, _changes_one_element_of_several, _changes_other_channels,
     _changes_the_copy_alone, _changes_a_view_made_later],
)  # fmt: skip
@pytest.mark.parametrize("where", LAYOUTS)
def test_a_program_that_uses_nothing_stale_gives_what_torch_gives(program, where):
    points, spatial = LAYOUTS[where]
    whole = randn(*SHAPE).requires_grad_()
    expected = [t for t in program(whole * 1)]
    sum(t.square().sum() for t in expected).backward()

    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, points))
        found = program(x * 1)
        sum(t.square().sum() for t in found).backward()
        return [t.full_tensor().detach() for t in (*found, x.grad)]

    for found in on_ranks(spatial, body):
        for mine, theirs in zip(found, (*expected, whole.grad), strict=True):
            assert error(mine, theirs.detach()) <= 1e-12


def test_an_input_that_a_model_changes_in_place_is_changed_for_its_copies_too():
    class Changes(nn.Module):
        def forward(self, x):
            return F.relu(x, inplace=True)

    def body(mesh):
        model, x = parallelize(Changes(), mesh), _sharded(mesh, [[0, 2, 6], None, None])
        tokens = x.flatten(3)[:, :, 0]
        model(x)
        with pytest.raises(NotSupported, match=STALE):
            tokens.sum()

    on_ranks((2, 1, 1), body)


def test_plain_tensors_that_are_broadcast_stay_plain_views():
    def body(mesh):
        x, bias = _sharded(mesh, [[0, 2, 6], None, None]), randn(*SHAPE, seed=2)
        shown = torch.broadcast_tensors(x, bias)[1]
        shown.mul_(2)
        assert type(shown) is torch.Tensor
        assert torch.equal(bias, 2 * randn(*SHAPE, seed=2))
        assert torch.equal(bias.expand_as(x), bias)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("where", LAYOUTS)
def test_a_tensor_whose_view_gets_a_graph_requires_a_gradient(where):
    points, spatial = LAYOUTS[where]

    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, points))
        base = torch.zeros_like(x)
        other = base[:, :, 2:]
        assert not base.requires_grad
        base[:, 1:3].add_(x[:, 1:3])
        assert base.requires_grad
        assert other.requires_grad
        assert not base.detach().requires_grad

    on_ranks(spatial, body)


def test_detach_in_place_takes_wrapper_and_shard_out_of_the_graph():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 6], None, None])) * 2
        assert x.detach_() is x
        assert not x.requires_grad
        assert not x.to_local().requires_grad
        assert x.is_leaf
        assert not (x * 3).requires_grad
        x.requires_grad_()
        (x * 3).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full(SHAPE, 3.0).double())

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("where", LAYOUTS)
def test_a_view_of_no_grad_is_used_after_a_change(where):
    """torch allows such a view of a leaf in no graph, and raises where its node is read."""
    points, spatial = LAYOUTS[where]

    @torch.no_grad()
    def body(mesh):
        x, bias = shard(randn(*SHAPE), layout_at(mesh, SHAPE, points)), randn(4).requires_grad_()
        view, of_bias = x[:], bias[:]
        view.mul_(2)
        of_bias.mul_(2)
        assert torch.equal(view.to_local(), view.detach().to_local())
        assert torch.equal((view + of_bias).full_tensor(), 2 * (randn(*SHAPE) + randn(4)))

    on_ranks(spatial, body)
