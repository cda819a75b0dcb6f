"""Ranks as processes: the contract over mpi (Open MPI, MPICH) and c10d (gloo)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transport_contract import CHECKS, Check

from pydist.comm import Transport
from pydist.errors import UsageError
from pydist.runtime import connect

pytestmark = pytest.mark.ranks(3, mpi=("openmpi", "mpich", "gloo"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, world: Transport) -> None:
    check(world)


@pytest.fixture
def short_messages(world: Transport, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Messages beyond 2 GiB are cut; here those beyond 24 bytes are, by the same code."""
    if world.name != "mpi":
        pytest.skip("only MPI counts in C ints")
    monkeypatch.setattr("pydist.comm.mpi.MAX_BYTES", 24)
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
