"""The mesh: the grid of ranks, its named axes, and the groups of ranks along them."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pydist.errors import UsageError
from pydist.session import Session

if TYPE_CHECKING:
    from pydist.comm import Transport

SPATIAL_AXES = ("depth", "height", "width")
AXES = ("data", *SPATIAL_AXES)


class Mesh:
    """The grid of ranks: data × depth × height × width.

    The ranks with one data index form a *sample group*: together they hold one batch of samples,
    each its shard. The group's size is written S in the code. Ranks count row by row, width
    fastest: ``rank = ((data * D + depth) * H + height) * W + width``.

    Args:
        world: the transport over all ranks.
        data: number of sample groups; by default as many as the world holds.
        spatial: how often depth, height and width of a sample are split.
        seed: start of all random numbers that pydist draws.
        keep_thin_blocks: never move a tensor onto fewer ranks where its blocks become thinner
            than a layer's halo; by default that is done where it is estimated to be faster.

    Raises:
        UsageError: the mesh does not fit the world.
    """

    axes = AXES

    def __init__(
        self,
        world: Transport,
        data: int | None = None,
        spatial: Sequence[int] = (1, 1, 1),
        seed: int = 0,
        keep_thin_blocks: bool = False,
    ) -> None:
        self.world = world
        self.keep_thin_blocks = keep_thin_blocks
        self.rank, self.size = world.rank, world.size
        self.shape = _fit(world.size, data, tuple(spatial))
        self.seed = seed
        self.session = Session()
        """What the job keeps while it runs."""
        self.coords = dict(zip(AXES, _unravel(self.rank, self.shape), strict=True))
        self._groups = self._make_groups()
        self.ranks_per_core = _ranks_per_core(world)
        """More than 1 where ranks share cores: there, work that all of them repeat costs more."""

    def __repr__(self) -> str:
        grid = " × ".join(f"{a} {n}" for a, n in zip(AXES, self.shape, strict=True))
        return f"Mesh({grid}, rank {self.rank} of {self.size}, {self.world.name})"

    @property
    def data_size(self) -> int:
        """Number of sample groups."""
        return self.shape[0]

    @property
    def data_index(self) -> int:
        """Which sample group this rank is in."""
        return self.coords["data"]

    @property
    def spatial(self) -> tuple[int, int, int]:
        """How often depth, height and width are split."""
        return self.shape[1], self.shape[2], self.shape[3]

    @property
    def sample_size(self) -> int:
        """S, the number of ranks that hold one sample."""
        return math.prod(self.spatial)

    @property
    def sample_index(self) -> int:
        """This rank's place in its sample group."""
        return self.rank % self.sample_size

    @property
    def sample(self) -> Transport:
        """The ranks that hold one sample with this one, ordered by depth, height, width."""
        return self._groups[SPATIAL_AXES]

    @property
    def data(self) -> Transport:
        """The ranks at this rank's place in all sample groups."""
        return self._groups[("data",)]

    def axis_size(self, axis: str) -> int:
        """Number of ranks along a named axis."""
        return self.shape[AXES.index(axis)]

    def group(self, axes: Sequence[str]) -> Transport:
        """The ranks that differ from this one along `axes` only."""
        return self._groups[tuple(a for a in AXES if a in axes)]

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """The axes over which a sample is split, named as in `distinct_axes`."""
        return tuple(a for a in SPATIAL_AXES if self.axis_size(a) > 1)

    @property
    def distinct_axes(self) -> list[tuple[str, ...]]:
        """Sets of axes, one for each group of several ranks that this one is in."""
        return [axes for axes in self._groups if axes and all(self.axis_size(a) > 1 for a in axes)]

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes along which there are several ranks, named as in `distinct_axes`."""
        return tuple(a for a in AXES if self.axis_size(a) > 1)

    def groups_along(self, axes: Sequence[str]) -> list[list[int]]:
        """The ranks of each group along `axes`, in order; of the whole mesh."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coords = zip(AXES, _unravel(rank, self.shape), strict=True)
            groups.setdefault(tuple(c for a, c in coords if a not in axes), []).append(rank)
        return list(groups.values())

    @property
    def transports(self) -> list[Transport]:
        """Those of all groups of this rank, each once."""
        return list({id(t): t for t in self._groups.values()}.values())

    def coords_of(self, sample_index: int) -> dict[str, int]:
        """Coordinates along the spatial axes of a place in the sample group."""
        return dict(zip(SPATIAL_AXES, _unravel(sample_index, self.spatial), strict=True))

    def _make_groups(self) -> dict[tuple[str, ...], Transport]:
        """A transport for every set of axes.

        All are made here, in one order: making a group is collective over the world, and later
        the sample groups may call in different orders. Sets that name the same ranks share one.
        """
        made: dict[tuple[str, ...], Transport] = {}
        groups: dict[tuple[str, ...], Transport] = {}
        for count in range(len(AXES) + 1):
            for axes in itertools.combinations(AXES, count):
                varying = tuple(a for a in axes if self.axis_size(a) > 1)
                if varying not in made:
                    made[varying] = self._split(varying)
                groups[axes] = made[varying]
        return groups

    def _split(self, varying: tuple[str, ...]) -> Transport:
        if math.prod(self.axis_size(a) for a in varying) == self.size:
            return self.world
        color = 0
        for axis in AXES:
            if axis not in varying:
                color = color * self.axis_size(axis) + self.coords[axis]
        return self.world.split(color, self.rank)


def _fit(world: int, data: int | None, spatial: tuple[int, ...]) -> tuple[int, int, int, int]:
    if len(spatial) != 3 or any(n < 1 for n in spatial):
        raise UsageError(f"spatial={spatial}: expected three counts >= 1 (depth, height, width)")
    group = math.prod(spatial)
    given = f"spatial={'×'.join(map(str, spatial))} needs {group} ranks a sample"
    if data is None:
        if world % group:
            started = "1 rank was" if world == 1 else f"{world} ranks were"
            raise UsageError(
                f"{given}, but {started} started; possible are multiples of {group}, "
                f"or a split into {' or '.join(str(d) for d in _divisors(world))}"
            )
        data = world // group
    if data < 1 or data * group != world:
        raise UsageError(
            f"data={data} with {given}: {data * group} ranks in all, but {world} were started; "
            f"start {max(data, 1) * group}, or choose data × depth × height × width = {world}"
        )
    return data, spatial[0], spatial[1], spatial[2]


def _ranks_per_core(world: Transport) -> float:
    """Ranks for each core of the fullest machine, the same number on all ranks."""
    hosts = world.all_gather_bytes(socket.gethostname().encode())
    mine = hosts.count(hosts[world.rank]) / (os.cpu_count() or 1)
    most = torch.tensor([mine], dtype=torch.float64)
    world.all_reduce(most, "max")
    return float(most)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    coords = []
    for n in reversed(shape):
        index, c = divmod(index, n)
        coords.append(c)
    return tuple(reversed(coords))
