"""`torch.cuda` of the simulated device: the calls that pydist and its tests use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import simulated_torch_device as simulated
import torch
from torch import Tensor, UntypedStorage
from torch_streams import (
    DEFAULT,
    CUDAGraph,
    Event,
    ExternalStream,
    Stream,
    capture,
    not_captured,
    on_stream,
)

NAME = "simulated"
_PROPERTIES = SimpleNamespace(
    name=NAME, uuid=NAME, major=9, minor=0, total_memory=1 << 34, multi_processor_count=1
)
_resize_on_host = UntypedStorage.resize_


def install() -> None:
    """Replaces the parts of `torch.cuda`."""
    cuda: Any = torch.cuda
    for name, part in {
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": capture,
        "stream": on_stream,
        "device": _device,
        "current_stream": lambda device=None: Stream.current(),
        "default_stream": lambda device=None: DEFAULT,
        "set_stream": lambda stream: simulated.exchange_stream(stream.stream_id),
        "is_current_stream_capturing": simulated.capturing,
        "synchronize": not_captured("synchronize"),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": _nothing(),
        "init": _nothing(),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _set_device,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "empty_cache": _nothing(),
        "_sleep": _nothing(),
        "manual_seed_all": _nothing(),
        "memory_allocated": lambda device=None: simulated.allocated(),
        "max_memory_allocated": lambda device=None: simulated.peak(),
        "reset_peak_memory_stats": lambda device=None: simulated.reset_peak(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }.items():
        setattr(cuda, name, part)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()
    cuda.amp.common.amp_definitely_not_available = lambda: False
    methods: Any = Tensor
    methods.record_stream = _record_stream
    storages: Any = UntypedStorage
    storages.clone, storages.resize_ = _clone, _resize


def _nothing() -> Callable[..., None]:
    """Returns a new call that does nothing: torch keeps rules by function."""
    return lambda *args, **kwargs: None


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    _set_device(device)
    yield


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    if index not in (None, -1, 0):
        raise RuntimeError("CUDA error: invalid device ordinal")


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    simulated.record_stream(tensor, stream.cuda_stream)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone(storage: UntypedStorage) -> UntypedStorage:
    return _bytes(storage).clone().untyped_storage()


def _resize(storage: UntypedStorage, size: int) -> UntypedStorage:
    if storage.device.type != "cuda":
        return _resize_on_host(storage, size)
    simulated.resize_storage(_bytes(storage), size)
    return storage
