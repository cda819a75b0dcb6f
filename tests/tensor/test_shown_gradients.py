"""Gradients that users read on one rank alone: none hangs, and each is the true gradient.

Ranks with copies of a tensor each compute a part of its gradient, at its uses with tensors that
differ between them. Reading a gradient must not sum the parts: other ranks may not read it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, ShardedTensor, distribute_tensor, layout_for_sample, parallelize
from support.equivalence import on_ranks, on_shards, randn, shard
from support.networks.small import SHAPE as NETWORK_SHAPE
from support.networks.small import small

SHAPE = (2, 3, 5, 4, 3)
GRIDS = [(2, 1, 1), (3, 1, 1), (2, 2, 1), (8, 1, 1)]
"""Grids with even blocks, uneven ones (5 = 2 + 2 + 1), two split dims, and empty shards."""

Watch = Callable[[str, Tensor], Tensor]


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x * 1


def in_cut(x: Tensor, dims: dict[int, str]) -> Tensor:
    """Returns the tensor split along some of the mesh's axes only."""
    if not isinstance(x, ShardedTensor):
        return x * 1
    return x.redistribute(layout_for_sample(x.mesh, x.shape, dims))


def weight(*shape: int) -> Tensor:
    return randn(*shape, seed=9) / 4


# -- watched tensors ------------------------------------------------------------------------


def results_of_reductions(x: Tensor, watch: Watch) -> Tensor:
    """Reduces a tensor to results that shards, another copy, and plain numbers use."""
    some = watch("some", x.mean((2, 4), keepdim=True))
    every = watch("every", x.square().mean())
    channels = watch("channels", x.sum((0, 2, 3, 4)))
    inner = watch("inner", channels.tanh())
    shifted = watch("shifted", (x - some) * every)
    return (
        (shifted * inner.view(1, 3, 1, 1, 1)).square().mean()
        + some.square().sum()
        + every.sin()
        + full(channels).square().sum()
    )


def gathered(x: Tensor, watch: Watch) -> Tensor:
    whole = watch("whole", full(x))
    copies = watch("copies", in_cut(x, {}))
    again = watch("again", full(copies))
    mixed = watch("mixed", x * whole + copies)
    return (mixed * copies).square().sum() + again.exp().sum() + whole.square().sum()


def a_plain_loss(x: Tensor, watch: Watch) -> Tensor:
    loss = watch("loss", x.exp().mean())
    return watch("penalised", loss.square() + 1) * watch("other", x.amax())


def plain_operands(x: Tensor, watch: Watch) -> Tensor:
    """Uses a plain leaf other than a parameter, and plain tensors computed from one."""
    leaf = watch("leaf", weight(3, 1, 1, 1).requires_grad_())
    scale = watch("scale", leaf.square() + 1)
    slope = watch("slope", scale.flatten() / 8)
    joined = torch.cat([x * scale, watch("constant", randn(*SHAPE).requires_grad_() * 1)])
    return F.prelu(joined - leaf, slope).square().mean()


def computed_weights(x: Tensor, watch: Watch) -> Tensor:
    """Computes weights from others, as weight norm does."""
    raw = weight(4, 3, 3, 3, 3).requires_grad_()
    kernel = watch("kernel", raw / raw.norm())
    bias = watch("bias", raw.sum((1, 2, 3, 4)))
    y = watch("y", F.conv3d(x, kernel, bias, padding=1))
    matrix = watch("matrix", weight(3, 240).requires_grad_() * 2)
    return F.linear(F.leaky_relu(y).flatten(1), matrix).square().mean()


def windows_on_copies(x: Tensor, watch: Watch) -> Tensor:
    """Applies windows to blocks that are on two ranks of four each; one of the two sends."""
    x = watch("by height", in_cut(x, {3: "height"}))
    y = watch("conv", F.conv3d(x, weight(2, 3, 3, 3, 3), padding=1))
    z = watch("even kernel", F.conv3d(y.tanh(), weight(2, 2, 3, 2, 3), padding=1))
    pooled = watch("pool", F.avg_pool3d(z, 3, 1, 1))
    normed = watch("norm", F.batch_norm(pooled, None, None, weight(2), training=True))
    return F.max_pool3d(normed, 3, 1, 1).square().mean()


def between_copies(x: Tensor, watch: Watch) -> Tensor:
    """Redistributes copies along one axis to copies along another, and to all ranks."""
    by_depth = watch("by depth", in_cut(x, {2: "depth"}))
    by_height = watch("by height", in_cut(by_depth, {3: "height"}) * 1)
    return (by_height * in_cut(by_depth.exp(), {})).square().mean()


def under_checkpoint(x: Tensor, watch: Watch) -> Tensor:
    """Checkpoints blocks; a rank without elements saves nothing that makes it recompute."""

    def block(v: Tensor) -> Tensor:
        v = F.leaky_relu(v - v.mean((2, 3, 4), keepdim=True) * v.sum())
        return F.avg_pool3d(v, 3, 1, 1)

    y = watch("y", checkpoint(block, x * 1, use_reentrant=False))
    return watch("loss", checkpoint(block, y, use_reentrant=False).square().mean())


FUNCTIONS = [
    results_of_reductions,
    gathered,
    a_plain_loss,
    plain_operands,
    computed_weights,
    windows_on_copies,
    between_copies,
    under_checkpoint,
]


# -- ways to watch --------------------------------------------------------------------------


def by_hooks(seen: dict[str, Tensor]) -> Watch:
    def watch(name: str, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: seen.update({name: grad.detach()}))
        return x

    return watch


def by_retaining(seen: dict[str, Tensor]) -> Watch:
    """Returns a watch that retains gradients; `seen` gets the tensors for their `.grad`."""

    def watch(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        x.retain_grad()
        return x

    return watch


def no_watch(_: str, x: Tensor) -> Tensor:
    return x


def assert_shown(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        here, reference = grad, expected[name]
        assert grad.shape == reference.shape, name
        if isinstance(grad, ShardedTensor):
            here = grad.to_local()
            reference = shard(reference, grad.layout).to_local().detach()
        torch.testing.assert_close(
            here, reference, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


def expected_of(function: Callable[[Tensor, Watch], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    seen: dict[str, Tensor] = {}
    x = randn(*SHAPE).requires_grad_()
    function(x, by_hooks(seen)).backward()
    assert x.grad is not None
    return seen, x.grad


@pytest.mark.parametrize("spatial", GRIDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_hooks_on_one_rank(function, spatial):
    expected, grad = expected_of(function)
    last = spatial[0] * spatial[1] * spatial[2] - 1
    for only in {0, last // 2, last}:

        def body(x: ShardedTensor, mesh: Mesh, only: int = only) -> None:
            seen: dict[str, Tensor] = {}
            function(x, by_hooks(seen) if mesh.rank == only else no_watch).backward()
            assert_shown(seen, expected if mesh.rank == only else {})
            assert_shown({"x": x.grad}, {"x": grad})

        on_shards(body, spatial)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_retained_gradients_on_one_rank(function):
    expected, _ = expected_of(function)

    def body(x: ShardedTensor, mesh: Mesh) -> None:
        seen: dict[str, Tensor] = {}
        function(x, by_retaining(seen) if mesh.rank == 1 else no_watch).backward()
        assert_shown({name: t.grad for name, t in seen.items()}, expected if seen else {})
        assert bool(seen) == (mesh.rank == 1)

    on_shards(body, (2, 2, 1))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_asked_for_are_true_on_every_rank(function):
    expected, _ = expected_of(function)

    def body(x: ShardedTensor, mesh: Mesh) -> None:
        asked: dict[str, Tensor] = {}

        def watch(name: str, tensor: Tensor) -> Tensor:
            asked[name] = tensor
            return tensor

        grads = torch.autograd.grad(function(x, watch), list(asked.values()))
        assert_shown(dict(zip(asked, grads, strict=True)), expected)

    on_shards(body, (2, 2, 1))


@pytest.mark.parametrize("spatial", GRIDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_hooks_on_one_rank_in_second_order(function, spatial):
    """The gradient's own gradient passes through the same tensors again."""

    def penalty(x: Tensor, watch: Watch) -> Tensor:
        (grad,) = torch.autograd.grad(function(x, watch), x, create_graph=True)
        return watch("penalty", watch("gradient", grad).square().sum())

    expected, grad = expected_of(penalty)

    def body(x: ShardedTensor, mesh: Mesh) -> None:
        seen: dict[str, Tensor] = {}
        penalty(x, by_hooks(seen) if mesh.rank == 0 else no_watch).backward()
        assert_shown(seen, expected if mesh.rank == 0 else {})
        assert_shown({"x": x.grad}, {"x": grad})

    on_shards(body, spatial)


# -- networks -------------------------------------------------------------------------------


def network_run(model: nn.Module, x: Any, watched: bool) -> tuple[dict[str, Tensor], nn.Module]:
    """Runs one step with tensor hooks on output and loss, and backward hooks on every module."""
    seen: dict[str, Tensor] = {}
    watch = by_hooks(seen) if watched else no_watch
    for path, module in model.named_children() if watched else ():

        def keep(_: Any, grads: Any, outputs: Any, path: str = path) -> None:
            seen.update({f"into {path}": grads[0], f"out of {path}": outputs[0]})

        module.register_full_backward_hook(keep)
    y = watch("y", model(x))
    watch("loss", F.mse_loss(y, randn(*y.shape, seed=2))).backward()
    return seen, model


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("spatial", GRIDS)
def test_a_network_watched_on_one_rank(spatial, batch):
    """One sample's output is replicated on every rank; of four samples, each rank holds its own."""
    whole = randn(batch, *NETWORK_SHAPE[1:])
    model = small(norm=True)
    expected, reference = network_run(copy.deepcopy(model), whole.clone().requires_grad_(), True)
    last = spatial[0] * spatial[1] * spatial[2] - 1

    def body(mesh: Mesh) -> None:
        x = shard(whole, layout_for_sample(mesh, whole.shape))
        own = parallelize(copy.deepcopy(model), mesh)
        seen, own = network_run(own, x, mesh.rank == last)
        assert_shown(seen, expected if mesh.rank == last else {})
        for p, q in zip(own.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)

    on_ranks(spatial, body)


# -- given gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["as it is", "cut otherwise", "plain"])
def test_a_given_gradient_in_any_layout(given):
    """All blocks of a cube that is split along two of its edges have one shape."""
    shape = (1, 1, 4, 4, 4)
    seed = randn(*shape, seed=1)

    def body(x: ShardedTensor, mesh: Mesh) -> None:
        grad = {
            "as it is": distribute_tensor(seed, mesh),
            "cut otherwise": distribute_tensor(seed, mesh, {3: "depth"}),
            "plain": seed,
        }[given]
        y = x * x
        y.register_hook(lambda g: None if given == "as it is" else grad)
        y.backward(grad, retain_graph=True)
        (asked,) = torch.autograd.grad(y, x, grad)
        x.grad.mul_(1)
        expected = {"x": 2 * randn(*shape) * seed}
        assert_shown({"x": x.grad}, expected)
        assert_shown({"x": asked}, expected)
        x.grad = grad
        assert_shown({"x": x.grad}, {"x": seed})

    on_shards(body, (2, 1, 1), shape)


def _through_a_hook(x, grad):
    y = x * 2
    y.register_hook(lambda g: grad)
    y.sum().backward()


GIVEN = {
    "backward": lambda x, grad: (x * 2).backward(grad),
    "autograd.grad": lambda x, grad: torch.autograd.grad(x * 2, x, grad),
    "grad": lambda x, grad: setattr(x, "grad", grad),
    "a hook": _through_a_hook,
}


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_a_given_plain_gradient_of_another_shape_is_refused(give, spatial):
    larger, narrow = randn(1, 2, 8, 4, 6, seed=1), randn(1, 2, 6, 4, 1, seed=1)

    def body(mesh: Mesh) -> None:
        for grad in (larger, narrow):
            x = distribute_tensor(randn(1, 2, 6, 4, 4), mesh).requires_grad_()
            with pytest.raises(RuntimeError, match="Mismatch in shape"):
                give(x, grad)

    on_ranks(spatial, body)


@pytest.mark.parametrize("by_function", [False, True])
def test_backward_into_some_inputs_only(by_function):
    def body(x, mesh):
        scale, other = (torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2))
        loss = (x * scale * other).square().sum()
        if by_function:
            torch.autograd.backward(loss, inputs=[x, scale], retain_graph=True)
        else:
            loss.backward(inputs=[x, scale], retain_graph=True)
        assert other.grad is None
        whole = x.full_tensor().detach()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * whole)
        torch.testing.assert_close(scale.grad, 2 * whole.square().sum())

    on_shards(body)


def test_a_hook_on_a_view_that_was_changed_past_autograd():
    """torch's own call crashes in this case (2.13)."""

    def body(mesh):
        x = distribute_tensor(randn(*SHAPE), mesh).requires_grad_()
        y = (x * 2).permute(0, 1, 2, 4, 3)
        y.detach().add_(1)
        seen = []
        y.register_hook(seen.append)
        y.sum().backward()
        return seen[0].full_tensor(), x.grad.full_tensor()

    for of_y, of_x in on_ranks((2, 1, 1), body):
        assert torch.equal(of_y, torch.ones_like(of_y))
        assert torch.equal(of_x, torch.full(SHAPE, 2.0, dtype=of_x.dtype))


@pytest.mark.parametrize("loss", [torch.Tensor.sum, torch.Tensor.amax, lambda y: y.square().sum()])
def test_a_hook_is_not_called_where_a_second_derivative_does_not_lead(loss):
    """As in torch, the penalty has no gradient with respect to a pool's output."""

    def calls(ready, cut):
        model = ready(nn.AvgPool3d(2, 1))
        x = cut(randn(1, 1, 4, 3, 3)).requires_grad_()
        y = model(x)
        seen = []
        y.register_hook(lambda g: seen.append(g.clamp(-1, 1)))
        (grad,) = torch.autograd.grad(loss(y), x, create_graph=True)
        grad.square().sum().backward()
        return len(seen)

    def body(mesh):
        return calls(lambda m: parallelize(m, mesh), lambda x: distribute_tensor(x, mesh))

    assert on_ranks((2, 1, 1), body) == [calls(lambda m: m, lambda x: x)] * 2
