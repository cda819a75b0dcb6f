"""Compares a halo exchange with bare MPI messages of the same size.

Two ranks send each other one face of a tensor of 16 channels. pydist packs and sends it; bare MPI
copies the same number of bytes from a contiguous buffer to its send buffer (a message already in
the cache would have an advantage) and sends them, by persistent requests or by Isend and Irecv. The
data is rewritten before each exchange, and the received data is compared once. A second table shows
packing alone and memcpy of the same bytes, on both ranks at the same time.

    python benchmarks/python/halo_exchange.py
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import common
import jobs

CHANNELS = 16
FACES = {"depth": 2, "height": 3, "width": 4}
EDGES = (8, 16, 32, 64, 128, 256, 512)
THICKNESS = {"depth": 4, "height": 4, "width": 16}
"""Voxels of the shard along the split dim: few, so that the largest shard fits."""


def main() -> None:
    parser = common.parser(__doc__, rounds=200)
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    options = parser.parse_args()
    from pydist.launch import launcher_env
    from pydist.launch.supervisor import launch

    if launcher_env.detect() is None:
        sys.exit(launch(2, [str(Path(__file__).resolve()), *sys.argv[1:]], options.mpi))

    import pydist

    world = pydist.init(spatial=(2, 1, 1)).world
    rows = []
    for face in FACES:
        for layout in ("plain", "channels-last"):
            for edge in EDGES[:2] if options.quick else EDGES:
                rounds = 5 if options.quick else options.rounds
                rounds = rounds if edge <= 128 else max(5, rounds // 10)
                rows.append(_measure(world, face, layout, edge, rounds))
    if world.rank == 0:
        _report(rows, world, options)


def _report(rows: list[dict[str, Any]], world: Any, options: Any) -> None:
    head = ("face", "bytes", "pydist µs", "persistent", "Isend", "ratio", "pack GB/s", "memcpy")
    cells = []
    for row in rows:
        times = [row[way]["median"] * 1e6 for way in ("pydist", "persistent", "isend")]
        bandwidth = [row["bytes"] / row[way]["median"] / 1e9 for way in ("pack", "memcpy")]
        name = f"{row['face']}, {row['layout']}"
        cells.append(
            (name, row["bytes"], *times, row["over_bare"], *bandwidth, row["pack_over_memcpy"])
        )
    print(f"2 ranks, one face of {CHANNELS} channels each way; ratio to the faster bare MPI")
    common.show((*head, "ratio"), cells)
    described = common.machine(mpi_library=jobs.library(world))
    common.write({"machine": described, "rows": rows}, "halo_exchange", options)


def _measure(world: Any, face: str, layout: str, edge: int, rounds: int) -> dict[str, Any]:
    import torch

    contestants = _Contestants(world, face, layout, edge)
    contestants.check()
    ways: dict[str, Callable[[], None]] = {
        "pydist": contestants.pydist,
        "persistent": contestants.persistent,
        "isend": contestants.isend,
        "pack": contestants.pack,
        "memcpy": contestants.memcpy,
    }

    def step(way: str, _: int) -> float:
        contestants.write_anew()
        world.barrier()
        start = perf_counter()
        ways[way]()
        taken = torch.tensor([perf_counter() - start])
        world.all_reduce(taken, "max")
        return float(taken)

    seconds = jobs.interleave(list(ways), rounds, step, warm_up=2)
    summaries = {way: common.summary(taken) for way, taken in seconds.items()}
    medians = {way: each["median"] for way, each in summaries.items()}
    return {
        "face": face,
        "layout": layout,
        "bytes": contestants.nbytes,
        **summaries,
        "over_bare": medians["pydist"] / min(medians["persistent"], medians["isend"]),
        "pack_over_memcpy": medians["memcpy"] / medians["pack"],
    }


class _Contestants:
    def __init__(self, world: Any, face: str, layout: str, edge: int) -> None:
        import torch
        from mpi4py import MPI

        from pydist._loader import native
        from pydist.exchange.exchanger import Exchanger
        from pydist.partition import Box

        self._peer, dim = 1 - world.rank, FACES[face]
        shape = [1, CHANNELS, edge, edge, edge]
        shape[dim] = thick = THICKNESS[face]
        owned = [Box([0] * 5, shape), Box([0] * 5, shape).shift(_along(dim, thick))]
        last, first = _plane(shape, dim, thick - 1), _plane(shape, dim, thick)
        channels_last = layout == "channels-last"
        self._exchanger = Exchanger(world, owned, [[first], [last]], channels_last=channels_last)
        edge_here = thick - 1 if world.rank == 0 else 0
        here = _plane(shape, dim, edge_here)
        # The order of elements in the exchanger's messages.
        order = (0, 2, 3, 4, 1) if channels_last else None
        self._regions = native.Regions([here], order)
        self._native = native

        wanted = torch.channels_last_3d if channels_last else torch.contiguous_format
        generator = torch.Generator().manual_seed(0)
        both = [torch.rand(shape, generator=generator).to(memory_format=wanted) for _ in range(2)]
        self._local = both[world.rank]
        self._expected = both[self._peer].narrow(dim, thick - 1 - edge_here, 1)
        elements = CHANNELS * edge * edge
        self.nbytes = 4 * elements
        self._source, self._packed = (torch.rand(elements, generator=generator) for _ in range(2))
        # Each way has its own buffers: recently used ones are in the cache.
        self._sends, self._recvs = (
            {way: torch.rand(elements, generator=generator) for way in ("persistent", "isend")}
            for _ in range(2)
        )
        self._comm = MPI.COMM_WORLD.Dup()
        self._requests = [
            self._comm.Recv_init(self._recvs["persistent"].numpy(), self._peer),
            self._comm.Send_init(self._sends["persistent"].numpy(), self._peer),
        ]
        self._mpi = MPI

    def check(self) -> None:
        """Checks that every way moves the right bytes."""
        import torch

        slot = torch.empty_like(self._expected)
        self._exchanger.finish(self._exchanger.start(self._local), [slot])
        if not torch.equal(slot, self._expected):
            raise SystemExit("the exchange gave other values than the neighbor's face")
        for name, way in (("persistent", self.persistent), ("isend", self.isend)):
            self._recvs[name].zero_()
            way()
            if not torch.equal(self._recvs[name], self._source):  # equal on both ranks
                raise SystemExit("bare MPI gave other values than were sent")

    def write_anew(self) -> None:
        self._local.neg_()
        self._source.neg_()

    def pydist(self) -> None:
        pending = self._exchanger.start(self._local)
        pending.wait()
        self._exchanger.release(pending)

    def persistent(self) -> None:
        self._copy(self._sends["persistent"])
        self._mpi.Prequest.Startall(self._requests)
        self._mpi.Request.Waitall(self._requests)

    def isend(self) -> None:
        self._copy(self._sends["isend"])
        requests = [
            self._comm.Irecv(self._recvs["isend"].numpy(), self._peer),
            self._comm.Isend(self._sends["isend"].numpy(), self._peer),
        ]
        self._mpi.Request.Waitall(requests)

    def pack(self) -> None:
        self._native.pack(self._local, self._regions, self._packed)

    def memcpy(self) -> None:
        self._copy(self._packed)

    def _copy(self, target: Any) -> None:
        ctypes.memmove(target.data_ptr(), self._source.data_ptr(), self.nbytes)


def _along(dim: int, offset: int) -> list[int]:
    return [offset if d == dim else 0 for d in range(5)]


def _plane(shape: list[int], dim: int, at: int) -> Any:
    from pydist.partition import Box

    extents = [1 if d == dim else n for d, n in enumerate(shape)]
    return Box([0] * 5, extents).shift(_along(dim, at))


if __name__ == "__main__":
    main()
