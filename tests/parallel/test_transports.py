"""Tests of ranks as processes: the contract over mpi (Open MPI, MPICH) and c10d (gloo).

No MPI here accepts device memory. So for `cuda-mpi` the tests query the libraries for support, and
run the data path on host memory.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pydist.comm import Transport
from pydist.comm.transports.c10d import C10dTransport
from pydist.comm.transports.nccl import device_assignment as nccl_place
from pydist.errors import NotSupported, UsageError
from pydist.runtime import connect
from support.transports.checks import Check
from support.transports.contract import CHECKS

pytestmark = pytest.mark.ranks(3, mpi=("openmpi", "mpich", "gloo"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, world: Transport) -> None:
    check(world)


@pytest.fixture
def short_messages(world: Transport, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lowers the limit from which messages are cut from 2 GiB to 24 bytes."""
    if world.name != "mpi":
        pytest.skip("only MPI counts in C ints")
    monkeypatch.setattr("pydist.comm.transports.mpi.messages.MAX_BYTES", 24)
    world.barrier()
    yield
    world.barrier()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("short_messages")
def test_contract_in_short_messages(check: Check, world: Transport) -> None:
    if "same_bits" in check.__name__ or "buffered" in check.__name__:
        pytest.skip("a hundred thousand messages")
    check(world)


def test_a_message_of_another_length_is_named(world: Transport) -> None:
    if world.name != "mpi":
        pytest.skip("gloo ends the process")
    if world.rank == 0:
        world.send(torch.zeros(2), 1, tag=5)
    if world.rank == 1:
        with pytest.raises(UsageError, match="expects 12 bytes from rank 0, tag 5, and got 8"):
            world.recv(torch.zeros(3), 0, tag=5)
    world.barrier()


def test_lent_memory_is_copied_only_if_a_part_of_it_is_sent(world: Transport) -> None:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    lent, received = torch.ones(64, 1024), torch.empty(64, 1024)

    def allocated(lender: torch.Tensor | None, rows: int) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            world.send(lent[:rows], after, tag=6, lender=lender)
        world.recv(received[:rows], before, tag=6)
        events = recorded.profiler.kineto_results.events()
        return sum(max(0, e.nbytes()) for e in events if e.name() == "[memory]")

    assert allocated(None, 64) == lent.nbytes
    assert allocated(lent, 32) == lent.nbytes // 2
    assert allocated(lent, 64) == 0


def test_buffered_sends_are_freed_when_they_are_received(world: Transport) -> None:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    lent = [torch.ones(64, 1024) for _ in range(3)]
    kept = [weakref.ref(each) for each in lent]
    while lent:
        world.send(lent[-1], after, tag=6, lender=lent.pop())
        world.recv(torch.empty(64, 1024), before, tag=6)
    deadline = time.monotonic() + 30
    world.barrier()
    while any(each() is not None for each in kept):
        assert time.monotonic() < deadline
        world.send(torch.ones(1), world.rank, tag=7)
        world.recv(torch.ones(1), world.rank, tag=7)
    world.barrier()


def test_waits_have_no_limit_but_the_watchdogs(world: Transport) -> None:
    if not isinstance(world, C10dTransport):
        pytest.skip("gloo has a limit of its own")
    for each in (world, world.split(0, world.rank)):
        gloo = each._group._get_backend(torch.device("cpu"))
        assert gloo.options._timeout > timedelta(days=20)


def test_torch_distributed_is_ready(world: Transport) -> None:
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    mesh = dist.init_device_mesh("cpu", (world.size,), mesh_dim_names=("data",))
    assert mesh.get_local_rank("data") == world.rank


def test_connect_gives_the_same_transport_again(world: Transport) -> None:
    assert connect() is world


def test_c10d_and_local_under_any_launcher(world: Transport) -> None:
    c10d = connect("c10d")
    assert (c10d.rank, c10d.size) == (world.rank, world.size)
    c10d.barrier()
    local = connect("local")
    assert (local.rank, local.size) == (0, 1)


@pytest.fixture(scope="module")
def cuda_mpi(world: Transport) -> Iterator[Transport]:
    """Yields a `cuda-mpi` transport that treats host memory as device memory."""
    if world.name != "mpi":
        pytest.skip("only of MPI there is one that takes device memory")
    from support.stand_ins.late_mpi import OnHostMemory

    transport = OnHostMemory()
    yield transport
    transport.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_cuda_mpi(check: Check, cuda_mpi: Transport) -> None:
    check(cuda_mpi)


@pytest.mark.usefixtures("cuda_mpi")
def test_every_call_of_cuda_mpi_waits_for_the_stream(cuda_mpi: Transport) -> None:
    from support.stand_ins.late_mpi import every_call_waits_for_the_stream

    every_call_waits_for_the_stream(cuda_mpi)  # type: ignore[arg-type]


@pytest.mark.usefixtures("cuda_mpi")
def test_a_library_that_is_not_cuda_aware_is_refused() -> None:
    from pydist.comm.transports.cuda_mpi import awareness

    if awareness.query() == 1:
        pytest.skip("this one is CUDA-aware")
    reason = r"(Open MPI|MPICH) v?[\d.]+ is not CUDA-aware \(MPIX_Query_cuda_support gives 0\)"
    with pytest.raises(NotSupported, match=f"'cuda-mpi' .*: rank 0 on .*: {reason}; use 'nccl'"):
        connect("cuda-mpi")


@pytest.mark.usefixtures("cuda_mpi")
def test_what_a_library_says_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from pydist.comm.transports.cuda_mpi import awareness

    for kinds, answer, reason in (
        ("mpi,system,cuda:device", None, ""),
        ("mpi,system", 1, ""),
        ("mpi,system", 0, "is not CUDA-aware"),
        ("", None, "does not report that it is CUDA-aware"),
        ("rocm,cudart", None, "does not report that it is CUDA-aware"),
    ):
        monkeypatch.setattr(awareness, "memory_kinds", lambda kinds=kinds: kinds)
        monkeypatch.setattr(awareness, "query", lambda answer=answer: answer)
        assert reason in awareness.missing()
        assert bool(reason) == bool(awareness.missing())


@pytest.mark.skipif(nccl_place.device_missing() == "", reason="there is a GPU")
def test_cuda_names_all_that_is_missing(world: Transport) -> None:
    second = "; transport 'cuda-mpi' carries" if world.name == "mpi" else ""
    with pytest.raises(NotSupported, match=f"transport 'nccl' carries .*host memory{second}"):
        connect("cuda")
