"""NCCL's place taken by a recorder (tests/native/nccl_recorder.cpp), on host memory.

It shows what pydist puts on streams, in which order, and that this carries the right numbers if
NCCL and CUDA do what they promise. It says nothing about NCCL itself: that is for tests/gpu.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from pydist import _native as native
from pydist.comm import LocalTransport, Transport
from pydist.comm.nccl import NcclTransport
from pydist.comm.nccl_device import DeviceTransport
from pydist.comm.nccl_place import Place

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def build(folder: Path) -> Path:
    """Compile the recorder."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the recorder")
    library = folder / "librecorder.so"
    source = ROOT / "tests" / "native" / "nccl_recorder.cpp"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=100)
    return library


class Recorder:
    """The recorder's library, and what it can be told."""

    def __init__(self, library: Path) -> None:
        self.path = str(library)
        self._calls = ctypes.CDLL(self.path)
        self._calls.recorder_notes.restype = ctypes.c_char_p
        self._calls.recorder_abort_takes.argtypes = [ctypes.c_long]
        self.driver = native.CudaDriver(self.path)

    def nccl(self) -> native.NcclLibrary:
        return native.NcclLibrary([self.path], use_loaded=False)

    def notes(self) -> list[str]:
        """The calls since the last time."""
        return self._calls.recorder_notes().decode().splitlines()

    def delay(self, microseconds: int) -> None:
        """Makes everything on a stream begin later."""
        self._calls.recorder_delay(microseconds)

    def version(self, number: int) -> None:
        self._calls.recorder_version(number)

    def capture(self, status: bool) -> None:
        """Makes all streams say that a graph is captured on them."""
        self._calls.recorder_capture(int(status))

    def abort_takes(self, seconds: float) -> None:
        """Makes an abort return late."""
        self._calls.recorder_abort_takes(int(seconds * 1e6))

    def fail_next_send(self, result: int, why: str) -> None:
        self._calls.recorder_fail_next_send(result, why.encode())

    def group(self, unique: bytes, rank: int, size: int, seconds: float = 20.0):
        return native.NcclCommunicator(
            self.nccl(), self.driver, unique, rank, size, 0, seconds, seconds
        )


class OnHostMemory(DeviceTransport):
    """Its stream 0 is the calling thread itself."""

    def queue(self) -> int:
        return 0


class RecordedTransport(NcclTransport):
    """Sends the tensors of host memory where those of a device would go."""

    recorder: Recorder

    @classmethod
    def of(cls, recorder: Recorder, host: LocalTransport) -> RecordedTransport:
        cls.recorder = recorder
        return cls(host, Place(recorder.nccl(), recorder.driver, CPU))

    def _connect(self) -> DeviceTransport:
        unique = self._place.library.unique_id() if self.rank == 0 else None
        group = self.recorder.group(self.host.broadcast_bytes(unique), self.rank, self.size)
        made = OnHostMemory(group, self.host, CPU)
        self._place.groups.append(made)
        return made

    def _of(self, tensors) -> Transport:
        return self._on_device

    def _subgroup(self, members) -> RecordedTransport:
        return RecordedTransport(self.host._subgroup(members), self._place, owns_host=True)
