"""Simulated CUDA device for every Python process of a command.

    tools/simulate pytest tests/gpu
    tools/simulate pydist train …

Before a process imports torch, it gets a device "cuda" with memory on the host (torch_device.cpp).
Then torch_cuda.py replaces `torch.cuda`. A recorder (tests/native/driver_recorder.cpp) replaces
CUDA's driver and NCCL. In pydist's native module (preset `emulated`), the host code of the CUDA
kernels runs them by emulation.

The simulation shows that the Python and C++ code around the kernels runs, on which stream and in
which order, and gives the numbers of the CPU; that memory is written before it is read, and not
read after it is freed; that a captured step contains nothing that a graph can't hold. It does not
show that nvcc, cuDNN, NCCL and a device execute the code correctly, or fast.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

VARIABLE = "PYDIST_SIMULATED"
"""The folder with the output of `tools/simulate`; if it is not set, nothing is simulated."""

_DEVICE = "simulated_torch_device"


def prepare() -> None:
    """Makes the device when torch is imported, if the variable is set."""
    built = os.environ.get(VARIABLE)
    if built:
        os.environ["PYDIST_EXCHANGE_TABLE"] = "0"  # torch's table would ask CUDA for its streams
        sys.meta_path.insert(0, _Finder(Path(built)))


class _Finder:
    """Finder that replaces torch and pydist's native module."""

    def __init__(self, built: Path) -> None:
        self._built = built

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pydist._native":
            # The module's emulated launches look up the device's calls when it is loaded.
            importlib.import_module("torch")
            return _spec(name, _file(self._built, "_native*.so"))
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                # torch looks for its CUDA half while it is loaded.
                for file in (f"{_DEVICE}*.so", "libcuda.so.1", "libnccl.so.2"):
                    ctypes.CDLL(str(_file(self._built, file)), mode=ctypes.RTLD_GLOBAL)
                load(module)
                _replace(self._built)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _file(built: Path, pattern: str) -> Path:
    """Returns a file that `tools/simulate` has built."""
    found = sorted(built.glob(pattern))
    if not found:
        raise ImportError(f"no {pattern} in {built} ({VARIABLE}): tools/simulate makes it")
    return found[0]


def _spec(name: str, path: Path) -> ModuleSpec:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    return spec


def _replace(built: Path) -> None:
    """Replaces `torch.cuda`, which has just been imported."""
    spec = _spec(_DEVICE, _file(built, f"{_DEVICE}*.so"))
    device = sys.modules[_DEVICE] = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(device)
    driver = ctypes.CDLL(str(_file(built, "libcuda.so.1")))
    calls = (driver.recorder_put, driver.recorder_capture_ends)
    device.use_recorder(*(ctypes.cast(call, ctypes.c_void_p).value for call in calls))
    importlib.import_module("torch_cuda").install()
