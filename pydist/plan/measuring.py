"""Measures the hardware of a job's ranks, for plans: `pydist env --bench`."""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from pydist.backend.problem import ConvProblem
from pydist.comm import LocalTransport
from pydist.errors import NotSupported
from pydist.hardware import CPU, Hardware, Interconnect
from pydist.mesh import Mesh
from pydist.parallel import parallelize
from pydist.plan.kept import KeptConvs
from pydist.tensor.distribute import distribute_tensor

if TYPE_CHECKING:
    from pydist.comm import Transport

_SIZES = (8, 1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""Bytes of the messages to which latency and bandwidth are fitted."""
_REPEATS = 15
_LAYERS = 8
_CONV = ConvProblem(
    (1, 32, 32, 32, 32), (32, 32, 3, 3, 3), (1,) * 3, (1,) * 3, (1,) * 3, 1, torch.float32
)
"""Convolution of about as many channels as those that take most of the time of 3D networks."""
_BYTES = 64 << 20
"""Size of arrays and of a file, larger than a CPU's caches."""


def this_machine() -> str:
    """Returns what the kept seconds of convolutions depend on, besides the problem."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{socket.gethostname()}, {platform.processor()}, {capability}, {os.cpu_count()} cores"


def measure_hardware(world: Transport, name: str) -> Hardware:
    """Measures the ranks of a job and their connections. Collective.

    What takes no other rank is measured by all at the same time, as in a step; the slowest counts.
    The connection between nodes is that of the profile "cpu" if all ranks are on one.

    Args:
        world: the transport over all ranks.
        name: of the profile.

    Raises:
        NotSupported: the ranks compute on CUDA devices.
    """
    if world.device is not None:
        raise NotSupported(
            "pydist env --bench measures CPUs; for devices there are profiles, see docs/planning.md"
        )
    found = [json.loads(b) for b in world.all_gather_bytes(json.dumps(this_machine()).encode())]
    hosts = [each.partition(",")[0] for each in found]
    own = torch.tensor([*_alone(world)], dtype=torch.float64)
    world.all_reduce(own, "max")
    flop, byte, call, reading = own.tolist()
    within, between = (_connection(world, _peer(hosts, here)) for here in (True, False))
    on_node = max(map(hosts.count, hosts))
    return replace(
        CPU,
        name=name,
        source=f"pydist env --bench on {world.size} ranks, transport {world.name}",
        ranks_per_node=on_node,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // on_node,
        flops={"float32": 1 / flop},
        bandwidth=1 / byte,
        call=call,
        exchange=_exchange(world) if world.size > 1 else CPU.exchange,
        within=within or CPU.within,
        between=between or CPU.between,
        reading=1 / reading,
        threads=torch.get_num_threads(),
        machine=found[0],
    )


def _alone(world: Transport) -> Sequence[float]:
    """Returns the seconds of a flop, of a byte of memory, of a call, and of a byte of a file."""
    world.barrier()
    seconds = KeptConvs(torch.get_num_threads(), measures=True)(_CONV, world.size)
    flop = sum(seconds) / (3 * _CONV.flops) if seconds else 1 / CPU.flops["float32"]
    x, y = torch.zeros(2, _BYTES // 4)
    world.barrier()
    byte = _least(lambda: torch.add(x, 1.0, out=y), 5) / (2 * _BYTES)
    world.barrier()
    call = _seconds_of_a_call()
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(_BYTES))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = perf_counter()
        Path(file.name).read_bytes()
        reading = (perf_counter() - began) / _BYTES
    return flop, byte, call, reading


def _seconds_of_a_call() -> float:
    """Returns the seconds of a call, forward and backward, where arithmetic takes none."""
    layers = [nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(_LAYERS)]
    mesh = Mesh(LocalTransport())
    model = parallelize(nn.Sequential(*layers), mesh)
    x = distribute_tensor(torch.zeros(1, 4, 4, 4, 4), mesh)

    def step() -> None:
        model(x).sum().backward()

    step()
    return _least(step, _REPEATS) / (2 * _LAYERS)


def _peer(hosts: Sequence[str], here: bool) -> int:
    """Returns the first rank besides 0 on the host of rank 0, or on another one; 0 if none is."""
    return next((r for r, host in enumerate(hosts) if r and (host == hosts[0]) is here), 0)


def _connection(world: Transport, peer: int) -> Interconnect | None:
    """Fits latency and bandwidth to a ping-pong of rank 0 and a peer; 0 for no peer. Collective."""
    if not peer:
        return None
    times = []
    for size in _SIZES:
        message = torch.zeros(size, dtype=torch.uint8)

        def back_and_forth(message: torch.Tensor = message) -> None:
            if world.rank == 0:
                world.send(message, peer)
                world.recv(message, peer)
            elif world.rank == peer:
                world.recv(message, 0)
                world.send(message, 0)

        back_and_forth()
        world.barrier()
        times.append(_least(back_and_forth, _REPEATS) / 2)
    fitted = torch.tensor(_fit(_SIZES, times), dtype=torch.float64)
    world.broadcast(fitted)
    latency, per_byte = fitted.tolist()
    return Interconnect(latency, 1 / per_byte)


def _exchange(world: Transport) -> float:
    """Returns the seconds of a short sum over the ranks, the same on all. Collective."""
    value = torch.zeros(1)
    world.all_reduce(value)
    taken = torch.tensor(_least(lambda: world.all_reduce(value), _REPEATS), dtype=torch.float64)
    world.all_reduce(taken, "max")
    return float(taken)


def _fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits seconds = latency + bytes * seconds per byte, with equal weight for each relative error.

    Returns:
        The latency, and the seconds per byte, both above 0.
    """
    times = np.asarray(seconds)
    rows = np.stack([1 / times, np.asarray(sizes) / times], axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    return max(float(latency), 1e-7), max(float(per_byte), 1e-12)


def _least(run: Callable[[], object], repeats: int) -> float:
    """Returns the least seconds of several calls."""
    best = float("inf")
    for _ in range(repeats):
        began = perf_counter()
        run()
        best = min(best, perf_counter() - began)
    return best
