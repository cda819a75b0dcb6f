"""`pydist serve`: keeps a trained network on some ranks, and predicts for requests over HTTP."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from pydist.cli.options import parse
from pydist.cli.own_options import arguments_of_ranks, size_of
from pydist.errors import UsageError

if TYPE_CHECKING:
    from pydist.inference.resident import Resident

PROG = "pydist serve"
_SECONDS_MORE = 10
"""Time that the launcher gives the service beyond its own."""


@dataclass(frozen=True)
class _Arguments:
    """Keeps a trained network on some ranks, and predicts for requests over HTTP.

    POST /predict takes an array [C, D, H, W], or [C, H, W] of an image, as the content of a .npy
    file, in the units of the training data. The classes of voxels are answered as .npy, values and
    classes of samples as JSON, and mistakes as JSON as well. GET /health tells what is served.
    SIGTERM or Ctrl-C end the server after the requests that are under way.
    """

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a run, or one of its checkpoints."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=["-n"])] = None
    """Number of ranks to start on this machine."""
    mpi: str = "auto"
    """Which MPI starts them: openmpi, mpich, gloo (none), or auto."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is reachable from other machines. Requests are not encrypted,
    and any client that reaches the port may send some."""
    port: int = 8000
    """Port; 0 chooses a free one, which is printed."""
    spatial: tuple[int, int, int] = (1, 1, 1)
    """Number of parts along depth, height and width of each sample or window. The groups of so many
    ranks compute different ones."""
    sliding: int | None = None
    """Voxels along a side of sliding windows, which are dealt out to the groups."""
    overlap: float | None = None
    """Overlap of neighboring windows, as a fraction; by default a quarter."""
    waiting: int = 64
    """Most requests that wait; further ones are answered with 503."""
    largest: str = "1GB"
    """Size of the largest body that is accepted."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the network; "auto" is CUDA where each rank has a device of its own."""
    factory: str = ""
    """Factory of a network that is not pydist's own, such as nets.py:make, if you trust it."""
    task: str = ""
    """Task that is not pydist's own, such as mine.py:MyTask, if you trust it."""


def serve_model(arguments: Sequence[str]) -> int:
    """Runs `pydist serve`; see `pydist serve --help`."""
    options = parse(_Arguments, arguments, PROG)
    _check(options)
    if options.ranks is None:
        return _serve_here(options)
    from pydist.inference.service import SECONDS_TO_END
    from pydist.launch.supervisor import launch

    argv = ["-m", "pydist", "serve", *arguments_of_ranks(arguments)]
    patience = SECONDS_TO_END + _SECONDS_MORE
    return launch(options.ranks, argv, options.mpi, patience, is_service=True)


def _check(options: _Arguments) -> None:
    """Raises `UsageError` for options that can't be, before any rank starts."""
    from pydist.inference import http  # noqa: F401  checks that the libraries are installed

    if options.overlap is not None and options.sliding is None:
        raise UsageError("--overlap needs windows: give --sliding as well, as in --sliding 96")
    if not 0 <= options.port < 1 << 16:
        raise UsageError(f"--port {options.port}: 0 to 65535 are possible")
    if options.waiting < 1:
        raise UsageError(f"--waiting {options.waiting}: at least 1")
    if min(options.spatial) < 1:
        raise UsageError(f"--spatial {options.spatial}: at least 1 part along each")
    parts = math.prod(options.spatial)
    if options.ranks is not None and options.ranks % parts:
        raise UsageError(f"-n {options.ranks}: multiples of {parts}, the parts of --spatial")
    size_of("--largest", options.largest)


def _serve_here(options: _Arguments) -> int:
    """Serves in this process, which is one rank of a job, or the only one."""
    from pydist.comm.consensus import together
    from pydist.inference import Sliding
    from pydist.inference.resident import Resident
    from pydist.setup import init

    sliding = Sliding.chosen(options.sliding, options.overlap)
    mesh = init(None, options.spatial, "host" if options.device == "cpu" else "auto")
    resident = Resident(
        options.checkpoint, mesh, sliding, options.device, options.factory, options.task
    )
    with together(mesh.world):
        answers = _service(resident, options) if mesh.rank == 0 else None
    if answers is not None:
        answers()
    else:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)  # the first rank ends the service
        resident.follow()
    mesh.world.barrier()
    return 0


def _service(resident: Resident, options: _Arguments) -> Callable[[], None]:
    """Starts the server on the first rank; returns the function that answers until a signal."""
    from pydist.inference.http import HttpServer
    from pydist.inference.service import Service

    service = Service(resident, options.waiting)
    server = HttpServer(service, options.host, options.port, size_of("--largest", options.largest))

    def stop(number: int, frame: FrameType | None) -> None:
        server.close()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)

    def answer() -> None:
        print(f"serving    http://{server.host}:{server.port}  {resident.mesh.grid}", flush=True)
        service.run(lambda: server.is_over)
        print(f"served     {service.answered:,} requests", flush=True)

    return answer
