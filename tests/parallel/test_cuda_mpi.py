"""CUDA-aware MPI: the question to real MPI libraries, and the data path on host memory.

No MPI here takes device memory; what is tested is that this one says so, and that each call with
tensors waits for the caller's stream before MPI gets their addresses.
"""

from __future__ import annotations

import pytest
import torch
from transport_contract import CHECKS, Check, equal

pytest.importorskip("mpi4py")
from mpi4py import MPI

from pydist.comm import Transport, cuda_aware
from pydist.comm.cuda_mpi import CudaMpiTransport
from pydist.errors import NotSupported
from pydist.runtime import connect

pytestmark = pytest.mark.ranks(2, mpi=("openmpi", "mpich"))


class OnHostMemory(CudaMpiTransport):
    """Takes host memory for that of a device, whose stream comes to its work when it must.

    Attributes:
        late: what was put on the stream and is not done.
    """

    def __init__(self, device=None, comm=None, engine=None) -> None:
        super().__init__(device or torch.device("cpu"), comm, engine)
        self.late: list = []

    def _on_device(self, tensor) -> bool:
        return True

    def _wait_for_stream(self) -> None:
        for work in self.late:
            work()
        self.late.clear()


@pytest.fixture(scope="module")
def transport(world: Transport):
    made = OnHostMemory()
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_host_memory(check: Check, transport: OnHostMemory) -> None:
    check(transport)


def test_every_call_waits_for_the_stream(transport: OnHostMemory) -> None:
    t, peer = transport, 1 - transport.rank

    def late(count: int = 4) -> torch.Tensor:
        """Gets its values when the stream comes to it: 1 on rank 0, 2 on rank 1."""
        tensor = torch.full((count,), -7.0)
        t.late.append(lambda: tensor.fill_(1.0 + t.rank))
        return tensor

    mine, theirs, both = torch.full((4,), 1.0 + t.rank), torch.full((4,), 1.0 + peer), [1.0, 2.0]
    channel = t.channel([(peer, late())], [(peer, received := late())], 3)
    for _ in range(2):
        channel.start()
        assert not t.late
        channel.wait()
        equal(received, theirs)
        t.late.append(lambda: received.fill_(9.0))  # read late, before the next message
    out = late()
    t.send(mine, peer)
    t.recv(out, peer)
    equal(out, theirs)
    for root in range(2):
        out = late()
        t.broadcast(out, root)
        equal(out, torch.full((4,), both[root]))
    rows = t.gather(late() if t.rank else mine)  # the root copies on the stream
    if rows is not None:
        equal(torch.stack(rows)[:, 0], torch.tensor(both))
    parts = [late(), late()] if t.rank == 0 else None
    t.scatter(parts, out := late())
    equal(out, torch.full((4,), 1.0))
    equal(t.all_gather(late())[:, 0], torch.tensor(both))
    t.all_gather_async(late(), out := late(8)).wait()
    equal(out, torch.tensor(both).repeat_interleave(4))
    t.all_to_all([late(), late()], outs := [late(), late()])
    equal(torch.stack(outs)[:, 0], torch.tensor(both))
    t.reduce_scatter_async(late(8), out := late()).wait()
    equal(out, torch.full((4,), 3.0))
    t.all_reduce(out := late())
    equal(out, torch.full((4,), 3.0))
    t.all_reduce_async(out := late()).wait()
    equal(out, torch.full((4,), 3.0))
    t.all_reduce(out := late(), "max")
    equal(out, torch.full((4,), 2.0))


def test_a_library_that_is_not_cuda_aware_says_so(world: Transport) -> None:
    library = "Open MPI" if "Open MPI" in MPI.Get_library_version() else "MPICH"
    assert cuda_aware.query() in (0, 1)
    if cuda_aware.query() == 1:
        pytest.skip("this one is CUDA-aware")
    reason = rf"{library} v?[\d.]+ is not CUDA-aware \(MPIX_Query_cuda_support gives 0\)"
    with pytest.raises(NotSupported, match=f"'cuda-mpi' .*: rank 0 on .*: {reason}; use 'nccl'"):
        connect("cuda-mpi")


def test_what_a_library_says_decides(world: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    for kinds, answer, reason in (
        ("mpi,system,cuda:device", None, ""),
        ("mpi,system", 1, ""),
        ("mpi,system", 0, "is not CUDA-aware"),
        ("", None, "does not say that it is CUDA-aware"),
        ("rocm,cudart", None, "does not say that it is CUDA-aware"),
    ):
        monkeypatch.setattr(cuda_aware, "memory_kinds", lambda kinds=kinds: kinds)
        monkeypatch.setattr(cuda_aware, "query", lambda answer=answer: answer)
        assert reason in cuda_aware.missing()
        assert bool(reason) == bool(cuda_aware.missing())


def test_cuda_names_all_that_is_missing(world: Transport) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(NotSupported, match=r"transport 'nccl' .*; transport 'cuda-mpi' carries"):
        connect("cuda")
