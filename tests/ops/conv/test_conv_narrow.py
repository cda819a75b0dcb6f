"""Split convolution in float32 and bfloat16, where pydist chooses kernels and memory formats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pydist import ShardedTensor
from pydist.exchange.adjoints import mean_ranks
from pydist.grid import SAMPLE_AXES
from support.equivalence import error, layout_at, on_ranks, randn, shard
from support.equivalence.narrow import (
    CL,
    CONV,
    check,
    conversions,
    format_of,
    step_in_channels_last,
)
from support.kernels.instruction_sets import OF_ONEDNN

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

GEOMETRIES = {
    "two ranks": ((1, 4, 12, 8, 8), (8, 4, 3, 3, 3), [[0, 6, 12], None, None], {"padding": 1}),
    "2x2": ((1, 4, 12, 8, 8), (8, 4, 3, 3, 3), [[0, 6, 12], [0, 3, 8], None], {"padding": 1}),
    "three uneven": ((2, 4, 12, 8, 8), (8, 4, 3, 3, 3), [[0, 2, 7, 12], None, None],
                     {"padding": 1}),
    "width": ((1, 8, 6, 8, 12), (8, 8, 5, 5, 5), [None, None, [0, 6, 12]], {"padding": 2}),
    "stride 2": ((1, 4, 16, 8, 8), (8, 4, 3, 3, 3), [[0, 8, 16], None, None],
                 {"padding": 1, "stride": 2}),
    "gathered": ((1, 4, 9, 8, 8), (8, 4, 3, 3, 3), [[0, 3, 9], None, None],
                 {"padding": 1, "stride": 2}),
    "dilation": ((1, 4, 12, 8, 8), (8, 4, 3, 3, 3), [[0, 6, 12], None, None],
                 {"padding": 2, "dilation": 2}),
    "even kernel": ((1, 4, 9, 8, 8), (8, 4, 2, 2, 2), [[0, 4, 9], None, None],
                    {"padding": "same"}),
    "depthwise": ((1, 8, 12, 8, 8), (8, 1, 3, 3, 3), [[0, 6, 12], None, None],
                  {"padding": 1, "groups": 8}),
    "from one channel": ((1, 1, 12, 8, 8), (8, 1, 3, 3, 3), [[0, 6, 12], None, None],
                         {"padding": 1}),
    "to one channel": ((1, 8, 12, 8, 8), (1, 8, 3, 3, 3), [[0, 6, 12], None, None],
                       {"padding": 1}),
    "one voxel a rank": ((1, 4, 3, 4, 4), (8, 4, 3, 3, 3), [[0, 1, 2, 3], None, None],
                         {"padding": 1}),
    "more padding than kernel": ((1, 4, 12, 8, 8), (8, 4, 3, 3, 1), [[0, 6, 12], None, None],
                                 {"padding": (1, 1, 3)}),
    "two dims": ((1, 4, 12, 8), (8, 4, 3, 3), [[0, 5, 12], None], {"padding": 1}),
    "one dim": ((2, 4, 12), (8, 4, 3), [[0, 5, 12]], {"padding": 1}),
    "empty shard": ((1, 4, 12, 8, 8), (8, 4, 3, 3, 3), [[0, 12, 12], None, None],
                    {"padding": 1}),
}  # fmt: skip
NARROW = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("case", GEOMETRIES.values(), ids=GEOMETRIES)
def test_geometries(case, dtype):
    shape, weight, points, options = case
    check(shape, weight, points, dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", GEOMETRIES.values(), ids=GEOMETRIES)
def test_gradient_penalty(case, dtype):
    shape, weight, points, options = case
    check(shape, weight, points, dtype, penalty=True, **options)


TWO = (GEOMETRIES["two ranks"], GEOMETRIES["gathered"], GEOMETRIES["two dims"])
TWO_NAMES = ("corrected", "gathered", "two dims")


@pytest.mark.parametrize("case", TWO, ids=TWO_NAMES)
@pytest.mark.parametrize("saving", [False, True], ids=["kept", "checkpointed"])
def test_autocast_and_checkpointing(case, saving):
    shape, weight, points, options = case
    check(shape, weight, points, autocast=True, saving=saving, **options)
    check(shape, weight, points, saving=saving, **options)


@pytest.mark.parametrize("case", TWO, ids=TWO_NAMES)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "weight bias", "x bias"])
def test_frozen(frozen, dtype, case):
    shape, weight, points, options = case
    check(shape, weight, points, dtype, frozen=frozen, **options)


@pytest.mark.parametrize("case", TWO, ids=TWO_NAMES)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_no_bias(dtype, case):
    shape, weight, points, options = case
    check(shape, weight, points, dtype, bias=False, **options)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float64], ids=str)
@pytest.mark.parametrize("penalty", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("groups", [1, 8])
def test_any_strides(dtype, penalty, groups):
    """Input and weight are channels-last, whichever format pydist chooses."""
    check(
        (1, 8, 12, 8, 8), (8, 8 // groups, 3, 3, 3), [[0, 6, 12], None, None], dtype,
        change=lambda t: t.contiguous(memory_format=CL), penalty=penalty, padding=1,
        groups=groups,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("points", [[[0, 1, 2, 3, 4], None, None], [[0, 2, 4], [0, 1, 4], None]])
def test_on_fewer_ranks(dtype, points):
    """Blocks are too thin: the tensor moves to a subset of the ranks."""
    check((1, 8, 4, 4, 4), (8, 8, 3, 3, 3), points, dtype, keep_thin_blocks=False, padding=1)


@pytest.mark.parametrize("dtype", OF_ONEDNN, ids=str)
def test_a_plain_input_gives_a_channels_last_output(dtype):
    """Activations outweigh the weights: pydist converts them once and keeps the format."""
    for case in (GEOMETRIES["two ranks"], GEOMETRIES["three uneven"], GEOMETRIES["gathered"]):
        shape, weight, points, options = case
        assert set(check(shape, weight, points, dtype, **options)) == {"last"}


def test_a_layer_converts_no_channels_last_input():
    """Autograd saves the given shard itself, and backward uses the given gradient itself."""
    seen: list[Tensor] = []

    def body(mesh):
        layout = layout_at(mesh, (1, 8, 12, 8, 8), [[0, 6, 12], None, None])
        local = shard(randn(1, 8, 12, 8, 8).float(), layout).to_local().detach()
        local = local.contiguous(memory_format=CL).requires_grad_()
        x = ShardedTensor.from_local(local, layout)
        weight = randn(8, 8, 3, 3, 3).float().requires_grad_()

        def saved(t: Tensor) -> Tensor:
            if mesh.rank == 0:
                seen.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t):
            y = F.conv3d(x, weight, padding=1)
        (dx,) = torch.autograd.grad((y * y).sum(), [x])
        return local.data_ptr(), format_of(y.to_local()), format_of(dx.to_local())

    (place, *formats), _ = on_ranks((2, 1, 1), body)
    assert formats == ["last", "last"]
    assert place in {t.data_ptr() for t in seen}


@pytest.mark.parametrize("name", ["two ranks", "gathered", "two dims"])
def test_nothing_is_converted_between_channels_last_layers(name, monkeypatch):
    """Gathered blocks keep the channels-last format."""
    copied = conversions(monkeypatch)
    step_in_channels_last(GEOMETRIES[name], CONV)
    assert copied == []


@pytest.mark.parametrize(
    "factory", [torch.ones_like, torch._efficientzerotensor], ids=["expanded", "zeros of autograd"]
)
def test_gradients_that_lie_nowhere(factory):
    """Gradients without memory: an expanded one (from a sum), and autograd's efficient zeros."""

    def body(mesh):
        layout = layout_at(mesh, (1, 4, 12, 8, 8), [[0, 6, 12], None, None])
        x = shard(randn(1, 4, 12, 8, 8).float(), layout)
        weight = randn(8, 4, 3, 3, 3).float().requires_grad_()
        y = F.conv3d(x, weight, padding=1).to_local()
        if factory is torch.ones_like:
            grad = torch.ones(()).expand(y.shape)
        else:
            grad = torch._efficientzerotensor(y.shape)
        dx, dw = torch.autograd.grad(y, [x, weight], grad)
        return dx.full_tensor(), mean_ranks(dw, mesh, SAMPLE_AXES)

    x = randn(1, 4, 12, 8, 8).requires_grad_()
    weight = randn(8, 4, 3, 3, 3).requires_grad_()
    y = F.conv3d(x, weight, padding=1)
    scale = 1.0 if factory is torch.ones_like else 0.0
    expected = torch.autograd.grad(y, [x, weight], torch.full_like(y, scale))
    for found in on_ranks((2, 1, 1), body):
        for mine, theirs in zip(found, expected, strict=True):
            assert error(mine.double(), theirs) <= 1e-5
