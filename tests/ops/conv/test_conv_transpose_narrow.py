"""Split transposed convolution in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch

from support.equivalence.narrow import CL, TRANSPOSED, check, conversions, step_in_channels_last
from support.kernels.instruction_sets import OF_ONEDNN

NARROW = [torch.float32, torch.bfloat16]
CUT, SHAPE = [[0, 4, 8], None, None], (1, 8, 8, 6, 6)
DECODER = {"stride": 2, "padding": 1, "output_padding": 1}
GEOMETRIES = {
    "kernel = stride": (SHAPE, (8, 4, 2, 2, 2), CUT, {"stride": 2}),
    "decoder": (SHAPE, (8, 4, 3, 3, 3), CUT, DECODER),
    "2x2": (SHAPE, (8, 4, 3, 3, 3), [[0, 4, 8], [0, 2, 6], None], DECODER),
    "three uneven": ((2, 4, 9, 6, 6), (4, 8, 4, 4, 4), [[0, 1, 5, 9], None, None],
                     {"stride": 2, "padding": 1}),
    "width": ((1, 4, 4, 4, 8), (4, 4, 5, 5, 5), [None, None, [0, 4, 8]],
              {"stride": 2, "padding": 2, "output_padding": 1}),
    "not padded": (SHAPE, (8, 4, 3, 3, 3), CUT, {"stride": 2}),
    "stride 1": (SHAPE, (8, 4, 3, 3, 3), CUT, {"padding": 1}),
    "gathered": ((1, 8, 8, 9, 9), (8, 4, 4, 4, 4), CUT, {"padding": 1}),
    "dilation": (SHAPE, (8, 4, 3, 3, 3), CUT, {"padding": 2, "dilation": 2}),
    "depthwise": (SHAPE, (8, 1, 3, 3, 3), CUT, DECODER | {"groups": 8}),
    "from one channel": ((1, 1, 8, 6, 6), (1, 4, 3, 3, 3), CUT, DECODER),
    "to one channel": (SHAPE, (8, 1, 3, 3, 3), CUT, DECODER),
    "gaps": (SHAPE, (8, 4, 1, 1, 1), CUT, {"stride": 3, "output_padding": 2}),
    "all cropped but the middle": (SHAPE, (8, 4, 1, 3, 3), CUT, {"padding": (2, 1, 1)}),
    "two dims": ((1, 4, 8, 8), (4, 8, 3, 3), [[0, 3, 8], None], DECODER),
    "two dims, wide": ((1, 8, 16, 16), (8, 4, 3, 3), [[0, 8, 16], None], DECODER),
    "one dim": ((2, 4, 12), (4, 8, 3), [[0, 5, 12]], DECODER),
    "one dim, nothing exchanged": ((2, 4, 12), (4, 8, 2), [[0, 5, 12]], {"stride": 2}),
    "empty shard": (SHAPE, (8, 4, 3, 3, 3), [[0, 8, 8], None, None], DECODER),
    "empty shard, nothing exchanged": (SHAPE, (8, 4, 2, 2, 2), [[0, 8, 8], None, None],
                                       {"stride": 2}),
    "whole": (SHAPE, (8, 4, 3, 3, 3), [None, None, None], DECODER),
}  # fmt: skip
WAYS = {name: GEOMETRIES[name] for name in ("kernel = stride", "decoder", "gathered", "two dims")}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("case", GEOMETRIES.values(), ids=GEOMETRIES)
def test_geometries(case, dtype):
    shape, weight, points, options = case
    check(shape, weight, points, dtype, functions=TRANSPOSED, **options)


@pytest.mark.parametrize("case", GEOMETRIES.values(), ids=GEOMETRIES)
def test_gradient_penalty(case):
    shape, weight, points, options = case
    for dtype in (torch.float32, torch.float64):
        check(shape, weight, points, dtype, functions=TRANSPOSED, penalty=True, **options)


@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("saving", [False, True], ids=["kept", "checkpointed"])
def test_autocast_and_checkpointing(case, saving):
    shape, weight, points, options = case
    for autocast in (True, False):
        check(
            shape, weight, points, functions=TRANSPOSED, autocast=autocast, saving=saving,
            **options,
        )  # fmt: skip


@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "weight bias", "x bias"])
def test_frozen(frozen, case):
    shape, weight, points, options = case
    check(shape, weight, points, functions=TRANSPOSED, frozen=frozen, **options)


@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
def test_no_bias_and_any_strides(case):
    shape, weight, points, options = case
    last = {4: torch.channels_last, 5: CL}[len(shape)]
    check(
        shape, weight, points, functions=TRANSPOSED, bias=False,
        change=lambda t: t.contiguous(memory_format=last), **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", OF_ONEDNN, ids=str)
@pytest.mark.parametrize("name", ["kernel = stride", "decoder", "gathered"])
def test_a_plain_input_gives_a_channels_last_output(name, dtype):
    shape, weight, points, options = GEOMETRIES[name]
    assert set(check(shape, weight, points, dtype, functions=TRANSPOSED, **options)) == {"last"}


@pytest.mark.parametrize("name", ["kernel = stride", "decoder", "three uneven", "two dims, wide"])
def test_nothing_is_converted_between_channels_last_layers(name, monkeypatch):
    """Gathered blocks keep the channels-last format."""
    copied = conversions(monkeypatch)
    step_in_channels_last(GEOMETRIES[name], TRANSPOSED)
    assert copied == []
