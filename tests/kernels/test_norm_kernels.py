"""Native norm kernels: threads change no bit, and invalid arguments are refused in one line."""

from __future__ import annotations

import pytest
import torch

from pydist import _native as native

FORMATS = [torch.contiguous_format, torch.channels_last_3d]


def passes(x, grad, parts, learned):
    """Returns the results of all four kernels, with a constant slope or learned slopes."""
    rows = x.shape[1]
    values = torch.linspace(0.5, 2, 4 * rows).view(4, rows)
    given, slope = (values, 1.0) if learned else (values[:3], 0.1)
    sums = [torch.empty(parts, n, rows, dtype=torch.float64) for n in (2, len(given) - 1)]
    out, grad_in = torch.empty_like(x), torch.empty_like(x)
    native.norm_moments(x, sums[0])
    native.norm_apply(x, out, given, slope)
    native.norm_grad_sums(grad, x, given, sums[1], slope)
    native.norm_grad_input(grad, x, grad_in, given, values[:3], slope)
    return [sums[0][0], sums[1][0], out, grad_in]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("memory_format", FORMATS)
def test_threads_change_no_bit(memory_format, learned):
    torch.manual_seed(0)
    x, grad = (torch.randn(2, 6, 41, 40, 39).to(memory_format=memory_format) for _ in range(2))
    before = native.get_num_threads()
    try:
        native.set_num_threads(1)
        expected = passes(x, grad, 7, learned)
        native.set_num_threads(3)
        found = passes(x, grad, 7, learned)
    finally:
        native.set_num_threads(before)
    for one, three in zip(expected, found, strict=True):
        assert torch.equal(one, three)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_result_may_take_the_inputs_place(memory_format):
    x = torch.randn(2, 5, 7, 6, 5).to(memory_format=memory_format)
    values, out = torch.randn(3, 5), torch.empty_like(x)
    native.norm_apply(x, out, values, 0.0)
    native.norm_apply(x, x, values, 0.0)
    assert torch.equal(x, out)


X = torch.zeros(2, 3, 4)
VALUES, SUMS = torch.zeros(3, 3), torch.zeros(1, 2, 3, dtype=torch.float64)
MOMENTS = torch.zeros(3, 3, dtype=torch.float64)
REFUSED = {
    "integers": (lambda: native.norm_moments(X.int(), SUMS), "possible are float16"),
    "no channels": (lambda: native.norm_moments(X[0, 0], SUMS), "needs samples and channels"),
    "other rows": (lambda: native.norm_moments(X, SUMS[..., :2].clone()), "each channel"),
    "sums in float32": (lambda: native.norm_moments(X, SUMS.float()), "float64 (parts, 2, rows)"),
    "gaps": (lambda: native.norm_moments(X[..., ::2], SUMS), "must be dense"),
    "values in float64": (lambda: native.norm_apply(X, X, VALUES.double(), 1.0), "float32 (3 or 4"),
    "slopes and a slope": (
        lambda: native.norm_apply(X, X, torch.zeros(4, 3), 0.5), "holds slopes",
    ),
    "no sum for slopes": (
        lambda: native.norm_grad_sums(X, X, torch.zeros(4, 3), SUMS, 1.0), "(parts, 3, rows)",
    ),
    "two values": (lambda: native.norm_apply(X, X, VALUES[:2], 1.0), "float32 (3 or 4"),
    "another order": (
        lambda: native.norm_apply(X, X.transpose(1, 2).contiguous().transpose(1, 2), VALUES, 1.0),
        "same order in memory",
    ),
    "another shape": (
        lambda: native.norm_grad_sums(X[:1], X, VALUES, SUMS, 1.0), "must have one shape",
    ),
    "rows and moments": (
        lambda: native.norm_values(MOMENTS[:, :2].contiguous(), None, None, 0.1, True, VALUES),
        "multiple of the moments",
    ),
    "moments in float32": (
        lambda: native.norm_values(MOMENTS.float(), None, None, 0.1, True, VALUES),
        "must be float64 (3, 3)",
    ),
    "a scale of another type": (
        lambda: native.norm_values(MOMENTS, MOMENTS[0], None, 0.1, True, VALUES),
        "scale is float64",
    ),
    "a shift of other channels": (
        lambda: native.norm_values(MOMENTS, VALUES[0], VALUES[0, :1], 0.1, True, VALUES),
        "there are 3 channels",
    ),
    "channels that do not fit": (
        lambda: native.norm_values(MOMENTS, torch.zeros(2), None, 0.1, True, VALUES),
        "multiple of the channels",
    ),
    "sums of other rows": (
        lambda: native.norm_totals(MOMENTS, None, 0.1, True, VALUES, SUMS[0, :, :2], SUMS[0], None),
        "sums is float64 (2, 2)",
    ),
    "coefficients of other rows": (
        lambda: native.norm_coefficients(MOMENTS, None, 0.1, True, VALUES, SUMS[0], VALUES[:2]),
        "must be (3, rows)",
    ),
    "no place for slopes": (lambda: native.norm_slopes(VALUES[0], VALUES), "no place for slopes"),
    "parts of other shapes": (
        lambda: native.norm_merge_parts(MOMENTS[:2], MOMENTS, MOMENTS, MOMENTS), "(parts, groups)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_misfits_are_refused(call, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are looked for below
        call()
    assert words in str(caught.value)
