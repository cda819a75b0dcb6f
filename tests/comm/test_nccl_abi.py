"""Tests of the NCCL library without a GPU, and of pydist's declarations against nccl.h."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pydist import _native as native
from pydist.comm.transports.nccl import device_assignment as nccl_place
from pydist.errors import NotSupported, PydistError

ROOT = Path(__file__).parents[2]

# The declarations of CUDA that nccl.h needs.
CUDA_STUB = """
#pragma once
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
"""

PROBE = """
#include <cstddef>
#include <nccl.h>
#include <type_traits>
#include "comm/nccl/abi.hpp"
#include "comm/nccl/library.hpp"

namespace p = pydist::comm;

#define SAME(mine, theirs) static_assert(static_cast<int>(p::mine) == static_cast<int>(theirs))
SAME(NcclResult::kSuccess, ncclSuccess);
SAME(NcclResult::kUnhandledCudaError, ncclUnhandledCudaError);
SAME(NcclResult::kSystemError, ncclSystemError);
SAME(NcclResult::kInternalError, ncclInternalError);
SAME(NcclResult::kInvalidArgument, ncclInvalidArgument);
SAME(NcclResult::kInvalidUsage, ncclInvalidUsage);
SAME(NcclResult::kRemoteError, ncclRemoteError);
SAME(NcclResult::kInProgress, ncclInProgress);
SAME(NcclType::kInt8, ncclInt8);
SAME(NcclType::kUint8, ncclUint8);
SAME(NcclType::kInt32, ncclInt32);
SAME(NcclType::kInt64, ncclInt64);
SAME(NcclType::kFloat16, ncclFloat16);
SAME(NcclType::kFloat32, ncclFloat32);
SAME(NcclType::kFloat64, ncclFloat64);
SAME(NcclType::kBfloat16, ncclBfloat16);
SAME(NcclOp::kSum, ncclSum);
SAME(NcclOp::kMax, ncclMax);
SAME(NcclOp::kMin, ncclMin);
static_assert(p::nccl_version(2, 14, 3) == NCCL_VERSION(2, 14, 3));

static_assert(sizeof(p::NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(alignof(p::NcclUniqueId) == alignof(ncclUniqueId));

// The members that 2.14 had lie where they lay, so that its layout is a beginning of this one.
static_assert(offsetof(p::NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(p::NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(p::NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(p::NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(p::NcclConfig) <= sizeof(ncclConfig_t));
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(p::NcclConfig{}.magic == theirs.magic);

// The functions: our types in the place of theirs.
template <class T> struct Ours { using type = T; };
template <> struct Ours<ncclResult_t> { using type = p::NcclResult; };
template <> struct Ours<ncclDataType_t> { using type = p::NcclType; };
template <> struct Ours<ncclRedOp_t> { using type = p::NcclOp; };
template <> struct Ours<ncclUniqueId> { using type = p::NcclUniqueId; };
template <> struct Ours<ncclUniqueId*> { using type = p::NcclUniqueId*; };
template <> struct Ours<ncclComm_t> { using type = p::NcclComm*; };
template <> struct Ours<ncclComm_t*> { using type = p::NcclComm**; };
template <> struct Ours<ncclConfig_t*> { using type = p::NcclConfig*; };
template <> struct Ours<ncclResult_t*> { using type = p::NcclResult*; };
template <> struct Ours<cudaStream_t> { using type = void*; };
template <class R, class... A> struct Ours<R(A...)> {
  using type = typename Ours<R>::type(typename Ours<A>::type...);
};
#define FUNCTION(member, name) \\
  static_assert(std::is_same_v<decltype(p::NcclLibrary::member), Ours<decltype(name)>::type*>)
FUNCTION(get_version, ncclGetVersion);
FUNCTION(get_unique_id, ncclGetUniqueId);
FUNCTION(get_error_string, ncclGetErrorString);
FUNCTION(get_last_error, ncclGetLastError);
FUNCTION(comm_init_rank_config, ncclCommInitRankConfig);
FUNCTION(comm_get_async_error, ncclCommGetAsyncError);
FUNCTION(comm_finalize, ncclCommFinalize);
FUNCTION(comm_destroy, ncclCommDestroy);
FUNCTION(comm_abort, ncclCommAbort);
FUNCTION(group_start, ncclGroupStart);
FUNCTION(group_end, ncclGroupEnd);
FUNCTION(send, ncclSend);
FUNCTION(recv, ncclRecv);
FUNCTION(broadcast, ncclBroadcast);
FUNCTION(reduce, ncclReduce);
FUNCTION(all_reduce, ncclAllReduce);
FUNCTION(all_gather, ncclAllGather);
FUNCTION(reduce_scatter, ncclReduceScatter);
"""


def header() -> Path:
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    wheels = [Path(place) / "nccl" / "include" for place in places or ()]
    for folder in (*wheels, Path("/usr/include"), Path("/usr/local/cuda/include")):
        if (folder / "nccl.h").exists():
            return folder
    pytest.skip("no nccl.h here (the wheels nvidia-nccl-cu12 and -cu13 have one)")


def test_declarations_are_those_of_nccl_h(tmp_path: Path) -> None:
    folder = header()
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "cuda_runtime.h").write_text(CUDA_STUB)
    (tmp_path / "cuda_fp16.h").write_text("")
    (tmp_path / "probe.cpp").write_text(PROBE)
    # The stub comes first: CUDA's own headers may be absent, or of another version.
    paths = [f"-I{tmp_path}", f"-I{ROOT / 'csrc'}", f"-isystem{folder}"]
    command = [compiler, "-std=c++20", "-fsyntax-only", *paths, str(tmp_path / "probe.cpp")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_the_library_opens_and_makes_ids_without_a_gpu() -> None:
    try:
        library = nccl_place.open_nccl()
    except NotSupported as error:
        pytest.skip(f"no NCCL here: {error}")
    assert library.version >= 21400
    assert Path(library.path).name.startswith("libnccl.so")
    try:
        ids = {library.unique_id() for _ in range(2)}
    except RuntimeError as error:
        pytest.skip(f"NCCL finds no network here: {error}")
    assert len(ids) == 2
    assert {len(each) for each in ids} == {128}
    # A second request returns the loaded copy.
    assert native.NcclLibrary([]).path == library.path


def test_what_is_missing_is_named() -> None:
    with pytest.raises(NotSupported, match=r"^NCCL can't be opened: /nowhere/libnccl\.so\.2: "):
        native.NcclLibrary(["/nowhere/libnccl.so.2"], use_loaded=False)
    with pytest.raises(NotSupported, match="NCCL can't be opened: no path given"):
        native.NcclLibrary([], use_loaded=False)
    with pytest.raises(PydistError, match=r"the CUDA driver can't be opened: /nowhere/libcuda"):
        native.CudaDriver("/nowhere/libcuda.so.1")


@pytest.mark.skipif(sys.platform != "linux", reason="a library that every Linux has")
def test_a_library_that_is_another_one_is_named() -> None:
    with pytest.raises(NotSupported, match=r"NCCL \(libm\.so\.6\) has no function ncclGetVersion"):
        native.NcclLibrary(["libm.so.6"], use_loaded=False)
