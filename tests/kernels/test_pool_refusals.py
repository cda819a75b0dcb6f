"""Sums over pooling windows refuse invalid arguments, in one line each."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pydist import _native as native
from support.kernels.arrays import refusal
from support.kernels.pool_sums import ORIGIN, footprints


def test_refusals_name_what_was_given():
    said = partial(refusal, native.pool_sum_forward)
    x, y = torch.zeros(1, 4, 6, 6, 6), torch.zeros(1, 4, 3, 3, 3)
    scales = [torch.ones(3, dtype=torch.float64)] * 3
    two = footprints((2, 2, 2), (2, 2, 2), ORIGIN)
    tail = (ORIGIN, ORIGIN, two)
    assert "source is float32 (1, 4, 6, 6)" in said(x[:, :, 0], y, *tail, scales, False)
    assert "int32" in said(x.int(), y.int(), *tail, scales, False)
    assert "float64" in said(x, y.double(), *tail, scales, False)
    assert "channels" in said(x[:, :3], y, *tail, scales, False)
    assert "2 footprints" in said(x, y, ORIGIN, ORIGIN, two[:2], scales, False)
    dilated = [native.Footprint(2, 2, 3), *two[1:]]
    assert "dilation 3" in said(x, y, ORIGIN, ORIGIN, dilated, scales, False)
    assert "(0, 0)" in said(x, y, (0, 0), ORIGIN, two, scales, False)
    assert "2 arrays" in said(x, y, *tail, scales[:2], False)
    assert "scales[2] is float32" in said(x, y, *tail, [*scales[:2], torch.ones(3)], False)
    long = torch.ones(4, dtype=torch.float64)
    assert "scales[1] is float64 (4,)" in said(x, y, *tail, [scales[0], long, scales[2]], False)
    assert "stride 0" in said(x, y[:, :1].expand(1, 4, 3, 3, 3), *tail, scales, False)
    assert "64 bits" in said(x, y, ORIGIN, (2**62, 0, 0), two, scales, False)
    adaptive = [native.Footprint.adaptive(6, 3)] * 3
    assert "domain" in said(x, y, (1, 0, 0), ORIGIN, adaptive, scales, False)


def test_backward_checks_its_arguments_as_forward_does():
    x, y = torch.zeros(1, 4, 6, 6, 6), torch.zeros(1, 4, 3, 3, 3)
    scales = [torch.ones(3, dtype=torch.float64)] * 3
    tail = (ORIGIN, ORIGIN, footprints((2, 2, 2), (2, 2, 2), ORIGIN), scales, True)
    with pytest.raises(ValueError, match=r"source_grad is float32 .* stride 0"):
        native.pool_sum_backward(y, x[:, :1].expand(1, 4, 6, 6, 6), *tail)
    with pytest.raises(ValueError, match=r"scales\[0\] is float64 \(3,\) .* grad is float32"):
        native.pool_sum_backward(y[:, :, :2], x, *tail)

    with pytest.raises(ValueError, match=r"a gate and a negative slope below 1 come together"):
        native.pool_sum_backward(y, x, *tail, None, 0.5)
    with pytest.raises(ValueError, match=r"gate is float32 .* one shape and the same strides"):
        native.pool_sum_backward(y, x, *tail, x.transpose(3, 4), 0.5)
    with pytest.raises(ValueError, match=r"negative slope of 1.5.*: 0 to 1 is possible"):
        native.pool_sum_backward(y, x, *tail, x, 1.5)
