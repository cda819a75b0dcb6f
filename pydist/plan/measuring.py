"""Measures the hardware of a job's ranks, for plans: `pydist env --bench`.

Rates are those of a rank while all ranks of its node work, as in a step. What a step costs besides
arithmetic and bytes (calls, exchanges, contributions of halos) is the difference between small
networks with and without it.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pydist.backend.conv_kernels import by_rule
from pydist.backend.problem import ConvProblem
from pydist.comm import LocalTransport
from pydist.errors import NotSupported
from pydist.grid import SPATIAL_AXES
from pydist.hardware import CPU, Hardware, Interconnect, memory_limit, this_machine
from pydist.mesh import Mesh
from pydist.parallel import parallelize
from pydist.plan.kept import KeptConvs
from pydist.tensor.operands import distribute_tensor

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
_SECONDS = 0.25
"""Time for which a rate is measured."""
_NORM_PASSES = 8.0
"""See `pydist.plan.trace`."""


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
    found = world.all_gather_json([socket.gethostname(), this_machine()])
    hosts = [host for host, _ in found]
    convolving, alone = _convolution(torch.float32), Mesh(LocalTransport())
    flop, crowding_flops = _crowded(world, convolving)
    wide, _ = _crowded(world, _convolution(torch.float64))
    norm, crowding_bytes = _crowded(world, _norm(alone))
    call, exchange, edge = _calls(world, alone)
    mine = [call, exchange, edge, _jitter(world, convolving), _optimizing()]
    own = torch.tensor([*mine, _exponential(alone), _reading()], dtype=torch.float64)
    world.all_reduce(own, "max")
    call, exchange, edge, jitter, optimizing, exponential, reading = own.tolist()
    within, between = (_connection(world, _peer(hosts, here)) for here in (True, False))
    on_node = max(map(hosts.count, hosts))
    found_link = (between if len({*hosts}) > 1 else within) or CPU.within
    return replace(
        CPU,
        name=name,
        source=f"pydist env --bench on {world.size} ranks, transport {world.name}",
        ranks_per_node=on_node,
        memory=memory_limit(on_node),
        flops={"float32": 3 * _CONV.flops / flop, "float64": 3 * _CONV.flops / wide},
        bandwidth=_NORM_PASSES * _BYTES / 4 / norm,
        optimizing=1 / optimizing,
        call=call,
        exchange=exchange if world.size > 1 else CPU.exchange,
        exponential=exponential,
        edge=edge if world.size > 1 else CPU.edge,
        reduction=_reduction(world, found_link) if world.size > 1 else CPU.reduction,
        jitter=jitter if world.size > 1 else CPU.jitter,
        crowding={"flops": crowding_flops, "bandwidth": crowding_bytes},
        within=within or CPU.within,
        between=between or CPU.between,
        reading=1 / reading,
        threads=torch.get_num_threads(),
        machine=found[0][1],
    )


def _crowded(world: Transport, run: Callable[[], object]) -> tuple[float, float]:
    """Measures work while all ranks do it, and while one rank of a node does. Collective.

    Returns:
        The seconds while all do it, on the slowest rank, and relative to those of rank 0 alone.
    """
    run()
    world.barrier()
    together = torch.tensor(_seconds(run), dtype=torch.float64)
    world.barrier()
    alone = torch.zeros((), dtype=torch.float64)
    if world.rank == 0:
        alone.fill_(_seconds(run))
    else:
        time.sleep(1.2 * _SECONDS)  # not in the barrier: ranks that wait there use their core
    world.all_reduce(together, "max")
    world.all_reduce(alone, "max")
    return float(together), max(1.0, float(together / alone))


def _convolution(dtype: torch.dtype) -> Callable[[], object]:
    """Returns a call that computes a convolution and its gradients."""
    problem = replace(_CONV, dtype=dtype)
    times = KeptConvs(torch.get_num_threads(), measures=True)(problem, 1)
    kernels = by_rule([problem], 0) if times is None else times.kernels
    x = kernels.in_format(torch.zeros(problem.input, dtype=dtype))
    weight = torch.zeros(problem.weight, dtype=dtype)
    grad = kernels.run_forward(x, weight, None)

    def run() -> None:
        kernels.run_forward(x, weight, None)
        kernels.run_dgrad(x, grad, weight)
        kernels.run_wgrad(x, grad, weight)

    return run


def _norm(mesh: Mesh) -> Callable[[], object]:
    """Returns a step of a norm and a ReLU of an array, forward and backward."""
    model = parallelize(nn.Sequential(nn.BatchNorm3d(16), nn.ReLU(inplace=True)), mesh)
    edge = 1 << 6
    x = torch.rand(1, 16, edge, edge, _BYTES // 4 // 4 // 16 // edge**2)
    given = distribute_tensor(x, mesh).requires_grad_()
    grad = torch.ones_like(x)

    def run() -> None:
        given.grad = None
        result = model(given)
        result.backward(distribute_tensor(grad, mesh))

    return run


def _jitter(world: Transport, run: Callable[[], object]) -> float:
    """Returns how long ranks wait for the slowest of them, relative to a computation. Collective.

    Args:
        world: the ranks.
        run: the computation.
    """
    own = _seconds(run)
    value = torch.zeros(1)
    world.barrier()
    began = perf_counter()
    for _ in range(_REPEATS):
        run()
        world.all_reduce(value)
    return max(0.0, (perf_counter() - began) / _REPEATS / own - 1)


def _optimizing() -> float:
    """Returns the seconds in which an optimizer's step reads or writes a byte."""
    parameters = [nn.Parameter(torch.zeros(_BYTES // 32)) for _ in range(4)]
    for each in parameters:
        each.grad = torch.ones_like(each)
    adam = torch.optim.Adam(parameters, fused=True)
    adam.step()
    accesses = 7  # the parameter, its gradient and two states are read, all but one are written
    return _least(adam.step, 5) / (accesses * sum(each.nbytes for each in parameters))


def _exponential(mesh: Mesh) -> float:
    """Returns the seconds of an exponential in a loss, forward and backward."""
    edge = 1 << 6
    scores = distribute_tensor(torch.zeros(1, 2, edge, edge, edge), mesh).requires_grad_()
    labels = distribute_tensor(torch.zeros(1, edge, edge, edge, dtype=torch.int64), mesh, {})

    def run() -> None:
        F.cross_entropy(scores, labels).backward()

    run()
    return _least(run, 5) / (2 * edge**3)


def _reading() -> float:
    """Returns the seconds in which a byte of a file is read."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(_BYTES))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = perf_counter()
        Path(file.name).read_bytes()
        return (perf_counter() - began) / _BYTES


def _calls(world: Transport, alone: Mesh) -> tuple[float, float, float]:
    """Measures steps of small networks. Collective.

    Returns:
        The seconds of a call, forward and backward, where arithmetic takes none; of an exchange;
        and the time of a flop of a halo's contributions, relative to one of a convolution.
    """
    cut = Mesh(world, spatial=(world.size, 1, 1))
    small, wide = (4, 4, 4), (16, 8, 32)
    call = _step_seconds(alone, *small)
    exchanging = max(1e-6, _step_seconds(cut, *small) - call)
    main = _step_seconds(alone, *wide)
    edges = max(0.0, _step_seconds(cut, *wide) - main - exchanging)
    # A slab of a plane reaches a plane by one of three taps; inner ranks have two.
    share = min(2, world.size - 1) / (3 * wide[1])
    relative = edges / (share * main) if share else CPU.edge
    return call / (2 * _LAYERS), exchanging / (2 * _LAYERS), relative


def _step_seconds(mesh: Mesh, channels: int, planes: int, extent: int) -> float:
    """Returns the seconds of a step of a network of convolutions with ReLUs."""
    layers = [
        nn.Sequential(nn.Conv3d(channels, channels, 3, padding=1), nn.ReLU())
        for _ in range(_LAYERS)
    ]
    model = parallelize(nn.Sequential(*layers), mesh)
    x = torch.zeros(1, channels, planes * mesh.size, extent, extent)
    given = distribute_tensor(x, mesh, {2: SPATIAL_AXES[0]})

    def step() -> None:
        model(given).sum().backward()

    for _ in range(3):
        step()
    mesh.world.barrier()
    taken = []
    for _ in range(_REPEATS):
        began = perf_counter()
        step()
        taken.append(perf_counter() - began)
    return _typical(taken)


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


def _reduction(world: Transport, link: Interconnect) -> float:
    """Returns the time of a long all-reduce, relative to that of its messages. Collective."""
    row = torch.zeros(_BYTES // 16)
    world.all_reduce(row)
    taken = torch.tensor(_least(lambda: world.all_reduce(row), _REPEATS), dtype=torch.float64)
    world.all_reduce(taken, "max")
    messages = 2 * (world.size - 1) / world.size * row.nbytes / link.bandwidth
    return max(1.0, float(taken) / messages)


def _fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits seconds = latency + bytes * seconds per byte, with equal weight for each relative error.

    Returns:
        The latency, and the seconds per byte, both above 0.
    """
    times = np.asarray(seconds)
    rows = np.stack([1 / times, np.asarray(sizes) / times], axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)[0]
    return max(float(latency), 1e-7), max(float(per_byte), 1e-12)


def _seconds(run: Callable[[], object]) -> float:
    """Returns the typical seconds of calls over `_SECONDS`."""
    taken, started = list[float](), perf_counter()
    while perf_counter() - started < _SECONDS:
        began = perf_counter()
        run()
        taken.append(perf_counter() - began)
    return _typical(taken)


def _typical(seconds: Sequence[float]) -> float:
    """Returns the lower quartile of times, as other load of the machine makes some longer."""
    return float(np.quantile(seconds, 0.25))


def _least(run: Callable[[], object], repeats: int) -> float:
    """Returns the least seconds of several calls."""
    best = float("inf")
    for _ in range(repeats):
        began = perf_counter()
        run()
        best = min(best, perf_counter() - began)
    return best
