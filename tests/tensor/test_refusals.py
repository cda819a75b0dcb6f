"""Calls without an exact form on shards: refused by name, and gradients never vanish."""

from __future__ import annotations

import pickle
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pydist
from pydist import Mesh, ShardedTensor, distribute_tensor, layout_for_sample, parallelize
from pydist.errors import NotSupported, UsageError
from pydist.tensor import HANDLERS
from support.equivalence import on_ranks, on_shards, randint, randn, shard
from support.networks.small import Doubled

SHAPE = (2, 3, 5, 4, 3)
GRID = (2, 1, 1)


class ToPlain(torch.autograd.Function):
    """Function from a sharded to a plain tensor: its gradient would end in the wrapper."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.to_local().sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.shape)


def test_a_custom_function_from_sharded_to_sharded_is_refused_by_name():
    def body(x, mesh):
        with pytest.raises(NotSupported, match="DoubledBackward"):
            (Doubled.apply(x) * 3).sum().backward()

    on_shards(body)


def test_a_custom_function_from_sharded_to_plain_raises_in_backward():
    """The function's gradient must not vanish into the wrapper."""

    def body(x, mesh):
        with pytest.raises((NotSupported, RuntimeError), match="sharded"):
            ToPlain.apply(x).backward()
        assert x.grad is None

    on_ranks(GRID, lambda mesh: body(shard(randn(*SHAPE), layout_for_sample(mesh, SHAPE)), mesh))


def test_a_custom_function_on_the_shard_is_the_way_on():
    def body(x, mesh):
        y = ShardedTensor.from_local(Doubled.apply(x.to_local()), x.layout)
        y.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 8 * randn(*SHAPE), rtol=1e-12, atol=0)

    on_shards(body)


REFUSED = {
    "func.grad": torch.func.grad(lambda v: v.sum()),
    "func.vmap": torch.func.vmap(lambda v: v * 2),
    "torch.tensor": torch.tensor,
    "torch.as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float32),
    "data_ptr": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "stride": lambda x: x.stride(),
    "svd": torch.linalg.svd,
    "set data": lambda x: setattr(x, "data", torch.zeros(SHAPE)),
    "resize_": lambda x: x.detach().resize_(3),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_what_has_no_exact_form_is_refused(call):
    def body(x, mesh):
        with pytest.raises(RuntimeError) as caught:
            call(x)
        assert isinstance(caught.value, NotSupported), repr(caught.value)

    on_shards(body)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_refused():
    """The test runs on one rank: forward-mode levels form one stack per process."""

    def body(x, mesh):
        with pytest.raises(NotSupported):
            torch.func.jvp(lambda v: v * 2, (x,), (x,))

    on_shards(body, (1, 1, 1))


def test_a_refusal_names_the_call_the_module_the_shapes_and_a_way_on():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.tril(x)

    def body(mesh):
        model = parallelize(nn.Sequential(nn.ReLU(), nn.Sequential(Odd())), mesh)
        with pytest.raises(NotSupported) as caught:
            model(randn(*SHAPE))
        message = str(caught.value)
        line = Odd.forward.__code__.co_firstlineno + 1
        for part in (
            "torch.tril",
            "in module 1.0",
            f"{__file__}:{line}",
            "[2, 3, 5, 4, 3]",
            "full_tensor()",
            "@pydist.tensor.implements(torch.tril)",
        ):
            assert part in message

    on_ranks(GRID, body)


def test_the_handler_of_a_refusal_gathers_all_sharded_arguments():
    x, labels = randn(3, 4), torch.tensor([[0, 2, -1, 1], [1, -1, 0, 0], [3, 0, 1, -1]])
    call = F.multilabel_margin_loss
    expected = float(call(x, labels))

    def body(mesh):
        parts = [distribute_tensor(each, mesh, {0: "depth"}) for each in (x, labels)]
        with pytest.raises(NotSupported) as caught:
            call(*parts)
        handler = textwrap.dedent("\n".join(str(caught.value).splitlines()[1:]))
        mesh.world.barrier()
        exec(handler, {"torch": torch, "pydist": pydist})
        try:
            assert float(call(*parts)) == float(call(parts[0], target=parts[1])) == expected
        finally:
            mesh.world.barrier()
            HANDLERS.pop(call, None)

    on_ranks(GRID, body)


IN_PLACE = {
    "of a sharded tensor": (lambda x, m: x.tril_(), "a new tensor from x.full_tensor()"),
    "of a plain view with a gradient": (
        lambda x, m: torch.zeros(2, *x.shape)[0].add_(x.float().requires_grad_()),
        "give it whole tensors, x.full_tensor()",
    ),
    "of an attribute": (lambda x, m: setattr(x, "data", x * 2), "in place: x.copy_(values)"),
    "initialization": (lambda x, m: torch.nn.init.constant_(x, 1), "before parallelize"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "advice"), IN_PLACE.values(), ids=IN_PLACE)
def test_the_advice_for_changes_in_place_is_no_change_of_a_copy(call, advice):
    def body(mesh):
        with pytest.raises(NotSupported) as caught:
            call(distribute_tensor(randint(3, *SHAPE), mesh), mesh)
        assert advice in str(caught.value)
        assert "implements" not in str(caught.value)

    on_ranks(GRID, body)


def test_a_type_error_inside_an_operator_keeps_its_reason(monkeypatch):
    """Without care, Python would replace the reason by "unsupported operand type(s)"."""

    def wrong(x, other):
        raise TypeError("the reason")

    monkeypatch.setitem(HANDLERS, torch.Tensor.__pow__, wrong)

    def body(x, mesh):
        with pytest.raises(NotSupported, match=r"Tensor\.pow .*the reason"):
            x**2

    on_shards(body)


def test_arguments_that_a_handler_does_not_know_are_refused():
    def body(x, mesh):
        with pytest.raises(NotSupported, match=r"torch\.sum .*keyword argument 'out'"):
            torch.sum(x, 2, out=x.detach())

    on_shards(body)


def test_pickling_is_refused():
    def body(x, mesh):
        with pytest.raises(NotSupported, match="pickled"):
            pickle.dumps(x)

    on_shards(body)


DIFFERING = {
    "sliced": lambda x, r: x * randn(*SHAPE, seed=r),
    "per channel": lambda x, r: x * randn(3, 1, 1, 1, seed=r),
    "a scalar tensor": lambda x, r: x * randn(seed=r),
    "a target": lambda x, r: F.mse_loss(x, randn(*SHAPE, seed=r)),
    "labels": lambda x, r: F.cross_entropy(x, randn(2, 5, 4, 3, seed=r).sign().long() + 1),
    "a weight": lambda x, r: F.conv3d(x, randn(2, 3, 3, 3, 3, seed=r), padding=1),
    "a linear weight": lambda x, r: F.linear(x.flatten(1), randn(2, 180, seed=r)),
    "batch norm's scale": lambda x, r: F.batch_norm(x, None, None, randn(3, seed=r), training=True),
    "joined": lambda x, r: torch.cat([x, randn(*SHAPE, seed=r)], 1),
    "distributed": lambda x, r: distribute_tensor(randn(*SHAPE, seed=r), x.mesh),
}


@pytest.mark.parametrize("call", DIFFERING.values(), ids=DIFFERING)
def test_plain_operands_that_differ_between_the_ranks_are_refused(call):
    def body(x, mesh):
        with pytest.raises(UsageError, match="differs between the ranks"):
            call(x, mesh.rank)

    on_shards(body)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused():
    """Reentrant checkpointing hides the graph in an autograd function of its own."""

    def body(x, mesh):
        y = checkpoint(lambda v: v * 2, x, use_reentrant=True)
        with pytest.raises(NotSupported, match="CheckpointFunctionBackward"):
            y.sum().backward()

    on_shards(body)


def test_tensors_of_two_meshes_do_not_mix():
    def body(x, mesh):
        other = Mesh(mesh.world, 1, (1, 2, 1))
        with pytest.raises((UsageError, NotSupported), match="mesh"):
            x + shard(randn(*SHAPE), layout_for_sample(other, SHAPE))

    on_shards(body)
