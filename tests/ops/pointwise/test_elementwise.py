"""Element-wise calls on shards, alone and with operands of every kind."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pydist.errors import NotSupported, UsageError
from support.equivalence import (
    Cut,
    check_function,
    even_points,
    layout_at,
    on_ranks,
    randint,
    randn,
    shard,
)
from support.equivalence.splits import SHAPE, TWO_SPLITS
from support.equivalence.strategies import cuts

POINTS = TWO_SPLITS["2x2x2, half of them empty"]

UNARY = [torch.exp, torch.round, F.gelu, F.relu6, F.logsigmoid, F.hardsigmoid]
"""Functions for ranks without elements; docs/operators.md has all functions, see its test."""

ONCE_DIFFERENTIABLE = {F.hardsigmoid}


@pytest.mark.parametrize("function", UNARY, ids=[f.__name__ for f in UNARY])
def test_unary(function):
    check_function(
        function, randn(*SHAPE), (), POINTS, second_order=function not in ONCE_DIFFERENTIABLE
    )


@pytest.mark.parametrize("name", ["isnan", "isinf", "isfinite", "logical_not", "isposinf"])
def test_predicates(name):
    x = randn(*SHAPE)
    x[0, 0, 0], x[1, 2, 4] = torch.inf, torch.nan
    check_function(getattr(torch, name), x, (), POINTS)


WITH_OPTIONS = {
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp by keyword": lambda x: torch.clamp(x, min=-0.3),
    "leaky_relu": lambda x: F.leaky_relu(x, negative_slope=0.3),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "hardtanh": lambda x: F.hardtanh(x, -0.2, 0.7),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "power": lambda x: x**3,
    "power of a scalar": lambda x: 2.0**x,
    "reflected": lambda x: 1.5 - 3.0 / (x * x + 1),
    "operators": lambda x: -(+x) * 2 + abs(x) / 4 - x % 3,
    "floor division": lambda x: (x // 0.3).detach(),
    "to": lambda x: x.to(torch.float32).to(torch.float64),
    "double of float": lambda x: x.float().double(),
    "clone, contiguous, type_as": lambda x: x.clone().contiguous().type_as(x) * x,
    "detach": lambda x: x.detach() * x,
    "where with scalars": lambda x: torch.where(x > 0, x, 0.0) + torch.where(x < 0, 1.0, x),
    "masked_fill": lambda x: x.masked_fill(x > 0, -7.0) * x,
    "where of a method": lambda x: (x * x).where(x > 0.2, -x),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x * x, value=0.5),
    "zeros_like": lambda x: torch.zeros_like(x) + x,
    "ones_like": lambda x: torch.ones_like(x) * x,
    "full_like": lambda x: torch.full_like(x, 3.0) * x,
    "rrelu in evaluation": lambda x: F.rrelu(x, 0.1, 0.5),
    "zero_": lambda x: (x * 1).zero_() + x,
    "fill_": lambda x: (x * 1).fill_(2.0) * x,
    "to another tensor's dtype": lambda x: x.float().to(x) * x,
    "a plain tensor to a sharded one's dtype": lambda x: torch.ones(()).to(x) * x,
    "type_as a plain tensor": lambda x: x.type_as(torch.ones(2)).double(),
    "new_zeros": lambda x: x.new_zeros(x.shape) + x,
    "new_full of another shape": lambda x: x * x.new_full((3, 1, 1, 1), 2.0),
    "new_tensor": lambda x: x * x.new_tensor([1.0, 2.0, 3.0]),
    "special functions": lambda x: torch.special.expit(x) + torch.special.log_ndtr(x),
    "bool methods": lambda x: (x > 0).double() * x,
    "addcdiv": lambda x: x.addcdiv(x, x * x + 1, value=2.0),
}


@pytest.mark.parametrize("function", WITH_OPTIONS.values(), ids=WITH_OPTIONS)
def test_options_and_operators(function):
    check_function(function, randn(*SHAPE), (), POINTS, second_order=True)


BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "true divide": torch.div,
    "maximum": torch.maximum, "minimum": torch.minimum, "fmax": torch.fmax,
    "atan2": torch.atan2, "hypot": torch.hypot, "logaddexp": torch.logaddexp,
    "copysign": torch.copysign, "xlogy": lambda a, b: torch.xlogy(a, b.abs() + 1),
    "pow": lambda a, b: (a.abs() + 0.5) ** b, "remainder": torch.remainder,
    "where": lambda a, b: torch.where(a > b, a, b * b),
    "masked_fill": lambda a, b: (a + b).masked_fill(b > 0, 3.0),
    "rsub": lambda a, b: torch.rsub(a, b, alpha=2), "operator": operator.truediv,
    "reflected": lambda a, b: b - a * b, "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "torch.where(cond, plain, sharded)": lambda a, b: torch.where(a > 0, b, a),
}  # fmt: skip
PLAIN_SHAPES = {
    "equal": SHAPE,
    "per channel": (3, 1, 1, 1),
    "per sample": (2, 1, 1, 1, 1),
    "along the depth": (5, 1, 1),
    "along the width": (3,),
    "one slice": (1, 1, 1, 4, 3),
    "scalar": (),
}


WITH_ALL = ("mul", "where", "lerp")
"""Functions with operands of every kind; operands are aligned before a function is called."""


def pairs(operands, some):
    """Returns all functions with some operands, and some functions with all operands."""
    return [(f, o) for f in BINARY for o in operands if o in some or f in WITH_ALL]


@pytest.mark.parametrize(("name", "shape"), pairs(PLAIN_SHAPES, ("per channel", "along the depth")))
def test_with_a_plain_tensor_that_has_a_gradient(name, shape):
    check_function(
        BINARY[name], randn(*SHAPE), [randn(*PLAIN_SHAPES[shape], seed=1)], POINTS,
        second_order=shape == "along the depth",
    )  # fmt: skip


@pytest.mark.parametrize("shape", PLAIN_SHAPES.values(), ids=PLAIN_SHAPES)
def test_second_order_with_a_plain_tensor(shape):
    check_function(
        lambda x, p: x**2 / p, randn(*SHAPE), [randn(*shape, seed=1) + 5], POINTS, second_order=True
    )


OTHER_LAYOUTS = {
    "equal shape": Cut(randn(*SHAPE, seed=1), [[0, 3, 5], [0, 4, 4], [0, 1, 3]]),
    "other axes": Cut(randn(4, 3, seed=1), [[0, 1, 4], [0, 2, 3]]),
    "partly expanded": Cut(randn(2, 1, 5, 1, 3, seed=1), [[0, 1, 5], [0, 0, 1], [0, 3, 3]]),
}


@pytest.mark.parametrize(("name", "other"), pairs(OTHER_LAYOUTS, ("partly expanded",)))
def test_with_a_sharded_tensor_of_another_layout(name, other):
    """The result has the layout of one operand; the other and its gradient are redistributed."""
    check_function(BINARY[name], randn(*SHAPE), (), POINTS, beside=[OTHER_LAYOUTS[other]])


@given(data=st.data())
def test_broadcasting_between_two_sharded_tensors_to_second_order(data):
    """Each tensor is expanded over dims in which the other is split."""
    x, y = randn(2, 3, 5, 1, 3), randn(2, 1, 1, 4, 3, seed=1)
    points = data.draw(cuts((5, 1, 3)))
    spatial = [len(p) - 1 for p in points]
    other = [
        [0, *sorted(data.draw(st.lists(st.integers(0, n), min_size=s - 1, max_size=s - 1))), n]
        for n, s in zip((1, 4, 3), spatial, strict=True)
    ]
    check_function(lambda x, y: x * y + y, x, (), points, beside=[Cut(y, other)], second_order=True)


IN_PLACE = {
    "add_": lambda x, p: (x * 1).add_(p),
    "mul_ of itself": lambda x, p: (x * p).mul_(2.0).add_(x),
    "+=": lambda x, p: operator.iadd(x * 1, p),
    "*=": lambda x, p: operator.imul(x * p, p),
    "/=": lambda x, p: operator.itruediv(x * p, p * p + 1),
    "relu inplace": lambda x, p: F.relu(x * p, inplace=True),
    "leaky_relu_": lambda x, p: F.leaky_relu_(x * p, 0.2),
    "clamp_": lambda x, p: (x * p).clamp_(min=-0.1),
    "masked_fill_": lambda x, p: (x * p).masked_fill_(x > 0, 2.0),
    "copy_": lambda x, p: (x * 1).copy_(p * x),
    "sigmoid_": lambda x, p: (x * p).sigmoid_(),
}


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)
def test_in_place(function):
    check_function(function, randn(*SHAPE), [randn(*SHAPE, seed=1)], POINTS)


def test_in_place_keeps_the_object_and_starts_its_graph():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS)).detach()
        weight = randn(3, 1, 1, 1, seed=1).requires_grad_()
        same = x.mul_(weight)
        assert same is x
        assert x.requires_grad
        x.sum().backward()
        mesh.sample.all_reduce(weight.grad)
        return weight.grad / mesh.sample_size

    expected = randn(*SHAPE).sum((0, 2, 3, 4)).view(3, 1, 1, 1)
    for grad in on_ranks((2, 2, 2), body):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


COMPARISONS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge, "torch.eq": torch.eq, "torch.gt": torch.gt,
    "logical_and": lambda a, b: torch.logical_and(a > 0, b > 0),
    "&": lambda a, b: (a > 0) & (b > 0), "|": lambda a, b: (a > 0) | (b > 0),
    "^": lambda a, b: (a > 0) ^ (b > 0), "~": lambda a, b: ~(a > b),
    "isclose": torch.isclose, "<<": lambda a, b: a.long() << b.long(),
    "&=": lambda a, b: operator.iand((a > 0) & True, b > 0),
    "gcd": lambda a, b: torch.gcd(a.long(), b.long()),
}  # fmt: skip


@pytest.mark.parametrize("compare", COMPARISONS.values(), ids=COMPARISONS)
def test_comparisons(compare):
    x, y = randint(3, *SHAPE).double(), randint(3, *SHAPE, seed=1).double()
    check_function(compare, x, [y], POINTS)
    check_function(lambda a, b: compare(b, a), x, [y], POINTS)


def test_integers_and_masks_keep_their_dtype():
    check_function(lambda x: (x * 3 + 1) // 2, randint(9, *SHAPE), (), POINTS)
    check_function(lambda x: x.to(torch.int32) & 5, randint(9, *SHAPE), (), POINTS)


@pytest.mark.parametrize("weight", [1, 3], ids=["one weight", "a weight a channel"])
def test_prelu(weight):
    check_function(F.prelu, randn(*SHAPE), [randn(weight, seed=1).abs()], POINTS, second_order=True)


def test_prelu_with_split_channels():
    check_function(
        F.prelu, randn(2, 4, 3), [randn(4, seed=1).abs()], [[0, 3, 4], [0, 1, 3]], second_order=True
    )


def test_a_comparison_with_something_else_is_torchs():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        assert (x == None) is False  # noqa: E711
        assert (x != "a") is True
        assert x.type() == "torch.DoubleTensor"
        with pytest.raises(TypeError, match="unsupported operand"):
            x - "a"

    on_ranks((2, 1, 1), body)


def test_one_tensor_twice():
    check_function(lambda x: x * x + torch.maximum(x, x), randn(*SHAPE), (), POINTS)


def refused(kind, message, call):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        with pytest.raises(kind, match=message):
            call(x, mesh)

    on_ranks((2, 1, 1), body)


REFUSED = {
    "out=": (NotSupported, "out= would fill only", lambda x, m: torch.add(x, x, out=randn(*SHAPE))),
    "out= of one operand": (
        NotSupported, "out= would fill only", lambda x, m: torch.exp(x, out=x.clone())
    ),
    "plain of the shard's shape": (
        UsageError, "shape of this rank's shard", lambda x, m: x + randn(*x.to_local().shape)
    ),
    "shard-shaped mask": (
        UsageError, "shape of this rank's shard",
        lambda x, m: x.masked_fill(x.to_local() > 0, 0.0),
    ),
    "plain that differs between ranks": (
        UsageError, "differs between the ranks", lambda x, m: x + randn(*SHAPE, seed=m.rank)
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "call"), REFUSED.values(), ids=REFUSED)
def test_refusals(kind, message, call):
    refused(kind, message, call)


def test_shapes_that_do_not_broadcast_are_torchs_error():
    refused(RuntimeError, "broadcast|size", lambda x, m: x + randn(4, 4, seed=1))


def test_even_split_of_an_odd_extent_broadcasts_with_its_slices():
    check_function(
        lambda x, p: x * p, randn(1, 2, 7, 3), [randn(7, 1, seed=1)], [even_points(7, 4), None]
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.leaky_relu(x, 0.01),
        lambda x: F.relu(x.clone(), inplace=True),
        lambda x: x * 2 + x,
        lambda x: x * torch.ones(1, 3, 1, 1, 1).double(),
        lambda x: F.prelu(x, torch.ones(3).double()),
        lambda x: F.dropout(x, 0.5, True),
        lambda x: F.dropout3d(x, 0.5, True),
        lambda x: F.mse_loss(x, x.detach() + 1, reduction="none"),
    ],
)
def test_channels_last_stays_channels_last(call):
    def body(mesh):
        whole = randn(*SHAPE).to(memory_format=torch.channels_last_3d)
        x = shard(whole, layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        y = call(x).to_local()
        y.sum().backward()
        return y, x.grad.to_local()

    for tensors in on_ranks((2, 1, 1), body):
        assert all(t.is_contiguous(memory_format=torch.channels_last_3d) for t in tensors)
