"""Emulates a slow network between hosts, for ranks of one machine.

`SlowTransport` forwards each call to a real transport. A collective between ranks on different
emulated hosts is complete when its real messages have arrived, and not before the emulated network
would have brought them:

- Each host has one connection, full duplex, with a bandwidth and a latency.
- A collective is ready when its last rank has started it. Collectives that share a connection use
  it one after the other, in the order in which they are ready.
- It occupies the connection for the bytes that leave or enter the host, whichever is more. An
  all-reduce is a ring through the ranks in their order; other collectives send each part straight
  to its receivers.
- `wait` sleeps until then; the calls that start a collective cost nothing.

The ranks share the state of the connections in a file that they map.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pydist.comm.interface.handles import Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.routed import RoutedTransport

_GROUPS, _RING = 512, 256
"""Groups, and collectives of a group that are in flight at a time; both at most."""
_POLL_SECONDS = 50e-6


@dataclass(frozen=True)
class Speed:
    """Bandwidth and latency that the network between hosts has.

    Attributes:
        bandwidth: bits per second, each way.
        latency: seconds from host to host.
    """

    bandwidth: float
    latency: float

    def seconds(self, nbytes: float) -> float:
        """Returns the time for which bytes occupy a connection."""
        return 8 * nbytes / self.bandwidth


class Network:
    """Connections of all hosts, whose state the ranks share in a mapped file.

    Attributes:
        hosts: the host of each rank of the job.
        speed: the present speed, equal on all ranks; None is as fast as the real messages.
        carried: bytes that have left or entered this rank's host, whichever is more, for its
            collectives.
    """

    def __init__(self, path: Path, hosts: Sequence[str]) -> None:
        """Maps the file, which starts as zeros.

        Args:
            path: the file; the same on all ranks.
            hosts: the host of each rank of the job.
        """
        names = list(dict.fromkeys(hosts))
        self.hosts = [names.index(host) for host in hosts]
        self.speed: Speed | None = None
        self.carried = 0.0
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT)
        head = 1 + len(names)
        with self._alone():
            os.ftruncate(self._lock, 8 * (head + _GROUPS * _RING * 3))
        shared = np.memmap(path, np.float64, "r+", shape=(head + _GROUPS * _RING * 3,))
        self._groups, self._free = shared[:1], shared[1:head]
        # Of each collective in flight: its number, the ranks that have started it, its arrival.
        self._flights = shared[head:].reshape(_GROUPS, _RING, 3)

    def new_group(self) -> int:
        """Returns a number for a group of ranks."""
        with self._alone():
            self._groups[0] += 1
            assert self._groups[0] <= _GROUPS
            return int(self._groups[0]) - 1

    def start(
        self, group: int, number: int, size: int, nbytes: dict[int, float], hops: int
    ) -> None:
        """Registers that a rank has started a collective; the last one occupies the connections.

        Args:
            group: the number of the group.
            number: of the collective in the group, from 1.
            size: ranks of the group.
            nbytes: that leave or enter each host.
            hops: messages between hosts that follow one another.
        """
        assert self.speed is not None
        with self._alone():
            flight = self._flights[group, number % _RING]
            if flight[0] != number:
                flight[:] = number, 0, 0
            flight[1] += 1
            if flight[1] < size:
                return
            began = max(time.perf_counter(), *(self._free[host] for host in nbytes))
            for host, count in nbytes.items():
                self._free[host] = began + self.speed.seconds(count)
            ended = max(self._free[host] for host in nbytes)
            flight[2] = ended + hops * self.speed.latency

    def arrive(self, group: int, number: int) -> None:
        """Sleeps until a collective has arrived."""
        flight = self._flights[group, number % _RING]
        while not flight[2]:
            time.sleep(_POLL_SECONDS)
        time.sleep(max(0.0, float(flight[2]) - time.perf_counter()))

    def has_arrived(self, group: int, number: int) -> bool:
        """Returns whether `arrive` would return immediately."""
        ended = float(self._flights[group, number % _RING][2])
        return 0 < ended <= time.perf_counter()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)


class SlowTransport(RoutedTransport):
    """Transport whose collectives between hosts take the time of a slow network."""

    name = "slow"

    def __init__(self, base: Transport, network: Network, members: Sequence[int]) -> None:
        """Wraps a transport. Collective.

        Args:
            base: carries the messages.
            network: the connections of the hosts.
            members: the ranks of the group, by their number in the job.
        """
        self.rank, self.size = base.rank, base.size
        self.concurrent = False
        self._base, self._network, self._members = base, network, list(members)
        self._hosts = [network.hosts[member] for member in members]
        self._number = 0
        self._group = -1
        if len(set(self._hosts)) > 1:
            mine = str(network.new_group()).encode() if self.rank == 0 else None
            self._group = int(base.broadcast_bytes(mine))

    def _of(self, tensors: Sequence[Tensor]) -> Transport:
        return self._base

    def _subgroup(self, members: Sequence[int]) -> Transport:
        base = self._base.split(members[0], members.index(self.rank))
        return SlowTransport(base, self._network, [self._members[each] for each in members])

    def _barrier(self) -> None:
        self._base._barrier()

    def abort(self, reason: str, exit_code: int) -> None:
        """Ends the entire job by the real transport."""
        self._base.abort(reason, exit_code)

    def progress(self) -> None:
        """Lets the real transport's operations in flight advance."""
        self._base.progress()

    def close(self) -> None:
        """Releases the real transport's resources."""
        self._base.close()

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        self._started(Work(), *self._ring(tensor.nbytes)).wait()
        self._base._all_reduce(tensor, op)

    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work:
        work = self._base._all_reduce_async(tensor, op)
        return self._started(work, *self._ring(tensor.nbytes))

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        work = self._base._all_gather_async(tensor, parts, out)
        return self._started(work, self._straight([[part.nbytes] * self.size for part in parts]))

    def _reduce_scatter_async(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> Work:
        work = self._base._reduce_scatter_async(parts, out, divisor)
        return self._started(work, self._straight([[part.nbytes for part in parts]] * self.size))

    def _ring(self, nbytes: int) -> tuple[dict[int, float], int]:
        """Returns the bytes of each host for an all-reduce, and the longest chain of messages."""
        size, hosts = self.size, self._hosts
        leaves = [hosts[i] != hosts[(i + 1) % size] for i in range(size)]
        each = 2 * nbytes * (size - 1) / size
        found = {h: each * sum(hosts[i] == h for i in range(size) if leaves[i]) for h in set(hosts)}
        chains = (
            itertools.islice(itertools.cycle(leaves), i, i + 2 * (size - 1)) for i in range(size)
        )
        return found, max(map(sum, chains))

    def _straight(self, messages: Sequence[Sequence[int]]) -> dict[int, float]:
        """Returns the bytes of each host for messages [sender][receiver]."""
        found = {}
        for host in set(self._hosts):
            ways = [0.0, 0.0]
            for (i, a), (j, b) in itertools.product(enumerate(self._hosts), repeat=2):
                if a != b and host in (a, b):
                    ways[host == b] += messages[i][j]
            found[host] = max(ways)
        return found

    def _started(self, work: Work, nbytes: dict[int, float], hops: int = 1) -> Work:
        if self._group < 0:
            return work
        self._network.carried += nbytes[self._hosts[self.rank]] / self._hosts.count(
            self._hosts[self.rank]
        )
        if self._network.speed is None:
            return work
        self._number += 1
        self._network.start(self._group, self._number, self.size, nbytes, hops)
        return _Slow(work, self._network, self._group, self._number)


class _Slow(Work):
    """Collective that arrives when the emulated network has brought it."""

    def __init__(self, work: Work, *flight: Any) -> None:
        self._work = work
        self._flight: tuple[Any, ...] | None = flight

    def done(self) -> bool:
        """Returns whether the result is in place and the emulated network has brought it."""
        if self._flight is not None:
            network, group, number = self._flight
            if not network.has_arrived(group, number):
                return False
        return self._work.done()

    def wait(self) -> None:
        """Returns when the result is in place and the emulated network has brought it."""
        self._work.wait()
        if self._flight is not None:
            (network, group, number), self._flight = self._flight, None
            network.arrive(group, number)
