"""Chooses each rank's CUDA device and checks that NCCL can connect them; all ranks agree."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakSet

import torch

from pydist._loader import native
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.nccl.device import DeviceTransport
from pydist.errors import NotSupported, PydistError, UsageError

SHARE_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable that, set to 1, lets NCCL connect ranks that share a GPU."""
MIN_SHARING_VERSION = 23000
"""The first version of NCCL that supports `SHARE_VARIABLE`."""


@dataclass
class DeviceAssignment:
    """Rank's device, and the libraries that drive it.

    Attributes:
        library: NCCL.
        driver: the CUDA driver.
        device: the device.
        groups: the open communicators on the device, in the order in which all ranks have connected
            them; when a rank fails, all are aborted.
        graphs: CUDA graphs with operations of groups; NCCL would wait for them forever when a group
            closes. Weak references: a graph without other references is destroyed.
    """

    library: native.NcclLibrary
    driver: native.CudaDriver
    device: torch.device
    groups: list[DeviceTransport] = field(default_factory=list)
    graphs: WeakSet[torch.cuda.CUDAGraph] = field(default_factory=WeakSet)


@dataclass(frozen=True)
class FoundDevices:
    """Devices and libraries that a rank has found on its machine.

    Attributes:
        missing: the missing requirement, on one line; "" if none.
        machine: name of the machine.
        gpus: number of GPUs that the rank sees, or that its machine has if torch sees none.
        gpu: UUID of the GPU that the rank would use.
        version: version of NCCL, such as 22705.
    """

    missing: str = ""
    machine: str = ""
    gpus: int = 0
    gpu: str = ""
    version: int = 0


def open_nccl() -> native.NcclLibrary:
    """Opens NCCL: the copy that torch has loaded, else the wheel nvidia-nccl, else the system's.

    Raises:
        NotSupported: there is none, or it is too old; names the paths that were tried.
    """
    return native.NcclLibrary([*_wheel_paths(), "libnccl.so.2"])


def _wheel_paths() -> list[str]:
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    paths = [Path(place) / "nccl" / "lib" / "libnccl.so.2" for place in places or ()]
    return [str(path) for path in paths if path.exists()]


def device_missing() -> str:
    """Returns why this process can't compute on a device, on one line; "" if it can."""
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__}"
        return f"{built} has no CUDA" if torch.version.cuda is None else f"{built} sees no GPU"
    if not native.has_cuda:
        return "pydist was built without CUDA kernels (install it where nvcc is found)"
    return ""


def present() -> int:
    """Counts the CUDA devices of this machine, whether or not torch can use them."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def missing() -> str:
    """Returns why this process can't use NCCL, on one line; "" if it can."""
    lacks = device_missing()
    if lacks:
        return lacks
    try:
        open_nccl()
        native.CudaDriver()
    except PydistError as error:
        return str(error)
    return ""


def device_refusal(reason: str, transport: str = "nccl") -> NotSupported:
    """Returns the error for missing NCCL, which names alternatives."""
    return NotSupported(
        f"transport '{transport}' carries device memory: {reason}; use 'mpi' or 'c10d', which carry"
        " host memory"
    )


def find_devices(host: Transport, local_rank: int) -> list[FoundDevices]:
    """Gathers the findings of each rank, in rank order. Collective over `host`."""
    return [FoundDevices(**row) for row in host.all_gather_json(asdict(_look(local_rank)))]


def assign_device(host: Transport, local_rank: int, transport: str) -> DeviceAssignment:
    """Chooses this rank's device, and checks that all ranks have one. Collective over `host`.

    Args:
        host: connects all ranks.
        local_rank: index among the ranks of this machine.
        transport: name of the transport, for messages.

    Raises:
        NotSupported: a rank has no device or no NCCL.
        UsageError: ranks would share a device, or have different versions of NCCL.
    """
    check_devices(find_devices(host, local_rank), os.environ, transport)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return DeviceAssignment(open_nccl(), native.CudaDriver(), device)


def _look(local_rank: int) -> FoundDevices:
    lacks = missing()
    if lacks:
        return FoundDevices(lacks, socket.gethostname(), present())
    gpus = torch.cuda.device_count()
    uuid = torch.cuda.get_device_properties(local_rank % gpus).uuid
    return FoundDevices("", socket.gethostname(), gpus, str(uuid), open_nccl().version)


def check_devices(
    found: Sequence[FoundDevices], environment: Mapping[str, str], transport: str = "nccl"
) -> None:
    """Refuses devices that NCCL can't connect; identical on all ranks, as all have the same list.

    Args:
        found: the findings of each rank, in rank order.
        environment: the environment of the process.
        transport: name of the transport, for messages.

    Raises:
        NotSupported: a rank has no device or no NCCL.
        UsageError: ranks would share a device, or have different versions of NCCL.
    """
    if lacking := lack(found):
        raise device_refusal(lacking, transport)
    if between := conflict(found, environment):
        raise UsageError(between)


def lack(found: Sequence[FoundDevices]) -> str:
    """Returns the missing requirement of the first rank that has one; "" if none has."""
    for rank, each in enumerate(found):
        if each.missing:
            return (f"rank {rank} on {each.machine}: " if len(found) > 1 else "") + each.missing
    return ""


def conflict(found: Sequence[FoundDevices], environment: Mapping[str, str]) -> str:
    """Returns why the ranks' devices can't be connected, given all requirements; "" if they can."""
    versions = [each.version for each in found]
    for rank, version in enumerate(versions):
        if version // 100 != versions[0] // 100:
            return (
                f"the version of NCCL differs between the ranks: {versions[0]} on rank 0,"
                f" {version} on rank {rank}"
            )
    sharing: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, each in enumerate(found):
        sharing[each.machine, each.gpu].append(rank)
    for (machine, _), ranks in sharing.items():
        may_share = environment.get(SHARE_VARIABLE) == "1"
        if len(ranks) > 1 and (not may_share or min(versions) < MIN_SHARING_VERSION):
            there = sum(each.machine == machine for each in found)
            gpus = len({gpu for name, gpu in sharing if name == machine})
            older = f", which this one, {min(versions)}, is not" if may_share else ""
            return (
                f"{there} ranks on {machine} for {gpus} GPU{'s' * (gpus > 1)} (ranks"
                f" {', '.join(map(str, ranks))} would share one), and NCCL accepts one rank per"
                f" GPU: start fewer ranks there, or set {SHARE_VARIABLE}=1 to let them share"
                f" (NCCL 2.30 or newer{older})"
            )
    return ""
