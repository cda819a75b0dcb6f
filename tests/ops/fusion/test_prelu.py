"""PReLU fused with the norm before it: either result may be read, in any order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pydist import layout_for_sample, parallelize
from pydist.errors import NotSupported, UsageError
from pydist.ops.fusion import prelu
from pydist.ops.norm import norm
from support.equivalence import assert_same, check_function, on_ranks, randn, shard
from support.equivalence.strategies import cuts
from support.fused import FORMATS, NORMS, ranks_see


@pytest.fixture
def written(monkeypatch):
    """Records the values per row in each write: 3 for a norm, 4 for a norm with its PReLU."""
    found = []

    def recording(out, x, transform):
        found.append(len(transform.values))
        apply(out, x, transform)

    apply = norm.apply
    for module in (norm, prelu):
        monkeypatch.setattr(module, "apply", recording)
    return found


@settings(max_examples=25)
@given(
    data=st.data(),
    kind=st.sampled_from(sorted(NORMS)),
    of_channels=st.booleans(),
    memory_format=st.sampled_from(FORMATS),
    second_order=st.booleans(),
)
def test_split_equals_whole(data, kind, of_channels, memory_format, second_order):
    extents = [data.draw(st.integers(2, 5)) for _ in range(3)]
    x = randn(2, 4, *extents) + 10
    check_function(
        lambda x, w, b, slope: F.prelu(NORMS[kind](x, w, b), slope),
        x.to(memory_format=memory_format),
        [randn(4, seed=1), randn(4, seed=2), randn(4 if of_channels else 1, seed=3)],
        data.draw(cuts(extents)),
        second_order=second_order,
    )


def normed(x):
    return F.instance_norm(x * 1.0)


SLOPE = torch.tensor([0.25], dtype=torch.float64)


def test_nobody_asks_for_the_norm(written):
    def relu(part):
        slope = SLOPE.clone().requires_grad_()
        z = F.prelu(normed(part.requires_grad_()), slope)
        z.square().sum().backward()
        names = z.to_local().grad_fn.name(), z.to_local().grad_fn.next_functions[0][0].name()
        return z.full_tensor().detach(), names

    z, names = ranks_see(relu, randn(2, 3, 6, 4, 4))
    assert_same(z, F.prelu(normed(randn(2, 3, 6, 4, 4)), SLOPE))
    assert set(written) == {4}
    assert "Prelu" in names[0]
    assert "Normalize" in names[1]


# Uses of y, the norm's result, before or after PReLU has used it.
USES = {
    "a hook before": (lambda y, seen: y.register_hook(seen.append), None),
    "a hook after": (None, lambda y, seen: y.register_hook(seen.append)),
    "its gradient": (lambda y, seen: y.retain_grad(), lambda y, seen: seen.append(y)),
    "a skip connection": (None, lambda y, seen: y.square()),
    "another PReLU": (None, lambda y, seen: F.prelu(y, 3 * torch.ones(1).double())),
    "in place": (None, lambda y, seen: F.relu_(y.clone())),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_norms_own_result_and_gradient_are_there(use):
    before, after = use

    def gradients(x):
        slope, seen = SLOPE.clone().requires_grad_(), []
        y = normed(x.requires_grad_())
        if before is not None:
            before(y, seen)
        z = F.prelu(y, slope)
        more = None if after is None else after(y, seen)
        loss = (z * z * z).sum()
        loss = loss + (more * more).sum() if isinstance(more, torch.Tensor) else loss
        loss.backward()
        seen = [t.grad if t.grad is not None else t for t in seen]
        return [x.grad, slope.grad, *seen, y]

    def on_part(part):
        x_grad, slope_grad, *rest = gradients(part)
        return [x_grad.full_tensor(), slope_grad, *(t.full_tensor().detach() for t in rest)]

    x = randn(2, 3, 6, 4, 4)
    expected = gradients(x.clone())
    for found, wanted in zip(ranks_see(on_part, x), expected, strict=True):
        assert_same(found, wanted.detach())


def test_a_gradient_of_the_norm_between_two_backwards():
    def gradients(x):
        slope = SLOPE.clone().requires_grad_()
        y = normed(x.requires_grad_())
        loss = F.prelu(y, slope).pow(3).sum()
        loss.backward(retain_graph=True)
        (of_y,) = torch.autograd.grad(loss, y, retain_graph=True)
        loss.backward()
        return x.grad, of_y

    x = randn(2, 3, 6, 4, 4)
    found = ranks_see(lambda part: [g.full_tensor() for g in gradients(part)], x)
    assert_same(found, list(gradients(x.clone())))


def test_no_gradient_of_gradients_of_a_norm_that_was_changed():
    def change(part):
        slope = SLOPE.clone().requires_grad_()
        y = normed(part.requires_grad_())
        loss = F.prelu(y, slope).pow(3).sum()
        y.mul_(2.0)
        with pytest.raises(UsageError, match="changed in place after a PReLU"):
            torch.autograd.grad(loss, slope, create_graph=True)

    ranks_see(change, randn(2, 3, 6, 4, 4))


@pytest.mark.parametrize("learns", [(False, True), (True, False), (False, False)])
def test_only_one_of_them_learns(learns, written):
    def gradients(x):
        slope = SLOPE.clone().requires_grad_(learns[1])
        z = F.prelu(normed(x.requires_grad_(learns[0]) * 1.0), slope)
        if any(learns):
            z.pow(3).sum().backward()
        return [z.detach(), *(t.grad for t, one in zip((x, slope), learns, strict=True) if one)]

    x = randn(2, 3, 6, 4, 4)
    found = ranks_see(
        lambda part: [t if t.dim() == 1 else t.full_tensor() for t in gradients(part)], x
    )
    assert_same(found, gradients(x.clone()))
    assert set(written) == {4}


def test_under_checkpointing_and_hooks_on_what_is_saved():
    x = randn(2, 3, 8, 6, 6)
    model = nn.Sequential(
        nn.Conv3d(3, 4, 3, bias=False), nn.InstanceNorm3d(4, affine=True), nn.PReLU(),
        nn.Conv3d(4, 2, 3, bias=False), nn.BatchNorm3d(2), nn.PReLU(2),
    ).double()  # fmt: skip

    def gradients(net, x, offload):
        if offload:
            with torch.autograd.graph.save_on_cpu():
                y = net(x)
        else:
            y = checkpoint(net, x, use_reentrant=False) * 1.0
        y.square().sum().backward()
        return [p.grad for p in net.parameters()]

    def rank(mesh):
        net = parallelize(copy.deepcopy(model), mesh)
        return gradients(net, shard(x, layout_for_sample(mesh, x.shape)), offload)

    for offload in (False, True):
        expected = gradients(copy.deepcopy(model), x, offload)
        for found in on_ranks((2, 1, 1), rank):
            assert_same(found, expected)


def test_second_order_under_checkpointing():
    model = nn.Sequential(nn.InstanceNorm3d(3), nn.PReLU()).double()

    def gradients(net, x):
        y = checkpoint(net, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return net[1].weight.grad

    x = randn(2, 3, 8, 6, 6)
    expected = gradients(copy.deepcopy(model), x.clone().requires_grad_())

    def rank(mesh):
        net = parallelize(copy.deepcopy(model), mesh)
        return gradients(net, shard(x, layout_for_sample(mesh, x.shape)))

    for found in on_ranks((2, 1, 1), rank):
        assert_same(found, expected)


def test_checkpointing_that_begins_behind_the_norm():
    def gradient(x):
        y = normed(x.requires_grad_())
        checkpoint(lambda y: F.prelu(y, SLOPE).pow(3), y, use_reentrant=False).sum().backward()
        return x.grad

    x = randn(2, 3, 6, 4, 4)
    found = ranks_see(lambda part: gradient(part).full_tensor(), x)
    assert_same(found, gradient(x.clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_are_rounded_once(dtype):
    x, slope = randn(2, 3, 8, 8, 8).to(dtype), SLOPE.to(dtype)
    expected = F.prelu(normed(x.double()), SLOPE)
    found = ranks_see(lambda part: F.prelu(normed(part), slope).full_tensor().detach(), x)
    assert found.dtype == dtype
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= torch.finfo(dtype).eps


def test_another_dtype_is_refused_as_torch_refuses_it():
    with pytest.raises(RuntimeError, match="Type promoting not supported"):
        ranks_see(lambda part: F.prelu(normed(part), SLOPE), randn(2, 3, 6, 4, 4).float())


def test_one_tensor_as_the_gradient_of_both():
    def body(mesh):
        layout = layout_for_sample(mesh, (2, 3, 8, 6, 4))
        x = shard(randn(2, 3, 8, 6, 4), layout)
        grad = shard(randn(2, 3, 8, 6, 4, seed=1), layout).detach()
        slope = torch.full((3,), 0.2, dtype=torch.float64, requires_grad=True)

        def gradients(x, grad):
            y = F.instance_norm(x * 1.0)
            z = F.prelu(y, slope)
            (first,) = torch.autograd.grad(z, slope, grad, retain_graph=True)
            return first, torch.autograd.grad(y, x, grad)[0]

        ours = gradients(x, grad)
        whole = gradients(x.full_tensor().detach().requires_grad_(), grad.full_tensor())
        assert_same(ours[0], whole[0])
        assert_same(ours[1].full_tensor(), whole[1])

    on_ranks((2, 1, 1), body)


def test_gradient_of_the_slope_alone_keeps_none_on_the_way():
    def body(mesh):
        x = shard(randn(1, 2, 8, 4, 4), layout_for_sample(mesh, (1, 2, 8, 4, 4)))
        slope = torch.full((2,), 0.2, dtype=torch.float64, requires_grad=True)
        loss = F.prelu(F.instance_norm(x * 1.0), slope).square().sum()
        torch.autograd.grad(loss, slope, retain_graph=True)
        (alone,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        assert_same(x.grad.full_tensor(), alone.full_tensor())

    on_ranks((2, 1, 1), body)


def test_a_norm_that_was_asked_for_goes_with_what_backward_frees():
    def body(mesh):
        x = shard(randn(1, 2, 8, 4, 4), layout_for_sample(mesh, (1, 2, 8, 4, 4)))
        slope = torch.full((2,), 0.2, dtype=torch.float64, requires_grad=True)
        y = F.instance_norm(x * 1.0)
        loss = F.prelu(y, slope).square().sum() + y.sum()
        memory = StorageWeakRef(y.to_local().untyped_storage())
        del y
        loss.backward(retain_graph=True)
        assert not memory.expired(), "the graph may be asked again, for second derivatives too"
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        assert_same(x.grad.full_tensor(), first.full_tensor().detach())
        (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
        assert second.full_tensor().abs().max() > 0
        del first, second
        loss.backward()
        assert memory.expired()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

    on_ranks((2, 1, 1), body)


def test_a_hook_on_the_norms_node_is_refused():
    def body(mesh):
        x = shard(randn(1, 2, 8, 4, 4), layout_for_sample(mesh, (1, 2, 8, 4, 4)))
        slope = torch.full((2,), 0.2, dtype=torch.float64, requires_grad=True)
        z = F.prelu(F.instance_norm(x * 1.0), slope)
        node = z.grad_fn.next_functions[0][0]
        node.register_prehook(lambda grads: (grads[0] * 2,))
        with pytest.raises(UsageError, match="register_hook"):
            z.sum().backward()

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("norm_inside", [False, True])
def test_in_inference_mode(norm_inside):
    def body(mesh):
        x = shard(randn(1, 2, 8, 4, 4), layout_for_sample(mesh, (1, 2, 8, 4, 4))).detach()
        slope = torch.full((2,), 0.2, dtype=torch.float64)
        with torch.inference_mode():
            y = F.instance_norm(x) if norm_inside else None
            inside = F.prelu(F.instance_norm(x), slope)
        outside = inside if y is None else F.prelu(y, slope)
        expected = F.prelu(F.instance_norm(x.full_tensor()), slope)
        assert_same(outside.full_tensor(), expected)

    on_ranks((2, 1, 1), body)


def test_second_order_where_a_rank_has_nothing():
    def function(x, weight, slope):
        y = F.prelu(F.instance_norm(F.conv3d(x, weight, padding=1)), slope)
        return F.prelu(F.batch_norm(F.relu(y), None, None, training=True), slope)

    parameters = [randn(3, 3, 3, 3, 3, seed=2), randn(3, seed=4)]
    points = ([0, 3, 3, 7], None, None)
    check_function(function, randn(2, 3, 7, 6, 5), parameters, points, second_order=True)


@pytest.mark.parametrize("norm_of", [nn.BatchNorm3d, lambda c: nn.GroupNorm(1, c)])
def test_a_norm_in_a_graph_of_its_own_is_refused(norm_of):
    """Reentrant checkpointing returns no graph of shards: gradients would be lost."""

    def rank(mesh):
        inner = nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), norm_of(2)).double()
        net = parallelize(nn.Sequential(inner, nn.PReLU().double()), mesh)
        x = shard(randn(1, 2, 6, 4, 4), layout_for_sample(mesh, (1, 2, 6, 4, 4)))
        x.requires_grad_()
        with pytest.raises(NotSupported, match="reentrant checkpointing hides the graph"):
            net[1](checkpoint(net[0], x, use_reentrant=True))

    on_ranks((2, 1, 1), rank)
