"""Tests of every kernel of convolutions against torch in float64, over all geometries.

Some oneDNN kernels of torch 2.13 crash, and some read uninitialized memory. So NaN fills freed
memory before each call, and tensors have all strides that their shapes allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pydist.backend.conv import candidates, formats, in_format
from pydist.backend.conv_kernels import ConvKernels
from pydist.backend.problem import ROLES, ConvProblem

BOUNDS = {
    torch.float32: 1e-4,
    torch.bfloat16: 1.2e-2,
    torch.float16: 1.5e-3,
    torch.float64: 1e-11,
}
"""Bounds of max|Δ| / max|expected|; for 16 bits, three roundings of the result."""
NAMED = {
    "3³": ((1, 4, 6, 6, 6), (8, 4, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    "1³": ((1, 16, 4, 5, 6), (8, 16, 1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    "3×1×1": ((1, 16, 4, 5, 6), (8, 16, 3, 1, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1), 1),
    "stride 2": ((1, 16, 8, 7, 8), (32, 16, 3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 1),
    "wide strides and padding": ((1, 16, 3, 6, 5), (16, 16, 4, 3, 3), (2, 1, 1), (3, 1, 1),
                                 (1, 1, 1), 1),
    "a window in the padding": ((1, 3, 9, 6, 1), (24, 1, 2, 3, 1), (2, 1, 2), (3, 3, 3),
                                (3, 3, 2), 3),
    "thinner than the kernel": ((1, 16, 1, 2, 6), (16, 16, 3, 3, 3), (1, 1, 1), (1, 1, 1),
                                (1, 1, 1), 1),
    "strided to one": ((2, 16, 1, 1, 1), (16, 16, 3, 3, 3), (3, 3, 3), (1, 1, 1), (1, 1, 1), 1),
    "one channel": ((1, 1, 1, 9, 4), (4, 1, 5, 7, 3), (1, 1, 1), (2, 3, 1), (1, 1, 1), 1),
    "to one channel": ((1, 16, 4, 4, 4), (1, 16, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
    "depthwise": ((1, 16, 4, 6, 4), (16, 1, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 16),
    "flat": ((1, 6, 2, 17), (6, 2, 1, 1), (2, 2), (0, 3), (1, 1), 3),
    "line": ((1, 17, 1, 1), (8, 17, 1, 3), (1, 3), (0, 1), (1, 1), 1),
    "no samples": ((0, 4, 6, 6, 6), (8, 4, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
}  # fmt: skip


@st.composite
def problems(draw) -> ConvProblem:
    dims = draw(st.sampled_from([2, 3, 3]))

    def each(values) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in range(dims))

    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 8]))
    per_group = draw(st.sampled_from([1, 2, 3, 8, 16])) if groups < 8 else 1
    out = draw(st.sampled_from([1, 2, 5, 8, 16])) if groups < 8 else draw(st.integers(1, 2))
    kernel, dilation = each([1, 2, 3, 3, 3, 4, 5]), each([1, 1, 1, 2])
    stride = (1,) * dims if draw(st.booleans()) else each([1, 2, 3])
    padding = tuple(
        draw(st.sampled_from([d * (k - 1) // 2, 0, 1, d * (k - 1)]))
        for k, d in zip(kernel, dilation, strict=True)
    )
    # Large enough for one window, however thin.
    extents = tuple(
        max(n, d * (k - 1) + 1 - 2 * p)
        for n, k, d, p in zip(each([1, 2, 3, 4, 6, 9, 12]), kernel, dilation, padding, strict=True)
    )
    return ConvProblem(
        (draw(st.sampled_from([1, 1, 2])), groups * per_group, *extents),
        (groups * out, per_group, *kernel),
        stride, padding, dilation, groups,
        draw(st.sampled_from([torch.float32, torch.float32, *BOUNDS])),
        has_onednn=draw(st.sampled_from([True, True, False])),
    )  # fmt: skip


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def restrided(x: Tensor, how: str) -> Tensor:
    """Returns the same values in another memory layout: a slice, permuted dims, free strides."""
    if how == "slice":
        room = x.new_zeros([n + 1 for n in x.shape])
        view = room[tuple(slice(1, None) for _ in x.shape)]
        view.copy_(x)
        return view
    if how == "ones":  # strides of dims of extent 1 are arbitrary
        strides = [1 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, strides)
    order = {"plain": range(x.dim()), "last": (0, *range(2, x.dim()), 1)}[how]
    lying = x.permute(*order).contiguous()
    return lying.permute([list(order).index(d) for d in range(x.dim())])


def soil(*tensors: Tensor) -> None:
    """Leaves NaN in memory that the next allocations reuse."""
    _ = [torch.full((t.numel(),), math.nan, dtype=t.dtype) for t in tensors for _ in range(2)]


def errors(problem: ConvProblem, strides: tuple[str, str, str]) -> Iterator[tuple[str, float]]:
    """Yields the error of every kernel in every format."""
    p = problem
    x, weight = normal(p.input, p.dtype, 0), normal(p.weight, p.dtype, 1)
    grad, bias = normal(p.output, p.dtype, 2), normal(p.weight[:1], p.dtype, 3)
    leaves = [t.double().clone().requires_grad_() for t in (x, weight)]
    none = (0,) * len(p.stride)
    y = torch.convolution(
        *leaves, bias.double(), p.stride, p.padding, p.dilation, False, none, p.groups
    )
    expected = dict(
        zip(ROLES, (y.detach(), *torch.autograd.grad(y, leaves, grad.double())), strict=True)
    )
    x, grad, weight = (restrided(t, s) for t, s in zip((x, grad, weight), strides, strict=True))
    for channels_last in formats(p):
        named = dict(zip(ROLES, candidates(p, channels_last), strict=True))
        rule = {role: names[0] for role, names in named.items()}
        for role, name in [(role, name) for role, names in named.items() for name in names]:
            kernels = ConvKernels(p, channels_last, **rule | {role: name})
            own, own_grad = kernels.in_format(x), kernels.in_format(grad)
            soil(x, grad, weight)
            if role == "forward":
                found = kernels.run_forward(own, weight, bias)
            elif role == "dgrad":
                found = kernels.run_dgrad(own, own_grad, weight)
            else:
                found = kernels.run_wgrad(own, own_grad, weight)
            assert found.shape == expected[role].shape
            assert found.dtype == p.dtype
            assert not found.is_mkldnn
            where = f"{role} by {name}, {'channels-last' if channels_last else 'plain'}"
            yield where, relative(found, expected[role])


def relative(found: Tensor, expected: Tensor) -> float:
    if not found.numel():
        return 0.0
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(1e-30))


def check(problem: ConvProblem, strides: tuple[str, str, str]) -> None:
    wrong = {w: e for w, e in errors(problem, strides) if not e <= BOUNDS[problem.dtype]}
    assert not wrong, f"{problem}: {wrong}"


lying = st.sampled_from(["plain", "plain", "last", "slice", "ones"])


@settings(max_examples=250)
@given(problem=problems(), strides=st.tuples(lying, lying, lying))
def test_every_kernel_gives_torchs_numbers(problem, strides):
    check(problem, strides)


@pytest.mark.parametrize("how", ["plain", "last", "ones"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_geometries_by_name(case, dtype, how):
    check(ConvProblem(*case, dtype), (how,) * 3)


@pytest.mark.parametrize(
    ("dtype", "has_onednn"),
    [(torch.float32, True), *((dtype, False) for dtype in BOUNDS)],
    ids=str,
)
@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_transposed_convolutions(case, dtype, has_onednn):
    """With bf16 by oneDNN, where a processor has it, are those of the split layers' tests."""
    p = ConvProblem(*case, dtype, has_onednn=has_onednn)
    x, weight = normal(p.output, dtype, 0), normal(p.weight, dtype, 1)
    bias = normal(p.input[1:2], dtype, 2)
    geometry = p.stride, p.padding, p.dilation, True, p.rest, p.groups
    expected = torch.convolution(x.double(), weight.double(), bias.double(), *geometry)
    found = ConvKernels(p, False, *(names[0] for names in candidates(p, False))).run_transposed(
        x, weight, bias
    )
    assert found.dtype == dtype
    assert relative(found, expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("how", ["plain", "last", "slice", "ones"])
@pytest.mark.parametrize("shape", [(1, 1, 3, 1), (2, 3, 1, 4, 5), (1, 4, 1, 1, 1), (0, 2, 3, 3)])
def test_a_format_is_one_set_of_strides(shape, how, channels_last):
    x = normal(shape, torch.float32, 0)
    found = in_format(restrided(x, how), channels_last)
    torch.testing.assert_close(found, x, rtol=0, atol=0)
    order = (0, *range(2, x.dim()), 1) if channels_last else range(x.dim())
    plain = torch.empty([shape[d] for d in order])
    assert found.permute(*order).stride() == plain.stride()
    assert in_format(found, channels_last) is found


def test_a_copy_is_made_only_between_formats():
    x = normal((2, 3, 4, 5, 6), torch.float32, 0)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    odd = restrided(normal((1, 3, 4, 5, 6), torch.float32, 0), "ones")
    for tensor, channels_last in ((x, False), (last, True), (odd, False)):
        assert in_format(tensor, channels_last).data_ptr() == tensor.data_ptr()
    assert in_format(x, True).data_ptr() != x.data_ptr()


def test_what_onednn_does_not_take_goes_to_torch_and_16_bits_to_float32():
    case = NAMED["3³"]
    assert candidates(ConvProblem(*case, torch.float64), False) == (["torch"],) * 3
    assert formats(ConvProblem(*case, torch.float64)) == [False]
    for dtype in BOUNDS:
        assert candidates(ConvProblem(*case, dtype, "cuda"), False) == (["torch"],) * 3
    for dtype in (torch.bfloat16, torch.float16):
        narrow = ConvProblem(*case, dtype, has_onednn=False)
        assert candidates(narrow, False) == (["widened"],) * 3


@pytest.mark.parametrize("channels", [1, 3, 4, 8, 12, 16])
def test_wgrad_is_as_close_to_fp64_as_torchs(channels):
    # Inputs of one sign, like counts, make long sums in which rounding errors add up.
    case = ((2, channels, 24, 32, 32), (16, channels, 3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3, 1)
    p = ConvProblem(*case, torch.float32)
    x, weight = normal(p.input, p.dtype, 0).abs().log1p(), normal(p.weight, p.dtype, 1)
    grad = normal(p.output, p.dtype, 2) + 0.2
    wanted = [False, True, False]

    def by_torch(dtype: torch.dtype) -> Tensor:
        operands = (t.to(dtype) for t in (grad, x, weight))
        geometry = (p.stride, p.padding, p.dilation, False, (0, 0, 0), p.groups, wanted)
        return torch.ops.aten.convolution_backward(*operands, None, *geometry)[1]

    exact = by_torch(torch.float64)
    bound = 4 * relative(by_torch(torch.float32), exact)
    for channels_last in formats(p):
        *rest, names = candidates(p, channels_last)
        for name in names:
            kernels = ConvKernels(p, channels_last, *(other[0] for other in rest), name)
            own = (kernels.in_format(t) for t in (x, grad))
            found = kernels.run_wgrad(*own, weight)
            assert relative(found, exact) <= bound, (name, channels_last)


def test_wgrad_of_thin_shards_is_never_left_to_torch_itself():
    thin = [NAMED[name] for name in ("3³", "1³", "3×1×1")]
    # With one tap torch uses one thread, at any size.
    large = ((1, 64, 16, 24, 8), (8, 64, 1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    for case in (*thin, large):
        problem = ConvProblem(*case, torch.float32)
        for channels_last in formats(problem):
            _, dgrad, wgrad = candidates(problem, channels_last)
            assert "torch" not in dgrad + wgrad, case
