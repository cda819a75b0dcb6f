"""The ranks of stages: each stage runs on a mesh, which may run several."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from pydist.comm import Transport
from pydist.errors import UsageError
from pydist.grid import AXES, OTHER_AXES, SAMPLE_AXES, SPATIAL_AXES, Grid, axes_by_dim
from pydist.layout import Layout, Split, split_along
from pydist.mesh import Mesh
from pydist.partition import Box
from pydist.setup import join

MOST_STAGES = 128
"""Each pair of stages has two tags, and tags are less than 2**15."""

_ARGUMENTS = ("data", "spatial", *OTHER_AXES, "shares")
"""Arguments of a stage's mesh."""


@dataclass(frozen=True)
class MeshRanks:
    """Ranks of a mesh, with the facts that other meshes know of them.

    Attributes:
        first: its first rank in the job.
        grid: its mesh's axes.
        shares: of its mesh.
    """

    first: int
    grid: Grid
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def sample_size(self) -> int:
        """Number of ranks that hold one sample."""
        return self.grid.size(SAMPLE_AXES)

    def rank(self, data: int, sample_index: int) -> int:
        """Returns the job's rank with these coordinates."""
        return self.first + data * self.sample_size + sample_index

    def boxes(self, shape: Sequence[int], splits: Sequence[Split | None]) -> list[Box]:
        """Returns the boxes of a tensor on the ranks of a sample group."""
        mesh: Any = self  # a layout needs the axes only, not the transports
        return Layout(mesh, shape, splits).boxes

    def splits_like(
        self, other: MeshRanks, shape: Sequence[int], splits: Sequence[Split | None], dims: int
    ) -> tuple[Split | None, ...]:
        """Returns the splits of a tensor on this mesh.

        Args:
            other: the mesh that has the tensor.
            shape: of the tensor.
            splits: on that mesh. A dim stays on its axes; of batches of the network's dims, those
                are cut along spatial axes that the other mesh does not have.
            dims: number of spatial dims of the network.
        """
        mesh: Any = self
        found: list[Split | None] = []
        for extent, split in zip(shape, splits, strict=True):
            if split is None or self.grid.size(split.axes) == split.partition.parts:
                found.append(split)
            elif len(split.axes) == 1:
                found.append(split_along(mesh, extent, split.axes[0]))
            else:
                found.append(None)
        if len(shape) == self.grid.batch_dims(dims):
            for dim, axis in axes_by_dim(len(shape) - 2).items():
                if splits[dim] is None and other.grid.size((axis,)) == 1:
                    found[dim] = split_along(mesh, shape[dim], axis)
        return tuple(found)


class Stages:
    """Stages that a job runs, and the mesh of this rank; made by `init_stages`.

    Args:
        world: the transport over all ranks.
        meshes: the arguments of each mesh: "data", "spatial", "shares", and other axes by their
            names, such as "channel".
        seed: seed of all random numbers that pydist draws.
        order: the mesh of each stage; by default one stage on each.

    Attributes:
        world: the transport over all ranks.
        meshes: the ranks of all meshes.
        index: this rank's mesh among them.
        mesh: the mesh itself. Data that it loads is its sample group's.
        order: the mesh of each stage.
        passes: number of micro-batches that all networks in these stages have begun, by which
            messages are told apart.
        dropped: numbers of those that have raised, whose tensors may still come.
        owed: gradients that may still come for them, by the mesh that has them and the tag of the
            messages; see `Transfers.drop`.
        networks: the networks in these stages.

    Raises:
        UsageError: the meshes do not fit the world, or have different numbers of sample groups, or
            one has no stage.
    """

    def __init__(
        self,
        world: Transport,
        meshes: Sequence[Mapping[str, Any]],
        seed: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        grids = [_grid(index, given) for index, given in enumerate(meshes)]
        sizes = [grid.size() for grid in grids]
        if sum(sizes) != world.size:
            raise UsageError(
                f"stages of {' + '.join(map(str, sizes))} ranks, but {world.size} were started"
            )
        groups = {grid.size(("data",)) for grid in grids}
        if len(groups) > 1:
            raise UsageError(
                f"stages with {' and '.join(map(str, sorted(groups)))} sample groups: a batch goes "
                "through all stages, so each needs the same number (data)"
            )
        self.order = _order(order, len(meshes))
        ends = list(accumulate(sizes))
        self.world = world
        self.index = next(s for s, end in enumerate(ends) if world.rank < end)
        given = meshes[self.index]
        self.mesh = Mesh(
            world.split(self.index, world.rank),
            grids[self.index].size(("data",)),
            given.get("spatial", (1, 1, 1)),
            seed,
            axes={axis: given.get(axis, 1) for axis in OTHER_AXES},
            shares=given.get("shares"),
        )
        self.meshes = [
            MeshRanks(end - size, grid, _shares(given))
            for end, size, grid, given in zip(ends, sizes, grids, meshes, strict=True)
        ]
        self.passes = 0
        self.dropped = set[int]()
        self.owed: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.networks: WeakSet[nn.Module] = WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Stages:
        return self  # as meshes

    def __repr__(self) -> str:
        own = [stage for stage, mesh in enumerate(self.order) if mesh == self.index]
        where = f"stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        return f"Stages({self.count} stages, rank {self.world.rank} in {where})"

    @property
    def count(self) -> int:
        """Number of stages that the network has."""
        return len(self.order)

    @property
    def own(self) -> MeshRanks:
        """Ranks that form this rank's mesh."""
        return self.meshes[self.index]

    @property
    def is_last(self) -> bool:
        """Whether this rank's mesh runs the last stage, which computes the loss."""
        return self.index == self.order[-1]

    def fed(self, mesh: int) -> list[int]:
        """Returns the ranks of another mesh to which this one sends what its sample group has."""
        mine, peers = self.mesh, self.meshes[mesh]
        places = range(mine.sample_index, peers.sample_size, mine.sample_size)
        return [peers.rank(mine.data_index, place) for place in places]

    def feeder(self, mesh: int) -> int:
        """Returns the rank of another mesh from which this one receives those; see `fed`."""
        mine, peers = self.mesh, self.meshes[mesh]
        return peers.rank(mine.data_index, mine.sample_index % peers.sample_size)

    def send_bytes(self, message: bytes, rank: int, tag: int = 0) -> None:
        """Sends a byte string to a rank of the job, without waiting for it.

        Args:
            message: of any length.
            rank: the receiver, in the job.
            tag: of the message; the receiver must pass the same.
        """
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self.world.send(torch.tensor([len(message)]), rank, tag)
        self.world.send(content, rank, tag)

    def receive_bytes(self, rank: int, tag: int = 0) -> bytes:
        """Returns the next byte string from a rank of the job.

        Args:
            rank: the sender, in the job.
            tag: of the message, as it was sent.
        """
        length = torch.empty(1, dtype=torch.int64)
        self.world.recv(length, rank, tag)
        content = torch.empty(int(length), dtype=torch.uint8)
        self.world.recv(content, rank, tag)
        return content.numpy().tobytes()


def init_stages(
    stages: int | Sequence[Mapping[str, Any]],
    transport: str = "auto",
    seed: int = 0,
    keep_freed_memory: bool = True,
    order: Sequence[int] | None = None,
) -> Stages:
    """Joins the job that this process is part of, and divides its ranks into stages.

    Args:
        stages: their number, for equal stages of data-parallel ranks; or the mesh of each, as in
            ``[{"spatial": (2, 1, 1)}, {"spatial": (1, 1, 1)}]``, with arguments of `pydist.init`:
            "data", "spatial", "shares", and other axes such as "channel". Ranks count mesh by mesh.
        transport: as of `pydist.init`.
        seed: seed of all random numbers that pydist draws.
        keep_freed_memory: as of `pydist.init`.
        order: the mesh of each stage, if meshes run several: (0, 1, 0, 1) in turn, which leaves
            less idle time; (0, 1, 1, 0) back and forth, so that the first and the last stages of a
            U-Net, which its skips connect, share memory. By default one stage on each mesh.

    Returns:
        The stages, with the mesh of this rank.

    Raises:
        UsageError: the stages do not fit the number of ranks, or ranks differ in them.
    """
    facts = {"the stages": str(stages), "the order of stages": str(order), "the seed": seed}
    world = join(transport, lambda _: facts, keep_freed_memory)
    return Stages(world, stage_meshes(stages, world.size), seed, order)


def stage_meshes(
    stages: int | Sequence[Mapping[str, Any]], size: int
) -> Sequence[Mapping[str, Any]]:
    """Returns the arguments of each stage's mesh, given as for `init_stages`.

    Raises:
        UsageError: `size` ranks can't be divided into so many stages.
    """
    if not isinstance(stages, int):
        return stages
    if stages < 1 or size % stages:
        raise UsageError(f"{stages} stages of {size} ranks: start a multiple of {stages}")
    return [{"data": size // stages}] * stages


def _order(given: Sequence[int] | None, meshes: int) -> tuple[int, ...]:
    """Returns the mesh of each stage.

    Raises:
        UsageError: a mesh does not exist, or runs no stage, or there are too many stages.
    """
    order = tuple(range(meshes)) if given is None else tuple(given)
    if not all(isinstance(mesh, int) for mesh in order) or {*order} != {*range(meshes)}:
        raise UsageError(
            f"order={list(order)}: expected the mesh of each stage, each of 0 to {meshes - 1} at "
            "least once"
        )
    if len(order) > MOST_STAGES:
        raise UsageError(f"{len(order)} stages; at most {MOST_STAGES} are possible")
    return order


def _grid(stage: int, given: Mapping[str, Any]) -> Grid:
    if not isinstance(given, Mapping) or not given.keys() <= {*_ARGUMENTS}:
        raise UsageError(f"stage {stage}: {given!r}; possible are {', '.join(_ARGUMENTS)}")
    spatial = tuple(given.get("spatial", (1, 1, 1)))
    sizes = {axis: given.get(axis, 1) for axis in ("data", *OTHER_AXES)}
    if len(spatial) == len(SPATIAL_AXES):
        sizes.update(zip(SPATIAL_AXES, spatial, strict=True))
    if len(spatial) != len(SPATIAL_AXES) or not all(
        isinstance(n, int) and n > 0 for n in sizes.values()
    ):
        raise UsageError(f"stage {stage}: {dict(given)}; expected counts >= 1, three of spatial")
    return Grid.of({axis: sizes[axis] for axis in AXES if axis in sizes})


def _shares(given: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return {axis: tuple(map(float, each)) for axis, each in (given.get("shares") or {}).items()}


def device_of(mesh: Mesh) -> torch.device:
    """Returns the device of a mesh's tensors."""
    return torch.device("cpu") if mesh.world.device is None else torch.device(mesh.world.device)
