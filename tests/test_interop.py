"""Tests of arrays from other libraries in the place of tensors."""

from __future__ import annotations

import copy
from typing import ClassVar

import numpy as np
import pytest
import torch

import pydist
from pydist.comm import LocalTransport, run_local
from pydist.errors import UsageError
from pydist.interop import as_tensor, is_array
from pydist.layout import layout_for_sample


class Exported:
    """Array that offers only DLPack."""

    def __init__(self, values):
        self._values = values

    def __dlpack__(self, **options):
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


class Described:
    """Array that offers only NumPy's array interface."""

    def __init__(self, values):
        self._values = values  # keeps the memory alive
        self.__array_interface__ = values.__array_interface__


@pytest.mark.parametrize("kind", [lambda a: a, Exported, Described])
@pytest.mark.parametrize("dtype", ["int16", "float32", "float64"])
def test_memory_is_shared(kind, dtype):
    values = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    array = kind(values)
    assert is_array(array)
    tensor = as_tensor(array)
    assert tensor.data_ptr() == values.ctypes.data
    values[1, 2, 3] = -5
    np.testing.assert_array_equal(tensor, values)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(6.0)[::-1],
        np.arange(6.0).astype(">f8"),
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.frombuffer(b"abcdef", dtype=np.uint8),
    ],
)
def test_what_torch_can_not_share_is_copied(values):
    tensor = as_tensor(values)
    np.testing.assert_array_equal(tensor, values)
    tensor.zero_()  # the copy is writable


def test_tensors_are_themselves():
    x = torch.ones(2)
    assert as_tensor(x) is x


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0, 2.0], "list is no array; possible are tensors and objects with __dlpack__"),
        (np.array(["a"]), "an array of ndarray can't be a tensor"),
    ],
)
def test_anything_else_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        as_tensor(given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_array_on_a_device_where_there_is_none_is_refused():
    class OnDevice:
        __cuda_array_interface__: ClassVar = {
            "shape": (2,), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3,
        }  # fmt: skip

    with pytest.raises(UsageError, match=r"OnDevice can't be a tensor: .*(CUDA|NVIDIA)"):
        as_tensor(OnDevice())


@pytest.mark.parametrize("kind", [torch.from_numpy, lambda a: a, Exported])
def test_sharded_tensors_and_networks_take_any_array(kind):
    values = np.random.default_rng(0).standard_normal((1, 2, 4, 6, 5)).astype(np.float32)

    def job(world):
        mesh = pydist.Mesh(world, 1, (2, 1, 1))
        x = pydist.distribute_tensor(kind(values), mesh)
        np.testing.assert_array_equal(x.full_tensor(), values)
        layout = layout_for_sample(mesh, values.shape)
        block = np.ascontiguousarray(values[:, :, layout.box.lo[2] : layout.box.hi[2]])
        again = pydist.ShardedTensor.from_local(kind(block), layout)
        assert torch.equal(again.to_local(), x.to_local())
        found = pydist.parallelize(copy.deepcopy(network), mesh)(kind(values)).full_tensor()
        torch.testing.assert_close(found, expected)

    network = torch.nn.Conv3d(2, 3, 3, padding=1)
    expected = network(torch.from_numpy(values))
    run_local(job, 2)


def test_a_shard_of_the_wrong_shape_is_still_refused():
    mesh = pydist.Mesh(LocalTransport())
    with pytest.raises(UsageError, match=r"a shard of shape \(3,\)"):
        pydist.ShardedTensor.from_local(np.ones(3), layout_for_sample(mesh, (1, 1, 2, 2, 2)))
