"""Finds out by trying which ranks can write into each other's device memory; all ranks agree."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from pydist._loader import native
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.ipc.channel import IpcLinks
from pydist.errors import NotSupported, PydistError

BLOCK_BYTES = 32 << 20
"""Size of the blocks of receive memory; each is allocated, exported and mapped once."""


@dataclass
class PeerMemory:
    """Memory of a rank's device that other processes write to.

    Attributes:
        memory: the memory that other ranks write to, and the mappings of theirs.
        near: the ranks of the job that this one can reach, and that can reach it.
        links: the links of all open groups, in order of creation.
    """

    memory: native.IpcMemory
    near: frozenset[int]
    links: list[IpcLinks] = field(default_factory=list)


@dataclass(frozen=True)
class MappedPeers:
    """Result that a rank has from trying to map the memory of the other ranks of its machine.

    Attributes:
        machine: name of the machine.
        mapped: the ranks whose memory it has mapped.
        failure: the first failure, on one line; "" if there is none.
    """

    machine: str
    mapped: list[int]
    failure: str = ""


def find_peers(
    host: Transport, driver: native.CudaDriver, device: int, block_bytes: int
) -> PeerMemory:
    """Finds out whose memory this rank can map. Collective over `host`.

    Args:
        host: connects all ranks of the job.
        driver: the CUDA driver.
        device: index of this rank's device, the current one.
        block_bytes: see `BLOCK_BYTES`.

    Raises:
        NotSupported: a rank can't share memory, or no two can map each other's; the same on all
            ranks.
    """
    memory: native.IpcMemory | None = None
    said = {"machine": socket.gethostname(), "process": os.getpid(), "sample": "", "lacks": ""}
    try:
        memory = native.IpcMemory(driver, device, block_bytes)
        said["sample"] = memory.sample().hex()
    except PydistError as error:
        said["lacks"] = str(error)
    heard = host.all_gather_json(said)
    for rank, each in enumerate(heard):
        if each["lacks"]:
            if memory is not None:
                memory.release()  # no rank has mapped it
            raise _refusal(rank, each["machine"], each["lacks"])
    assert memory is not None  # or this rank lacks something
    mine = _try(memory, heard, host.rank)
    rows = host.all_gather_json(asdict(mine))
    try:
        near = reachable([MappedPeers(**row) for row in rows], host.rank)
    except NotSupported:
        memory.unmap()
        host.barrier()
        memory.release()
        raise
    return PeerMemory(memory, near)


def _try(memory: native.IpcMemory, heard: Sequence[dict[str, str | int]], rank: int) -> MappedPeers:
    mine = heard[rank]
    mapped: list[int] = []
    for peer, each in enumerate(heard):
        # CUDA can't map memory of the same process.
        if each["machine"] != mine["machine"] or each["process"] == mine["process"]:
            continue
        try:
            memory.try_map(bytes.fromhex(str(each["sample"])))
        except PydistError as error:
            return MappedPeers(str(mine["machine"]), mapped, f"the memory of rank {peer}: {error}")
        mapped.append(peer)
    return MappedPeers(str(mine["machine"]), mapped)


def _refusal(rank: int, machine: str, reason: str) -> NotSupported:
    return NotSupported(
        "transport 'ipc' needs ranks that map the memory of each other's devices: rank"
        f" {rank} on {machine}: {reason}; use 'nccl'"
    )


def reachable(tried: Sequence[MappedPeers], rank: int) -> frozenset[int]:
    """Returns the ranks that a rank can reach and that can reach it.

    Args:
        tried: the results of all ranks, in rank order.
        rank: the rank in question.

    Raises:
        NotSupported: there are several ranks, and none reaches another.
    """
    pairs = [
        {peer for peer in each.mapped if number in tried[peer].mapped}
        for number, each in enumerate(tried)
    ]
    if len(tried) > 1 and not any(pairs):
        for number, each in enumerate(tried):
            if each.failure:
                raise _refusal(number, each.machine, each.failure)
        raise _refusal(0, tried[0].machine, "no two ranks are processes of one machine")
    return frozenset(pairs[rank])
