"""Arranges ranks in a mesh, and makes the groups of ranks along its named axes."""

from __future__ import annotations

import math
import operator
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from pydist.errors import NotSupported, UsageError
from pydist.grid import AXES, OTHER_AXES, SAMPLE_AXES, SPATIAL_AXES, Grid
from pydist.hardware import CPU, Hardware, hardware_of, kept_hardware
from pydist.session import Session

if TYPE_CHECKING:
    from pydist.comm import Transport


class Mesh:
    """Mesh that arranges ranks along data × channel × depth × height × width.

    The ranks with the same data index form a *sample group*: together they hold one batch of
    samples, each rank one shard. The group's size is called S in the code. Ranks are numbered row
    by row, width fastest; see `pydist.grid.Grid`.

    Args:
        world: the transport over all ranks.
        data: number of sample groups; by default as many as the world has ranks for.
        spatial: numbers of parts of a sample's depth, height and width.
        seed: seed of all random numbers that pydist draws.
        keep_thin_blocks: never move a tensor to fewer ranks when its blocks become thinner than a
            layer's halo; by default this is done where it is estimated to be faster.
        axes: number of ranks along `pydist.grid.OTHER_AXES`, such as {"channel": 2}; 1 by default.
            Layers split their channels along "channel"; see `pydist.ops.channels`.
        shares: for ranks of unequal speed, the parts of a sample's axes in proportion, such as
            {"depth": (2, 1)}; even by default. See `pydist.partition.divide`.

    Raises:
        UsageError: the mesh does not fit the world.
        NotSupported: ranks that hold one sample are on unequal devices.

    Attributes:
        grid: the named axes with their sizes.
        shares: by axis; an axis that is not among them is cut evenly.
        coords: this rank's coordinates, by axis.
        sample_size: S, the number of ranks that hold one sample.
        sample_index: this rank's index in its sample group.
        sample: transport over this rank's sample group, in the order of the sample's axes.
        data: transport over the ranks with this rank's index in all sample groups.
        session: the state of the running job.
        hardware: the profile that rank 0 has kept of its machine, or "cpu"; the same on all ranks.
    """

    def __init__(
        self,
        world: Transport,
        data: int | None = None,
        spatial: Sequence[int] = (1, 1, 1),
        seed: int = 0,
        keep_thin_blocks: bool = False,
        axes: Mapping[str, int] | None = None,
        shares: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        if not hasattr(world, "all_reduce"):  # other classes may act as a transport
            raise UsageError(
                f"Mesh({type(world).__name__}): expected the transport over all ranks, as "
                "pydist.init() and pydist.comm.LocalTransport() make it"
            )
        data, spatial, seed = counts_of(data, spatial, seed)
        self.world = world
        self.keep_thin_blocks = keep_thin_blocks
        self.rank, self.size = world.rank, world.size
        self.grid = _fit(world.size, data, spatial, counts_along({} if axes is None else axes))
        self.shares = _check_shares(self.grid, {} if shares is None else shares)
        hosts, self.hardware = _compare(world, self.grid, self.shares)
        self.seed = seed
        self.session = Session()
        self.coords = self.grid.coords(self.rank)
        self.sample_size = self.grid.size(SAMPLE_AXES)
        self.sample_index = self.grid.index(self.coords, SAMPLE_AXES)
        everywhere = self.grid.split()
        self._groups = {everywhere: world}
        self.groups = {everywhere: world} if everywhere else {}
        """The groups of several ranks that exist so far, by the axes along which they differ."""
        self._asked: dict[tuple[str, ...], Transport] = {}
        self.sample = self._split_off(world, AXES, self.grid.split(SAMPLE_AXES))
        self.data = self.group(("data",))
        if world.mixes:
            self._refuse_mixed_samples()
        self.ranks_per_host = max(Counter(hosts).values())
        """Number of ranks on the host that has most: they compute at the same time."""
        self.ranks_per_core = _ranks_per_core(world, hosts)
        """More than 1 if ranks share cores: then work that all of them repeat costs more."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # what holds a mesh, such as a model that is copied, has the same ranks

    def _refuse_mixed_samples(self) -> None:
        """Refuses sample groups on unequal devices, whose exchanges have different forms."""
        mixed = torch.tensor([self.sample.mixes])
        self.world.all_reduce(mixed)
        if mixed:
            raise NotSupported(
                f"ranks that hold one sample, of {self.grid}, are on unequal devices: only the "
                "data axis can join such ranks"
            )

    def __repr__(self) -> str:
        return f"Mesh({self.grid}, rank {self.rank} of {self.size}, {self.world.name})"

    @property
    def data_size(self) -> int:
        """Number of sample groups that the mesh has."""
        return self.grid.size(("data",))

    @property
    def data_index(self) -> int:
        """Index that this rank's sample group has."""
        return self.coords["data"]

    @property
    def spatial(self) -> tuple[int, int, int]:
        """Number of parts into which depth, height and width are cut."""
        depth, height, width = (self.grid.size((axis,)) for axis in SPATIAL_AXES)
        return depth, height, width

    def group(self, axes: Sequence[str]) -> Transport:
        """Returns the transport over the ranks that differ from this one along `axes` only.

        A group costs memory, especially on devices, so it is created on first use. This is
        collective over the sample group, or over all ranks if the data axis is among `axes`.
        `grid.size` returns the size of a group without creating it.
        """
        axes = tuple(axes)
        found = self._asked.get(axes)
        if found is None:
            split = self.grid.split(axes)
            inside = "data" not in split
            parent, parent_axes = (self.sample, SAMPLE_AXES) if inside else (self.world, AXES)
            found = self._asked[axes] = self._split_off(parent, parent_axes, split)
        return found

    @property
    def transports(self) -> list[Transport]:
        """The transports of all groups that exist so far."""
        return list(self._groups.values())

    def _split_off(
        self, parent: Transport, parent_axes: tuple[str, ...], split: tuple[str, ...]
    ) -> Transport:
        """Returns the group along the axes `split`, created once; collective over its parent."""
        if split not in self._groups:
            others = tuple(a for a in parent_axes if a not in split)
            color = self.grid.index(self.coords, others)
            self._groups[split] = parent.split(color, self.rank)
            if split:
                self.groups[split] = self._groups[split]
        return self._groups[split]


def counts_of(
    data: int | None, spatial: Sequence[int], seed: int
) -> tuple[int | None, tuple[int, ...], int]:
    """Converts arguments of a mesh, of any integer types, to ints.

    Raises:
        UsageError: an argument has another type, or `spatial` is not three counts >= 1.
    """
    try:
        found = tuple(_whole(n) for n in spatial)
    except TypeError:
        found = ()
    if len(found) != 3 or any(n < 1 for n in found):
        raise UsageError(f"spatial={spatial!r}: expected three counts >= 1 (depth, height, width)")
    for name, given in (("data", data), ("seed", seed)):
        if given is not None and (isinstance(given, bool) or not hasattr(given, "__index__")):
            raise UsageError(f"{name}={given!r}: expected a whole number")
    return None if data is None else operator.index(data), found, operator.index(seed)


def _whole(given: SupportsIndex) -> int:
    """Returns a number of any integer type as an int.

    Raises:
        TypeError: it has another type; True is not the number 1.
    """
    if isinstance(given, bool):
        raise TypeError
    return int(operator.index(given))


def counts_along(axes: Mapping[str, int]) -> dict[str, int]:
    """Converts the numbers of ranks along further axes, of any integer types, to ints.

    Raises:
        UsageError: an axis does not exist, or its count is not an integer >= 1.
    """
    if not isinstance(axes, Mapping) or not axes.keys() <= OTHER_AXES.keys():
        raise UsageError(
            f"axes={axes!r}: expected counts of {', '.join(OTHER_AXES)}; data and spatial are "
            "arguments of their own"
        )
    counts = {}
    for axis, given in axes.items():
        with suppress(TypeError):
            counts[axis] = _whole(given)
        if counts.get(axis, 0) < 1:
            raise UsageError(f"{axis}={given!r}: expected a count >= 1")
    return counts


def _fit(world: int, data: int | None, spatial: tuple[int, ...], more: Mapping[str, int]) -> Grid:
    group = math.prod((*spatial, *more.values()))
    given = f"spatial={'×'.join(map(str, spatial))}"
    given += "".join(f" × {axis} {size}" for axis, size in more.items())
    given += f" needs {group} ranks a sample"
    if data is None:
        if world % group:
            started = "1 rank was" if world == 1 else f"{world} ranks were"
            raise UsageError(
                f"{given}, but {started} started; possible are multiples of {group}, "
                f"or a split into {' or '.join(str(d) for d in _divisors(world))}"
            )
        data = world // group
    if data < 1 or data * group != world:
        axes = " × ".join(a for a in AXES if a in more or a not in OTHER_AXES)
        raise UsageError(
            f"data={data} with {given}: {data * group} ranks in all, but {world} were started; "
            f"start {max(data, 1) * group}, or choose {axes} = {world}"
        )
    return Grid.of({"data": data, **dict(zip(SPATIAL_AXES, spatial, strict=True)), **more})


def _check_shares(
    grid: Grid, shares: Mapping[str, Sequence[float]]
) -> dict[str, tuple[float, ...]]:
    if not isinstance(shares, Mapping):
        raise UsageError(f'shares={shares!r}: expected parts by axis, as in {{"depth": (2, 1)}}')
    found = {}
    for axis, given in shares.items():
        if axis not in AXES:
            raise UsageError(f"shares of {axis!r}: expected one of {', '.join(AXES)}")
        parts = grid.size((axis,))
        is_list = isinstance(given, Iterable) and not isinstance(given, Mapping)
        numbers = list(given) if is_list else []
        if len(numbers) != parts or not all(map(_is_share, numbers)):
            raise UsageError(
                f"shares of {axis} {given!r}: expected {parts} positive numbers, one per part"
            )
        found[axis] = tuple(map(float, numbers))
    return found


def _is_share(number: object) -> bool:
    if not isinstance(number, Real):
        return False
    with suppress(OverflowError):
        return 0 < float(number) < math.inf
    return False


def _compare(
    world: Transport, grid: Grid, shares: Mapping[str, tuple[float, ...]]
) -> tuple[list[str], Hardware]:
    """Compares the mesh between all ranks. Collective.

    Returns:
        The hosts of all ranks, and the hardware of rank 0.

    Raises:
        UsageError: ranks make different meshes; the same error on all of them.
    """
    kept = kept_hardware() if world.rank == 0 else None
    of_rank = [socket.gethostname(), None if kept is None else asdict(kept)]
    mine = [*of_rank, str(grid), sorted(shares.items())]
    found = world.all_gather_json(mine)
    for rank, (_, _, *mesh) in enumerate(found):
        if mesh != found[0][2:]:
            here, there = (f"{axes}, shares {dict(given)}" for axes, given in (found[0][2:], mesh))
            raise UsageError(
                f"the mesh differs between the ranks: {here} on rank 0, {there} on rank {rank}"
            )
    first = found[0][1]
    return [host for host, *_ in found], CPU if first is None else hardware_of(first)


def _ranks_per_core(world: Transport, hosts: Sequence[str]) -> float:
    """Returns the ranks per core of the fullest machine, the same number on all ranks."""
    mine = hosts.count(hosts[world.rank]) / (os.cpu_count() or 1)
    most = torch.tensor([mine], dtype=torch.float64)
    world.all_reduce(most, "max")
    return float(most)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
