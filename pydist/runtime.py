"""`connect`, which joins the job that this process is part of, under any launcher."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from pydist.comm import LocalTransport, Transport
from pydist.errors import NotSupported, UsageError
from pydist.launch import (
    backends,
    failures,
    forks,
    launcher_env,
    launcher_socket,
    leftovers,
    mpi_library,
    watch,
)
from pydist.launch.elsewhere import Elsewhere, Place
from pydist.launch.launcher_env import Identity
from pydist.registry import TRANSPORTS, transport_names
from pydist.watchdog import BLOCKED, end_of_program, phase

_Join: TypeAlias = "Callable[[Identity | None], Transport]"

_CLAIM = "pydist/failed"
_CLAIM_TIMEOUT = timedelta(seconds=3)

_declined: list[str] = []  # why "auto" does not use the existing devices

_worlds: dict[str, Transport] = {}  # a process joins its job once
_stores: list[Store] = []  # of the process group, if pydist made it


def connect(transport: str = "auto") -> Transport:
    """Joins the job and makes the transport over all its ranks.

    Also initializes torch.distributed (gloo), so that DeviceMesh, samplers and profilers work as
    usual; sets the number of threads of this rank; and from now on ends all ranks when one of them
    fails (see `pydist.launch.failures`). Collective, the first time.

    Args:
        transport: a name of `pydist.registry.transport_names`. "host" follows the launcher:
            "mpi" under `mpirun`, "c10d" under `torchrun`, one rank without a launcher. "nccl" is
            "host" plus NCCL for tensors on CUDA devices; each rank has a separate device. "auto" is
            "nccl" if each of several ranks has one, else "host"; all ranks decide together, see
            `why_no_devices`. "ipc" is "nccl" with exchanges by copies between devices of one
            machine. "cuda-mpi" is a CUDA-aware MPI. "cuda" is "nccl" if that is possible, else
            "cuda-mpi". "staged" copies device memory through the host, and joins ranks with and
            without devices. "local" is one rank alone, under any launcher.

    Returns:
        The transport; the same one on every call.

    Raises:
        UsageError: the transport does not exist, the launcher and the MPI library do not match, or
            there are fewer GPUs than ranks for "nccl" and "ipc", or this process is a child of a
            rank.
        NotSupported: a rank has no GPU, or no means to send its memory: NCCL, a device that another
            rank can map, a CUDA-aware MPI.
    """
    if transport not in (possible := transport_names()):
        raise UsageError(f"transport '{transport}' is none of {', '.join(possible)}")
    if transport not in _worlds:
        join = _JOINS.get(transport, partial(_join_over, transport))
        who = None if transport == "local" else launcher_env.detect()
        if who is not None:
            launcher_env.refuse_child(who)
        _worlds[transport] = join(who)
    return _worlds[transport]


def _join_first(join: _Join, who: Identity | None) -> Transport:
    """Joins the job with a host transport, which makes this process one of its ranks."""
    if who is not None:
        watch.start(who)
    with phase("joining the job", BLOCKED):
        world = join(who)
        world.barrier()
    if who is None and world.size > 1:  # an unknown launcher
        who = Identity("mpi", world.rank, world.size, local_rank=0, local_size=1)
        watch.start(who)
        world.barrier()
    if who is not None and world.size > 1:
        launcher_env.mark_children()
    watch.forget_page(who)
    _hear_of_other_machines(who, world)
    failures.install(world.rank, world.size, claim=_claim(world), abort=_abort(world))
    if (wire := launcher_socket.LauncherSocket.current) is not None:
        wire.joined = True
    _set_threads(world)
    _list_mapped()
    # Last in, first out: before mpi4py ends MPI.
    forks.at_exit(_leave, world)
    return world


def why_no_devices() -> str:
    """Returns why `connect("auto")` uses no CUDA devices although a rank has one.

    Returns:
        The reason, on one line, the same on all ranks; "" if devices are used, if there are none,
        or if there is one rank, which needs no transport for its device.
    """
    return _declined[-1] if _declined else ""


def _join_auto(who: Identity | None) -> Transport:
    """Joins with NCCL if every rank has a separate device, else with the host's transport."""
    from pydist.comm.transports.nccl import device_assignment as nccl_place

    host = connect("host")
    if host.size == 1:
        return host
    found = nccl_place.find_devices(host, 0 if who is None else who.local_rank)
    # Without an environment: variables that permit sharing a device do not request it.
    reason = nccl_place.lack(found) or nccl_place.conflict(found, {})
    if not reason:
        return connect("nccl")
    if any(each.gpus for each in found):
        _declined.append(reason)
    return host


def _join_cuda(who: Identity | None) -> Transport:
    """Joins with the first transport that supports device memory; the same on all ranks."""
    reasons = []
    for transport in ("nccl", "cuda-mpi") if _follow(who) == "mpi" else ("nccl",):
        try:
            return connect(transport)
        except (NotSupported, UsageError) as error:
            reasons.append(str(error))
    raise NotSupported("; ".join(reasons))


def _join_over(transport: str, who: Identity | None) -> Transport:
    """Joins with a transport of the registry, over the launcher's transport."""
    kind = TRANSPORTS.get(transport)
    world: Transport = kind.over(connect(kind.below), 0 if who is None else who.local_rank)
    failures.install(world.rank, world.size, abort=_abort(world))
    _list_mapped()
    forks.at_exit(world.close)  # before the host's transport is closed
    return world


def _follow(who: Identity | None) -> str:
    """Returns the transport that matches the launcher."""
    if who is None or who.launcher in ("torchrun", "pydist"):
        return "c10d"
    if who.launcher == "slurm":  # srun starts ranks with or without an MPI
        with contextlib.suppress(ImportError, RuntimeError):
            from mpi4py import MPI

            if MPI.COMM_WORLD.Get_size() == who.size:
                return "mpi"
        return "c10d"
    return "mpi"


def _join_mpi(who: Identity | None) -> Transport:
    comm = mpi_library.world_of(who)
    from mpi4py import MPI

    from pydist.comm.transports.mpi.transport import MpiTransport

    world = MpiTransport(comm)
    if not dist.is_initialized():
        _stay_on_this_machine(comm.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == world.size)
        _init_process_group(_store_through(world), world.rank, world.size)
    return world


def _join_c10d(who: Identity | None) -> Transport:
    from pydist.comm.transports.c10d import C10dTransport

    if not dist.is_initialized():
        if who is None:
            _init_process_group(HashStore(), 0, 1)
        elif who.launcher in ("openmpi", "mpich"):
            _join_mpi(who)  # the rendezvous goes through MPI
        else:
            _stay_on_this_machine(who.local_size == who.size)
            _init_process_group(_store_from_environment(who), who.rank, who.size)
    return C10dTransport()


def _init_process_group(store: Store, rank: int, size: int) -> None:
    _stores.append(store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _stay_on_this_machine(alone: bool) -> None:
    """Keeps gloo off the network if all ranks are local, as host names often do not resolve."""
    if alone:
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _store_through(world: Transport) -> Store:
    """Makes a store whose address is broadcast over a transport, without a fixed port."""
    here = os.environ.get("GLOO_SOCKET_IFNAME", "").startswith("lo")
    host = "127.0.0.1" if here else _address()
    if world.rank == 0:
        store = TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False)
        world.broadcast_json([host, store.port])
        return store
    host, port = world.broadcast_json(None)
    return TCPStore(host, port, world.size, is_master=False, wait_for_workers=False)


def _address() -> str:
    """Returns an address of this machine that others can reach, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def _store_from_environment(who: Identity) -> Store:
    if who.launcher == "pydist":
        return FileStore(os.environ["PYDIST_STORE"], who.size)
    if who.launcher == "slurm":
        nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", "localhost"))
        job = int(os.environ.get("SLURM_JOB_ID", "0")) + int(os.environ.get("SLURM_STEP_ID", "0"))
        # The environment stays as it is: with torchrun's variables, `detect` would find torchrun.
        host = os.environ.get("MASTER_ADDR") or first_host(nodes)
        port = int(os.environ.get("MASTER_PORT") or 20_000 + job % 20_000)
        store, _, _ = next(rendezvous(f"tcp://{host}:{port}", who.rank, who.size))
        return store
    store, _, _ = next(rendezvous("env://"))
    return store


def first_host(nodelist: str) -> str:
    """Returns the first machine of a SLURM node list, such as "n07" of "n[07-09,12],m3"."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\]([^,\[]*))?", nodelist)
    if match is None:
        raise UsageError(f"can't read the SLURM node list '{nodelist}'")
    stem, ranges, tail = match.groups()
    return stem + (re.split("[-,]", ranges)[0] + tail if ranges else "")


def _set_threads(world: Transport) -> None:
    """Divides the cores of a machine among its ranks, unless the user or the launcher has.

    torch counts the cores that the process may use, even if other ranks use the same ones.
    """
    host, affinity = socket.gethostname(), sorted(backends.affinity())
    everyone = world.all_gather_json([host, affinity])
    if "OMP_NUM_THREADS" in os.environ:
        return  # after the collective call: the variable may be set on some ranks only
    torch.set_num_threads(max(1, len(affinity) // everyone.count([host, affinity])))
    used = len(set().union(*(cores for name, cores in everyone if name == host)))
    if world.rank == 0 and world.size > 1 and 2 * used <= (os.cpu_count() or 1):
        sys.stderr.write(
            f"pydist: the launcher bound the ranks of this machine to {used} of its"
            f" {os.cpu_count()} cores; `mpirun --bind-to none`, or `pydist run`, uses all\n"
        )


def _list_mapped() -> None:
    """Records the shared memory of this rank, which the next job removes if this one is killed."""
    job = os.environ.get(launcher_socket.VARIABLE)
    made = leftovers.list_mapped(None if job is None else Path(job).parent)
    if made is not None:
        forks.at_exit(shutil.rmtree, made, ignore_errors=True)


def _hear_of_other_machines(who: Identity | None, world: Transport) -> None:
    """Includes ranks of other machines in reports of hangs. Collective."""
    if who is None or who.local_size >= world.size or watch.listens():  # the same on all ranks
        return
    places = [Place(**row) for row in world.all_gather_json(asdict(watch.own_place()))]
    store = _stores[-1] if _stores else dist.distributed_c10d._get_default_store()
    served = isinstance(_plain(store), TCPStore)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    watch.listen_to(Elsewhere(world.rank, places, store, 0 if served and not agent else None))


def _plain(store: Store) -> Store:
    """Returns the store below all prefix stores."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _claim(world: Transport) -> Callable[[int], bool] | None:
    """Returns a function that elects the failing rank that reports: the first at the store."""
    if world.size == 1 or "PYDIST_SUPERVISOR" in os.environ or not _stores:
        return None  # the launcher elects it, or no election is possible
    store = _stores[-1]

    def claim(_: int) -> bool:
        try:
            store.set_timeout(_CLAIM_TIMEOUT)
            return bool(store.add(_CLAIM, 1) == 1)
        except RuntimeError:  # the store's rank has ended, perhaps silently
            return True

    return claim


def _abort(world: Transport) -> Callable[[int], object] | None:
    return None if world.size == 1 else lambda code: world.abort("a rank failed", code)


def _leave(world: Transport) -> None:
    """Leaves the job at the normal end of a rank."""
    end_of_program()
    world.close()
    if dist.is_initialized():
        dist.destroy_process_group()


_JOINS: dict[str, _Join] = {
    "auto": _join_auto,
    "mpi": partial(_join_first, _join_mpi),
    "c10d": partial(_join_first, _join_c10d),
    "local": lambda _: LocalTransport(),
    "cuda": _join_cuda,
    "host": lambda who: connect(_follow(who)),
}
"""The transports of `pydist.registry.JOINS`; all others build on one of them, by `over`."""
