"""Tests that no convolution uses torch's own path, which is up to 20× slower than oneDNN's.

They look at torch's profiler and dispatcher, not at a clock.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pydist import Mesh, layout_for_sample, parallelize
from pydist.models import CosmoFlow
from support.equivalence import layout_at, on_ranks, randn, shard, whole_of
from support.kernels.instruction_sets import OF_ONEDNN

SLOW = re.compile(r"slow_conv|thnn|unfold|vol2col|im2col")


class _Backends(TorchDispatchMode):
    """Recorder of the implementation that torch picks for each convolution.

    The profiler has no name for torch's own three-dimensional backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket._qualified_op_name
        if name == "aten::convolution":
            x, weight, bias, *geometry = args
            self._add("forward", x, weight, bias, geometry, None)
        elif name == "aten::convolution_backward":
            _, x, weight, bias_sizes, *geometry, _ = args
            self._add("backward", x, weight, None, geometry, bias_sizes)
        elif name.startswith("mkldnn::_convolution_transpose"):
            self.seen.append("backward: oneDNN")
        elif name == "aten::mkldnn_convolution":
            self.seen.append("forward: oneDNN")
        return function(*args, **(kwargs or {}))

    def _add(self, way, x, weight, bias, geometry, bias_sizes) -> None:
        backend = torch._C._select_conv_backend(x, weight, bias, *geometry, bias_sizes)
        own = "Mkldnn" not in str(backend)
        self.seen.append(f"{way}: {'torch, slow_conv' if own else 'oneDNN'}")


def operators(body: Callable[[], object]) -> set[str]:
    """Returns the names of all operators that a call runs, and the libraries of convolutions."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled, _Backends() as backends:
        body()
    return {event.key for event in profiled.key_averages()} | set(backends.seen)


def assert_fast(names: set[str]) -> None:
    assert not {name for name in names if SLOW.search(name)}
    assert {"forward: oneDNN", "backward: oneDNN"} <= names


# Kernel, stride, padding; input extents. Blocks line up with the stride only in the first rows.
CONVS = {
    "3³": ((3, 3, 3), 1, 1, (12, 6, 6)),
    "stride 2": ((3, 3, 3), 2, 1, (8, 6, 6)),
    "1³": ((1, 1, 1), 1, 0, (12, 6, 6)),
    "3×1×1": ((3, 1, 1), 1, (1, 0, 0), (12, 6, 6)),
    "odd depth": ((3, 3, 3), 1, 1, (10, 6, 6)),
    "not padded": ((3, 3, 3), 1, 0, (12, 6, 6)),
    "strides and offsets apart": ((3, 3, 3), 2, 1, (9, 6, 6)),
    "even kernel": ((2, 2, 2), 1, "same", (12, 6, 6)),
    "5³": ((5, 5, 5), 1, 2, (12, 6, 6)),
    "two dims": ((3, 3), 1, 1, (12, 6)),
    "one dim": ((3,), 1, 1, (24,)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", OF_ONEDNN, ids=str)
@pytest.mark.parametrize(("kernel", "stride", "padding", "extents"), CONVS.values(), ids=CONVS)
def test_thin_shards(kernel, stride, padding, extents, dtype, parts):
    """Covers unsplit, corrected and gathered inputs, forward and backward."""
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
    points = [[0, extents[0] // 2, extents[0]], *[None] * (len(extents) - 1)]
    whole = randn(1, 4, *extents).to(dtype)
    weight = randn(8, 4, *kernel, seed=1).to(dtype).requires_grad_()

    def body(mesh: Mesh) -> set[str]:
        layout = layout_at(mesh, whole.shape, points if parts > 1 else [None])
        x = shard(whole, layout)

        def step() -> None:
            y = conv(x, weight.detach().requires_grad_(), stride=stride, padding=padding)
            (y * y).sum().backward()

        return operators(step) if mesh.rank == 0 else step() or set()

    assert_fast(on_ranks((parts, 1, 1), body, keep_thin_blocks=True)[0])


# Kernel and options: no exchange, corrected, gathered; two dims and one dim.
TRANSPOSED = {
    "k2 s2": ((2, 2, 2), {"stride": 2}),
    "k3 s2": ((3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "k4 s1": ((4, 4, 4), {"padding": 1}),
    "two dims": ((3, 3), {"stride": 2, "padding": 1}),
    "one dim": ((3,), {"stride": 2, "padding": 1}),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", OF_ONEDNN, ids=str)
@pytest.mark.parametrize(("kernel", "options"), TRANSPOSED.values(), ids=TRANSPOSED)
def test_thin_shards_transposed(kernel, options, dtype, parts):
    dims = len(kernel)
    conv = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dims]
    whole = randn(1, 4, *[8] * dims).to(dtype)
    weight = randn(4, 8, *kernel, seed=1).to(dtype)

    def body(mesh: Mesh) -> set[str]:
        points = [[0, 4, 8], *[None] * (dims - 1)]
        x = shard(whole, layout_at(mesh, whole.shape, points if parts > 1 else [None]))

        def step() -> None:
            y = conv(x, weight.clone().requires_grad_(), **options)
            (y * y).sum().backward()

        return operators(step) if mesh.rank == 0 else step() or set()

    assert_fast(on_ranks((parts, 1, 1), body)[0])


@pytest.mark.parametrize("dtype", OF_ONEDNN, ids=str)
@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
def test_a_training_step_of_cosmoflow(spatial, dtype):
    torch.manual_seed(0)
    model = CosmoFlow(32, dropout=0.0).to(dtype)
    whole = randn(1, 4, 32, 32, 32).to(dtype)

    def body(mesh: Mesh) -> set[str]:
        own = parallelize(copy.deepcopy(model), mesh)
        x = shard(whole, layout_for_sample(mesh, whole.shape))

        def step() -> None:
            y = own(x)
            whole_of(y).square().sum().backward()

        return operators(step) if mesh.rank == 0 else step() or set()

    assert_fast(on_ranks(spatial, body)[0])


def test_plain_torch_would_be_slow_here():
    """Otherwise the tests above would prove nothing."""
    x = torch.randn(1, 4, 6, 6, 6, requires_grad=True)
    weight = torch.randn(8, 4, 3, 3, 3, requires_grad=True)

    def step() -> Tensor:
        y = F.conv3d(x, weight, padding=1)
        y.sum().backward()
        return y

    slow = {name for name in operators(step) if SLOW.search(name)}
    assert {"aten::slow_conv3d", "forward: torch, slow_conv", "backward: torch, slow_conv"} <= slow
