"""Converts other libraries' arrays to tensors, without a copy where possible."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pydist.errors import UsageError, one_line

ArrayLike: TypeAlias = Any
"""A tensor, or an object with `__dlpack__`, `__cuda_array_interface__` or `__array_interface__`:
arrays of NumPy, CuPy, JAX and others."""


_NO_NUMBERS = "OSUTMm"
"""NumPy's kinds of objects, texts and dates."""


def is_array(x: object) -> bool:
    """Returns whether an object is a tensor or an array of numbers."""
    if isinstance(x, (np.ndarray, np.generic)) and (
        x.dtype.kind in _NO_NUMBERS or x.dtype.names is not None
    ):
        return False
    return isinstance(x, Tensor) or any(
        hasattr(x, name)
        for name in ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
    )


def as_tensor(x: ArrayLike) -> Tensor:
    """Returns the array as a tensor on its device, sharing its memory if that is writable.

    The current CUDA stream waits for the work that the array's owner has queued.

    Raises:
        UsageError: `x` is not an array, or has a type that torch does not support.
    """
    if isinstance(x, Tensor):
        return x
    try:
        if isinstance(x, np.ndarray):
            return _of_numpy(x)
        if hasattr(x, "__dlpack__"):
            return from_dlpack(x)  # passes the stream to the owner
        if hasattr(x, "__cuda_array_interface__"):
            return _of_cuda_interface(x)
        if hasattr(x, "__array_interface__"):
            return _of_numpy(np.asarray(x))
    # torch without CUDA raises an AssertionError.
    except (TypeError, ValueError, BufferError, RuntimeError, AssertionError) as error:
        reason = one_line(error)
        raise UsageError(f"an array of {type(x).__name__} can't be a tensor: {reason}") from error
    raise UsageError(
        f"{type(x).__name__} is no array; possible are tensors and objects with __dlpack__, "
        "__cuda_array_interface__ or __array_interface__ (NumPy, CuPy, JAX)"
    )


def _of_numpy(x: np.ndarray[Any, Any]) -> Tensor:
    """Converts a NumPy array; copies it unless native, writable and without negative strides."""
    plain = x.dtype.isnative and x.flags.writeable and all(step >= 0 for step in x.strides)
    return torch.from_numpy(x if plain else np.array(x, dtype=x.dtype.newbyteorder("="), order="C"))


def _of_cuda_interface(x: Any) -> Tensor:
    interface = x.__cuda_array_interface__
    device = _device_of(interface)
    stream = interface.get("stream")
    if stream:  # version 3: where the owner's work is queued
        with torch.cuda.device(device):
            # 1 is the default stream in the protocol, and no handle that torch accepts.
            owner = (
                torch.cuda.ExternalStream(stream) if stream != 1 else torch.cuda.default_stream()
            )
            torch.cuda.current_stream().wait_stream(owner)
    return torch.as_tensor(x, device=device)


class _FirstByte:
    """Array that consists of another array's first byte."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = {
            "shape": (1,),
            "typestr": "|u1",
            "data": interface["data"],
            "version": interface["version"],
        }


def _device_of(interface: dict[str, Any]) -> torch.device:
    """Returns the device of an array, on which torch shares its memory instead of copying it."""
    here = torch.cuda.current_device()
    if 0 not in interface["shape"]:
        for index in sorted(range(torch.cuda.device_count()), key=lambda i: i != here):
            device = torch.device("cuda", index)
            byte = torch.as_tensor(_FirstByte(interface), device=device)
            if byte.data_ptr() == interface["data"][0]:
                return device
    return torch.device("cuda", here)
