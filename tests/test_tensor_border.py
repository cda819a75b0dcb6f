"""Tests of the conversion of tensors to native views, through every entry point.

The probe is `crc32c`, which borrows, checks and reads every byte.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pydist import _native

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@pytest.fixture(params=[True, False], ids=["table", "attributes"], autouse=True)
def exchange_table(request):
    before = _native.use_exchange_table(request.param)
    yield request.param
    _native.use_exchange_table(before)


def reference_crc(data: bytes) -> int:
    """Computes CRC-32C bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_it_lies_in_memory(dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    data = bytes(tensor.view(torch.uint8).numpy())
    assert _native.crc32c(tensor) == reference_crc(data)


def test_views_start_where_they_start():
    tensor = torch.arange(10)
    assert _native.crc32c(tensor[3:7]) == reference_crc(tensor.numpy()[3:7].tobytes())


def test_pieces_continue_each_other():
    data = bytes(range(200))
    assert _native.crc32c(data[50:], _native.crc32c(data[:50])) == reference_crc(data)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_empty_and_scalar_tensors_are_legal(shape):
    tensor = torch.ones(shape)
    assert _native.crc32c(tensor) == reference_crc(tensor.numpy().tobytes())


def test_gradients_do_not_stand_in_the_way():
    tensor = torch.randn(5)
    expected = _native.crc32c(tensor)
    assert _native.crc32c(torch.nn.Parameter(tensor.clone())) == expected
    assert _native.crc32c(tensor.clone().requires_grad_() * 1) == expected


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).astype(dtype)
        for dtype in ("bool", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
    ],
    ids=lambda array: str(array.dtype),
)
def test_numpy_arrays_and_buffers_are_lent(array):
    expected = reference_crc(array.tobytes())
    assert _native.crc32c(array) == expected
    assert _native.crc32c(memoryview(array)) == expected
    assert _native.crc32c(array.tobytes()) == expected
    array.flags.writeable = False
    assert _native.crc32c(array) == expected


class Wrapper(torch.Tensor):
    """Tensor without storage, like `ShardedTensor`."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def fake():
    with FakeTensorMode():
        return torch.empty(3)


REFUSED = {
    "lazy negative": (lambda: torch._neg_view(torch.ones(3)), "resolve_neg"),
    "lazy imaginary": (lambda: torch.ones(3, dtype=torch.cfloat).conj().imag, "resolve_neg"),
    "complex": (lambda: torch.ones(3, dtype=torch.cfloat), "complex64; possible are bool, uint8"),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), "float8_e4m3fn; possible are"),
    "fake": (fake, "storage"),
    "wrapper": (Wrapper, r"Wrapper.*no storage"),
    "meta": (lambda: torch.empty(3, device="meta"), "no memory|meta; possible are cpu and cuda"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "no memory"),
    "strided": (lambda: torch.ones(3, 4).t(), r"\(4, 3\).*strides \(1, 4\).*contiguous"),
    "nine dims": (lambda: torch.ones([1] * 9), "9 dims, at most 8"),
    "big endian": (lambda: np.ones(3, ">f4"), "'>f'"),
    "record": (lambda: np.ones(3, [("a", "f4"), ("b", "i4")]), "possible are bool"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_memory_to_lend_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        _native.crc32c(make())


def test_mkldnn_layout_is_refused():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    with pytest.raises(ValueError, match="no memory that can be lent"):
        _native.crc32c(torch.randn(1, 2, 3, 3).to_mkldnn())


def test_functorch_wrappers_are_refused():
    with pytest.raises(ValueError, match="no memory that can be lent"):
        torch.func.vmap(lambda row: row + _native.crc32c(row))(torch.ones(2, 3))


@pytest.mark.parametrize("thing", [[1, 2], None, 3.0])
def test_what_is_no_tensor_is_a_type_error(thing):
    with pytest.raises(TypeError, match=f"data is a {type(thing).__name__}; possible are"):
        _native.crc32c(thing)


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("0", False), ("1", True)])
def test_the_environment_chooses_the_way_in(value, expected):
    env = {k: v for k, v in os.environ.items() if k != "PYDIST_EXCHANGE_TABLE"}
    if value is not None:
        env["PYDIST_EXCHANGE_TABLE"] = value
    code = "from pydist import _native; print(_native.use_exchange_table(True))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,  # not the checkout, whose sources hide the package
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(expected)
