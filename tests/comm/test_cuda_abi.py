"""Tests of pydist's declarations of the CUDA driver against cuda.h, if available."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROBE = """
#include <cuda.h>
#include <string_view>
#include <type_traits>
#include "comm/driver/cuda_driver.hpp"
#include "comm/ipc/driver.hpp"

namespace p = pydist::comm;

// Our types in the place of theirs: handles are void*, statuses and enumerators int.
template <class T> struct Ours { using type = T; };
template <> struct Ours<CUresult> { using type = int; };
template <> struct Ours<CUdeviceptr> { using type = p::IpcCalls::Address; };
template <> struct Ours<CUdeviceptr*> { using type = p::IpcCalls::Address*; };
template <> struct Ours<CUdevice_attribute> { using type = int; };
template <> struct Ours<CUstreamCaptureStatus*> { using type = int*; };
template <> struct Ours<CUcontext> { using type = void*; };
template <> struct Ours<CUcontext*> { using type = void**; };
template <> struct Ours<CUstream> { using type = void*; };
template <> struct Ours<CUstream*> { using type = void**; };
template <> struct Ours<CUevent> { using type = void*; };
template <> struct Ours<CUevent*> { using type = void**; };
template <> struct Ours<CUipcMemHandle> { using type = p::IpcHandle; };
template <> struct Ours<CUipcMemHandle*> { using type = p::IpcHandle*; };
template <class R, class... A> struct Ours<R(A...)> {
  using type = typename Ours<R>::type(typename Ours<A>::type...);
};

// The macros of cuda.h give the version of a function that the symbol must name.
#define TEXT(name) #name
#define EXPANDED(name) TEXT(name)
#define FUNCTION(member, name, symbol) \\
  static_assert(std::is_same_v<decltype(p::member), Ours<decltype(name)>::type*>); \\
  static_assert(std::string_view(EXPANDED(name)) == symbol);
FUNCTION(CudaDriver::device_get, cuDeviceGet, "cuDeviceGet")
FUNCTION(CudaDriver::primary_retain, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")
FUNCTION(CudaDriver::primary_release, cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2")
FUNCTION(CudaDriver::context_push, cuCtxPushCurrent, "cuCtxPushCurrent_v2")
FUNCTION(CudaDriver::context_pop, cuCtxPopCurrent, "cuCtxPopCurrent_v2")
FUNCTION(CudaDriver::priority_range, cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange")
FUNCTION(CudaDriver::stream_create, cuStreamCreateWithPriority, "cuStreamCreateWithPriority")
FUNCTION(CudaDriver::stream_wait, cuStreamWaitEvent, "cuStreamWaitEvent")
FUNCTION(CudaDriver::stream_capturing, cuStreamIsCapturing, "cuStreamIsCapturing")
FUNCTION(CudaDriver::event_create, cuEventCreate, "cuEventCreate")
FUNCTION(CudaDriver::event_record, cuEventRecord, "cuEventRecord")
FUNCTION(CudaDriver::event_query, cuEventQuery, "cuEventQuery")
FUNCTION(CudaDriver::event_destroy, cuEventDestroy, "cuEventDestroy_v2")
FUNCTION(IpcCalls::allocate, cuMemAlloc, "cuMemAlloc_v2")
FUNCTION(IpcCalls::release, cuMemFree, "cuMemFree_v2")
FUNCTION(IpcCalls::fill, cuMemsetD32Async, "cuMemsetD32Async")
FUNCTION(IpcCalls::synchronize, cuStreamSynchronize, "cuStreamSynchronize")
FUNCTION(IpcCalls::export_block, cuIpcGetMemHandle, "cuIpcGetMemHandle")
FUNCTION(IpcCalls::map, cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2")
FUNCTION(IpcCalls::unmap, cuIpcCloseMemHandle, "cuIpcCloseMemHandle")
FUNCTION(IpcCalls::copy, cuMemcpyAsync, "cuMemcpyAsync")
FUNCTION(IpcCalls::set, cuStreamWriteValue32, "cuStreamWriteValue32_v2")
FUNCTION(IpcCalls::await, cuStreamWaitValue32, "cuStreamWaitValue32_v2")
FUNCTION(IpcCalls::attribute, cuDeviceGetAttribute, "cuDeviceGetAttribute")
static_assert(sizeof(p::IpcHandle) == sizeof(CUipcMemHandle));
static_assert(alignof(p::IpcHandle) == alignof(CUipcMemHandle));
static_assert(std::is_trivially_copyable_v<p::IpcHandle>);
static_assert(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == 1 && CU_STREAM_WAIT_VALUE_EQ == 1);
static_assert(CU_STREAM_WAIT_VALUE_FLUSH == 1 << 30 && CU_STREAM_WRITE_VALUE_DEFAULT == 0);
static_assert(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES == 98);
"""


def header() -> Path:
    compiler = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    toolkits = [Path(compiler).resolve().parents[1]] if compiler is not None else []
    for toolkit in (*toolkits, Path("/usr/local/cuda"), Path("/opt/cuda")):
        for folder in (toolkit / "include", *toolkit.glob("targets/*/include")):
            if (folder / "cuda.h").exists():
                return folder
    pytest.skip("no cuda.h here (the CUDA toolkit has one)")


def test_declarations_are_those_of_cuda_h(tmp_path: Path) -> None:
    folder = header()
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "probe.cpp").write_text(PROBE)
    paths = [f"-I{ROOT / 'csrc'}", f"-isystem{folder}"]
    command = [compiler, "-std=c++20", "-fsyntax-only", *paths, str(tmp_path / "probe.cpp")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
