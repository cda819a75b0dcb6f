"""Replaces NCCL and the CUDA driver by a recorder (tests/native/driver_recorder.cpp).

It shows which operations pydist puts on streams, their order, and that the results are right if
NCCL and CUDA keep their guarantees. It does not test these themselves: tests/gpu does.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from pydist import _native as native
from pydist.comm import LocalTransport, Transport, run_local
from pydist.comm.transports.ipc.channel import IpcLinks
from pydist.comm.transports.ipc.peer_memory import PeerMemory, find_peers
from pydist.comm.transports.ipc.transport import IpcTransport
from pydist.comm.transports.nccl.device import DeviceTransport
from pydist.comm.transports.nccl.device_assignment import DeviceAssignment
from pydist.comm.transports.nccl.transport import NcclTransport
from support import ROOT

CPU = torch.device("cpu")


def build(folder: Path) -> Path:
    """Compiles the recorder."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler for the recorder")
    library = folder / "librecorder.so"
    native_tests = ROOT / "tests" / "native"
    sources = [str(native_tests / f"{name}_recorder.cpp") for name in ("driver", "nccl")]
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, *sources, "-o", str(library)], check=True, timeout=100)
    return library


class Recorder:
    """Library that records calls of NCCL and the CUDA driver, with its settings."""

    def __init__(self, library: Path) -> None:
        self.path = str(library)
        self._calls = ctypes.CDLL(self.path)
        self._calls.recorder_notes.restype = ctypes.c_char_p
        self._calls.recorder_abort_takes.argtypes = [ctypes.c_long]
        self.driver = native.CudaDriver(self.path)

    def nccl(self) -> native.NcclLibrary:
        return native.NcclLibrary([self.path], use_loaded=False)

    def notes(self) -> list[str]:
        """Returns the calls since the last time."""
        notes: bytes = self._calls.recorder_notes()
        return notes.decode().splitlines()

    def delay(self, microseconds: int) -> None:
        """Delays all operations on streams."""
        self._calls.recorder_delay(microseconds)

    def version(self, number: int) -> None:
        self._calls.recorder_version(number)

    def capture(self, status: bool) -> None:
        """Makes all streams report a graph capture."""
        self._calls.recorder_capture(int(status))

    def abort_takes(self, seconds: float) -> None:
        """Makes an abort return late."""
        self._calls.recorder_abort_takes(int(seconds * 1e6))

    def hold_graphs(self, held: bool) -> None:
        """Makes NCCL wait at the end of a group, as for graphs that hold operations of it."""
        self._calls.recorder_hold_graphs(int(held))

    def fail_next_copy(self, status: int) -> None:
        self._calls.recorder_fail_next_copy(status)

    def fail_next_map(self, status: int) -> None:
        self._calls.recorder_fail_next_map(status)

    def blocks(self) -> int:
        """Returns the number of allocations of this process."""
        return self._calls.recorder_blocks()

    def fail_next_send(self, result: int, why: str) -> None:
        self._calls.recorder_fail_next_send(result, why.encode())

    def group(
        self, unique: bytes, rank: int, size: int, seconds: float = 20.0
    ) -> native.NcclCommunicator:
        return native.NcclCommunicator(
            self.nccl(), self.driver, unique, rank, size, 0, seconds, seconds
        )


def shared_memory() -> int:
    """Counts open files and mappings of this process through which a recorder reaches others."""
    places = Path("/proc/self/maps").read_text().splitlines()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this listing
            places.append(str(path.readlink()))
    return sum("memfd:recorder" in place for place in places)


class OnHostMemory(DeviceTransport):
    """Transport whose stream 0 is the calling thread itself."""

    def queue(self) -> int:
        return 0


class RecordedTransport(NcclTransport):
    """Transport that sends tensors of host memory as if they were on a device."""

    recorder: Recorder

    @classmethod
    def of(cls, recorder: Recorder, host: Transport) -> RecordedTransport:
        cls.recorder = recorder
        return cls(host, DeviceAssignment(recorder.nccl(), recorder.driver, CPU))

    def _connect(self) -> DeviceTransport:
        unique = self._place.library.unique_id() if self.rank == 0 else None
        group = self.recorder.group(self.host.broadcast_bytes(unique), self.rank, self.size)
        made = OnHostMemory(group, self.host, CPU)
        self._place.groups.append(made)
        return made

    def _of(self, tensors: Sequence[Tensor]) -> Transport:
        return self._on_device

    def _subgroup(self, members: Sequence[int]) -> RecordedTransport:
        return RecordedTransport(self.host._subgroup(members), self._place, owns_host=True)


BLOCK_BYTES = 1 << 16
"""Small, as some messages of the contract are longer."""


class LinksOnHostMemory(IpcLinks):
    """Links whose stream 0 is the calling thread itself."""

    def queue(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False


_offers: dict[object, Queue[Tensor]] = {}


class ThreadOffers:
    """Carries offers between threads, whose hub accepts one call of a rank at a time."""

    def __init__(self, host: LocalTransport) -> None:
        self.rank, self.size, self.close = host.rank, host.size, host.close
        self._group = (host._hub, host._group)

    def _box(self, source: int, dest: int, tag: int) -> Queue[Tensor]:
        return _offers.setdefault((self._group, source, dest, tag), Queue())

    def send(self, tensor: Tensor, dest: int, tag: int) -> None:
        self._box(self.rank, dest, tag).put(tensor.clone())

    def recv(self, tensor: Tensor, source: int, tag: int) -> None:
        tensor.copy_(self._box(source, self.rank, tag).get())


class RecordedIpc(IpcTransport):
    """Transport whose channels of host memory work like those of a device."""

    seconds = 20.0

    @classmethod
    def among_threads(
        cls, recorder: Recorder, base: Transport, far: frozenset[int] = frozenset()
    ) -> RecordedIpc:
        """Connects ranks of one process, whose memory CUDA itself would not map."""
        near = frozenset(range(base.size)) - {base.rank}
        if base.rank in far:
            near = frozenset()
        place = PeerMemory(native.IpcMemory(recorder.driver, 0, BLOCK_BYTES), near - far)
        return cls(base, place, sorted(place.near), world=True)

    @classmethod
    def among_processes(cls, recorder: Recorder, base: Transport) -> RecordedIpc:
        """Connects ranks that find each other as they would with devices."""
        place = find_peers(base, recorder.driver, 0, BLOCK_BYTES)
        return cls(base, place, sorted(place.near), world=True)

    def _on_device(self, tensors: Sequence[Tensor]) -> bool:
        return True

    def _link(self, offers: Transport) -> IpcLinks:
        group = native.IpcGroup(self._place.memory, self.rank, self.size)
        carrier: Any = ThreadOffers(offers) if isinstance(offers, LocalTransport) else offers
        return LinksOnHostMemory(group, carrier, CPU, self.seconds)


def run_ipc(
    recorder: Recorder,
    function: Callable[[RecordedIpc], Any],
    size: int,
    far: frozenset[int] = frozenset(),
) -> list[Any]:
    """Runs a function on ranks that are threads; some may be out of reach."""

    def body(host: Transport) -> Any:
        transport = RecordedIpc.among_threads(recorder, host, far)
        result = function(transport)
        transport.close()
        transport.close()
        return result

    before = recorder.blocks()
    results = run_local(body, size)
    assert recorder.blocks() == before
    assert not [line for line in recorder.notes() if "mismatch" in line]
    return results
