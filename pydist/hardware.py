"""Describes hardware by the few numbers that estimates of time and memory need.

The built-in profiles are for plans of machines that are not at hand; `pydist env --bench` measures
the one that is.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from pydist.cache import cache_folder
from pydist.errors import DiskError, UsageError
from pydist.parsing import parse_json

_GIB = 2**30
_TEXTS = "name", "source", "machine"
_TABLES = "flops", "crowding", "within", "between"
_DIVISORS = {
    "ranks_per_node", "threads", "bandwidth", "optimizing", "reading", "within.bandwidth",
    "between.bandwidth",
}  # fmt: skip
"""Numbers that are not 0, besides those of the tables "flops" and "crowding"."""


@dataclass(frozen=True)
class Interconnect:
    """Connection between ranks, whose messages take latency + bytes / bandwidth.

    Attributes:
        latency: in seconds.
        bandwidth: of a rank within a node, or of a node between nodes, in bytes per second and
            direction.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """Hardware that a rank has, and its connections to others.

    Attributes:
        name: of the profile.
        source: of its numbers.
        ranks_per_node: ranks on a node, consecutive ones.
        memory: bytes that a rank may use.
        reserved: bytes that a rank uses before its first tensor: libraries, a device's context.
        slack: bytes that the allocator holds at the peak, relative to those of tensors.
        flops: of convolutions and products per second, by torch's name of the dtype. Attainable,
            not peak: layers of few channels are limited by `bandwidth` instead.
        bandwidth: bytes per second that a layer without products, such as a norm, reads and writes.
        optimizing: bytes per second that the optimizer reads and writes.
        exponential: seconds of an exponential or logarithm of an element, as in a softmax.
        call: seconds of a torch call besides its arithmetic, forward and backward.
        exchange: seconds of an exchange besides its messages: packing, calls, waking up.
        edge: time of a flop of a halo's contributions, relative to one of a whole convolution.
        reduction: time of an all-reduce of long messages, relative to that of its messages alone.
        jitter: time for which ranks that compute the same wait for the slowest, relative to that of
            their computation.
        crowding: time of work of a rank while all ranks of its node work, relative to that of one
            alone, by "flops" and "bandwidth". The rates above are those while all work.
        within: connection between two ranks of a node.
        between: connection between two nodes, which the ranks of a node share.
        reading: bytes per second that a rank reads from files.
        overlap: part of a message's time that computation hides, if it takes long enough.
        is_asynchronous: whether calls return before they are computed, as on CUDA devices: then
            only the longer of both counts.
        threads: of a rank's kernels on a CPU.
        machine: for a measured profile, what `this_machine` returned there; else "".
    """

    name: str
    source: str
    ranks_per_node: int
    memory: int
    reserved: int
    slack: float
    flops: Mapping[str, float]
    bandwidth: float
    optimizing: float
    call: float
    exchange: float
    within: Interconnect
    between: Interconnect
    reading: float
    overlap: float
    exponential: float = 0.0
    edge: float = 1.0
    reduction: float = 1.0
    jitter: float = 0.0
    crowding: Mapping[str, float] = field(default_factory=dict)
    is_asynchronous: bool = False
    threads: int = 1
    machine: str = field(default="")

    def flops_of(self, dtype: torch.dtype) -> float:
        """Returns the flops per second of a dtype.

        Unknown ones are half of those of float32 for float64, and the same for others.
        """
        name, known = str(dtype).removeprefix("torch."), self.flops["float32"]
        return self.flops.get(name, known / 2 if name == "float64" else known)

    def crowded(self, rate: str, ranks: int) -> float:
        """Returns the time of work on a node, relative to that while all of its ranks work.

        Args:
            rate: "flops" or "bandwidth", by which the work is limited.
            ranks: that work on the node.
        """
        most = self.crowding.get(rate, 1.0)
        others = min(ranks, self.ranks_per_node) - 1
        return (1 + (most - 1) * others / max(1, self.ranks_per_node - 1)) / most

    def save(self, path: Path) -> None:
        """Writes the profile as JSON.

        Raises:
            DiskError: the file can't be written.
        """
        try:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            raise DiskError(f"can't write {path}: {error.strerror}") from error


# The CPU's numbers are those of the repository's machine of 2 cores (docs/performance.md), also for
# the choices of forms: `benchmarks/python/channel_forms.py` measures those.
CPU = Hardware(
    name="cpu",
    source="a 2-core machine, a thread per rank, Open MPI: docs/performance.md",
    ranks_per_node=2,
    memory=8 * _GIB,
    reserved=450 << 20,
    slack=1.3,  # with `pydist.memory.keep_freed_memory`, see the table there
    flops={"float32": 80e9, "bfloat16": 80e9, "float64": 40e9},
    bandwidth=8e9,
    optimizing=16e9,
    call=150e-6,
    exchange=150e-6,
    within=Interconnect(5e-6, 4e9),
    between=Interconnect(20e-6, 1e9),
    reading=500e6,
    overlap=0.5,  # host transports move bytes within calls
    exponential=6e-9,
    edge=4.0,
    reduction=2.0,
    jitter=0.05,
)

_PUBLIC = (
    CPU,
    Hardware(
        name="v100",
        source="Lassen: 4 V100 16 GB per node, NVLink2, EDR InfiniBand (NVIDIA V100 data sheet: "
        "15.7 Tflop/s fp32, 7.8 fp64, 125 fp16, 900 GB/s); alpha and beta of DiHydrogen's "
        "perfmodel.py. Attainable: 0.6 of fp32, 0.27 of fp16 as on the H100, 0.8 of the memory's "
        "bandwidth",
        ranks_per_node=4,
        memory=16 * _GIB,
        reserved=800 << 20,
        slack=1.1,
        flops={"float32": 9.4e12, "float16": 34e12, "float64": 4.7e12},
        bandwidth=720e9,
        optimizing=720e9,
        call=300e-6,
        exchange=150e-6,
        within=Interconnect(8e-6, 37.6e9),
        between=Interconnect(1.2e-6, 25.7e9),
        reading=1e9,
        overlap=1.0,
        is_asynchronous=True,
    ),
    Hardware(
        name="a100",
        source="Selene: 8 A100 80 GB per node, NVLink3, 8 HDR InfiniBand (NVIDIA A100 data sheet: "
        "19.5 Tflop/s fp32, 9.7 fp64, 312 bf16, 2039 GB/s, 600 GB/s NVLink in both directions). "
        "Attainable: 0.3 of fp32 and 0.27 of bf16 as on the H100, 0.8 of all bandwidths",
        ranks_per_node=8,
        memory=80 * _GIB,
        reserved=800 << 20,
        slack=1.1,
        flops={"float32": 5.9e12, "bfloat16": 85e12, "float16": 85e12, "float64": 2.9e12},
        bandwidth=1.63e12,
        optimizing=1.63e12,
        call=300e-6,
        exchange=150e-6,
        within=Interconnect(8e-6, 240e9),
        between=Interconnect(5e-6, 160e9),
        reading=2e9,
        overlap=1.0,
        is_asynchronous=True,
    ),
    Hardware(
        name="h100",
        source="Eos: 8 H100 80 GB per node, NVLink4, 8 NDR InfiniBand (NVIDIA H100 data sheet: "
        "67 Tflop/s fp32, 34 fp64, 3.35 TB/s, 900 GB/s NVLink in both directions). Attainable, of "
        "one H100: docs/performance.md (CosmoFlow fp32, the paper's U-Net bf16); 0.8 of all "
        "bandwidths",
        ranks_per_node=8,
        memory=80 * _GIB,
        reserved=800 << 20,
        slack=1.1,
        flops={"float32": 20e12, "bfloat16": 270e12, "float16": 270e12, "float64": 10e12},
        bandwidth=2.68e12,
        optimizing=2.68e12,
        call=300e-6,
        exchange=75e-6,
        within=Interconnect(8e-6, 360e9),
        between=Interconnect(5e-6, 320e9),
        reading=4e9,
        overlap=1.0,
        is_asynchronous=True,
    ),
)
PROFILES = {each.name: each for each in _PUBLIC}
"""The built-in profiles by name; sources: data sheets, and the measurements named in each."""


def this_machine() -> str:
    """Returns what speed depends on here: processor, instructions, and number of cores."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()}, {cpu_name()}, {capability}, {os.cpu_count()} cores"


def cpu_name() -> str:
    """Returns the name of the processor, or else of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def memory_limit(ranks: int) -> int:
    """Returns the bytes that this process may use at most among a number of ranks of this node.

    That is a rank's part of the memory, or of the limit of the process (`ulimit -v`) or the
    container.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks]
    container = Path("/sys/fs/cgroup/memory.max")
    if container.is_file() and (text := container.read_text().strip()).isdigit():
        limits.append(int(text) // ranks)
    try:
        import resource
    except ImportError:
        return min(limits)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        mapped, resident = mapped_and_resident()
        limits.append(space - (mapped - resident))  # libraries are mapped, and hardly resident
    return min(limits)


def mapped_and_resident() -> tuple[int, int]:
    """Returns the bytes of this process that are mapped, and those that are resident."""
    try:
        mapped, resident, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return int(mapped) * page, int(resident) * page


def kept_file() -> Path:
    """Returns the file in which `pydist env --bench` keeps the profile of this machine."""
    return cache_folder() / "hardware.json"


def kept_hardware() -> Hardware | None:
    """Returns the kept profile; `None` if there is none, or it is of another machine."""
    try:
        found = hardware_of(parse_json(kept_file().read_bytes()))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found.machine == this_machine() else None


def load_hardware(name: str) -> Hardware:
    """Returns a built-in profile, or one from a file that `pydist env --bench` has written.

    Args:
        name: of the profile, path of the file, or "auto": the kept profile of this machine, with
            at most the memory of `memory_limit`, or without one "cpu".

    Raises:
        UsageError: there is no such profile, or the file is not one.
    """
    if name == "auto":
        kept = kept_hardware()
        if kept is None:
            return CPU
        return replace(kept, memory=min(kept.memory, memory_limit(kept.ranks_per_node)))
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"hardware {name!r}: possible are auto, {', '.join(PROFILES)}, or a file that "
            "`pydist env --bench FILE` has written"
        )
    try:
        return hardware_of(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is no hardware profile: {error}") from error


def hardware_of(content: Any) -> Hardware:
    """Returns the profile that `dataclasses.asdict` has described.

    Raises:
        ValueError: it describes none.
        TypeError: the same.
        KeyError: the same.
    """
    if not isinstance(content, dict) or content.keys() != {each.name for each in fields(Hardware)}:
        raise ValueError(f"expected {', '.join(each.name for each in fields(Hardware))}")
    given = dict(content)
    numbers = {k: v for k, v in given.items() if k not in (*_TEXTS, *_TABLES)}
    for name in _TABLES:
        if not isinstance(given[name], dict):
            raise ValueError(f"{name} must be a table")
        numbers |= {f"{name}.{key}": value for key, value in given[name].items()}
    for name in ("within", "between"):
        given[name] = Interconnect(**given[name])
    if "float32" not in given["flops"]:
        raise ValueError("flops has no float32")
    if not all(isinstance(n, int | float) and 0 <= n < float("inf") for n in numbers.values()):
        raise ValueError("its numbers must be finite and not negative")
    for name, value in numbers.items():
        if not value and (name in _DIVISORS or name.startswith(("flops.", "crowding."))):
            raise ValueError(f"{name} must be more than 0")
    return Hardware(**given)
