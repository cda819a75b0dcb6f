"""Describes the layout of a sharded tensor: the mesh axes of its dims, and where they are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydist.errors import UsageError
from pydist.grid import AXES, SAMPLE_AXES, axes_by_dim
from pydist.mesh import Mesh
from pydist.partition import Box, Partition, split_extent


@dataclass(frozen=True)
class Split:
    """Split that divides one dim over mesh axes at given points.

    Attributes:
        axes: names of the mesh axes, which cut the dim jointly, the last one fastest.
        partition: the split points, one part for each rank along the axes.
    """

    axes: tuple[str, ...]
    partition: Partition

    def scaled(self, extent: int) -> Split:
        """Returns the split of another extent, in the same proportions."""
        old = max(1, self.partition.extent)
        points = [(2 * p * extent + old) // (2 * old) for p in self.partition.points]
        return Split(self.axes, Partition([*points[:-1], extent]))

    def intervals(self, mesh: Mesh) -> list[tuple[int, int]]:
        """Returns the part of each rank of `mesh.group(axes)`, in the order of the group.

        A group's order is that of `AXES`, whichever axis cuts the dim fastest.
        """
        grid, ordered = mesh.grid, sorted(self.axes, key=AXES.index)
        places = (grid.coords(i, ordered) for i in range(self.partition.parts))
        return [self.partition.interval(grid.index(place, self.axes)) for place in places]


class Layout:
    """Layout that distributes a global tensor's elements over the ranks of a sample group.

    A dim without a split is complete on every rank. Ranks along axes that split no dim hold equal
    copies: `replicas` counts them.

    Args:
        mesh: the mesh whose sample group holds the tensor.
        shape: the global shape (that of the sample group's batch).
        splits: one entry per dim, `None` if the dim is not split.

    Raises:
        UsageError: a split names an axis twice, or does not fit the dim or the axes.
    """

    def __init__(self, mesh: Mesh, shape: Sequence[int], splits: Sequence[Split | None]) -> None:
        self.mesh = mesh
        self.shape = tuple(shape)
        self.splits = tuple(splits)
        self._key = (self.shape, self.splits)
        self._hash = hash(self._key)
        self._check()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Layout)
            and self._hash == other._hash
            and self._key == other._key
            and self.mesh is other.mesh
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        cut = ", ".join(
            f"dim {d} over {'×'.join(s.axes)} at {list(s.partition.points)}"
            for d, s in enumerate(self.splits)
            if s
        )
        return f"Layout({self.shape}, {cut or 'whole on every rank'})"

    @cached_property
    def replicas(self) -> int:
        """Number of ranks of the sample group that hold equal copies of an element."""
        return self.mesh.sample_size // self.mesh.grid.size(self.used_axes)

    @cached_property
    def used_axes(self) -> tuple[str, ...]:
        """The axes along which the tensor is cut."""
        used = {a for s in self.splits if s for a in s.axes}
        return tuple(a for a in SAMPLE_AXES if a in used)

    @cached_property
    def unused_axes(self) -> tuple[str, ...]:
        """The axes along which ranks of the sample group hold equal copies."""
        return tuple(a for a in SAMPLE_AXES if a not in self.used_axes)

    @cached_property
    def boxes(self) -> list[Box]:
        """Box that each rank of the sample group owns, in global indices."""
        return [self._box_at(i) for i in range(self.mesh.sample_size)]

    @property
    def box(self) -> Box:
        """Box that this rank owns, in global indices."""
        return self.boxes[self.mesh.sample_index]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape that this rank's shard has."""
        return tuple(self.box.shape) if self.shape else ()

    @property
    def split_dims(self) -> tuple[int, ...]:
        """The dims that are cut into more than one part."""
        return tuple(d for d, s in enumerate(self.splits) if s and s.partition.parts > 1)

    def part(self, dim: int, sample_index: int) -> int:
        """Returns the index of a rank's part of a dim; 0 if the dim is not split.

        Args:
            dim: the dim, 0 or above.
            sample_index: the rank's index in its sample group.
        """
        split, grid = self.splits[dim], self.mesh.grid
        return grid.index(grid.coords(sample_index, SAMPLE_AXES), split.axes) if split else 0

    def replace(
        self, shape: Sequence[int] | None = None, changes: Mapping[int, Split | None] | None = None
    ) -> Layout:
        """Returns a layout with another shape and some splits replaced.

        Args:
            shape: the new global shape; by default that of this layout.
            changes: the new split of some dims, by dim; `None` to cut a dim no longer.
        """
        splits = list(self.splits)
        for dim, split in (changes or {}).items():
            splits[dim] = split
        return Layout(self.mesh, self.shape if shape is None else shape, splits)

    def whole(self) -> Layout:
        """Returns the layout in which every rank has the full tensor."""
        return Layout(self.mesh, self.shape, (None,) * len(self.shape))

    def _box_at(self, sample_index: int) -> Box:
        lo, hi = [0] * len(self.shape), list(self.shape)
        for dim, split in enumerate(self.splits):
            if split is not None:
                lo[dim], hi[dim] = split.partition.interval(self.part(dim, sample_index))
        return Box(lo, hi)

    def _check(self) -> None:
        if len(self.splits) != len(self.shape):
            raise UsageError(f"{len(self.splits)} splits given for the shape {self.shape}")
        used = [a for s in self.splits if s for a in s.axes]
        if len(set(used)) != len(used) or not set(used) <= set(SAMPLE_AXES):
            raise UsageError(f"split over {used}: each of {SAMPLE_AXES} can be used once")
        for dim, split in enumerate(self.splits):
            if split is None:
                continue
            parts = self.mesh.grid.size(split.axes)
            if split.partition.extent != self.shape[dim] or split.partition.parts != parts:
                raise UsageError(
                    f"dim {dim} of {self.shape} can't be split at {split.partition.points}: "
                    f"{'×'.join(split.axes)} takes {parts} parts of an extent {self.shape[dim]}"
                )


def split_along(mesh: Mesh, extent: int, axis: str) -> Split | None:
    """Returns the split of an extent along a mesh axis, even or by the mesh's shares.

    Args:
        mesh: the mesh.
        extent: number of elements.
        axis: name of the mesh axis.

    Returns:
        The split; `None` if the axis has one rank.
    """
    return split_jointly(mesh, extent, (axis,))


def split_jointly(mesh: Mesh, extent: int, axes: tuple[str, ...]) -> Split | None:
    """Returns the split of an extent along several mesh axes, even, or by an only axis' shares.

    Args:
        mesh: the mesh.
        extent: number of elements.
        axes: names of the mesh axes, the last one fastest.

    Returns:
        The split; `None` if the axes have one rank.
    """
    parts = mesh.grid.size(axes)
    if parts == 1:
        return None
    shares = mesh.shares.get(axes[0]) if len(axes) == 1 else None
    return Split(axes, split_extent(extent, parts, shares))


def layout_for_sample(
    mesh: Mesh, shape: Sequence[int], dims: Mapping[int, str] | None = None
) -> Layout:
    """Returns the layout of a batch of samples, split over the mesh's spatial axes.

    Args:
        mesh: the mesh.
        shape: global shape; by default of volumes [N, C, D, H, W], images [N, C, H, W] or lines
            [N, C, W].
        dims: which dim is cut along which axis; by default that of its name, such as
            {2: "depth", 3: "height", 4: "width"} for volumes.

    Raises:
        UsageError: a dim does not exist, or the default is used for a shape of other dims.
    """
    if dims is None:
        if not 3 <= len(shape) <= 5:
            raise UsageError(
                f"shape {tuple(shape)}: [N, C, D, H, W] expected, [N, C, H, W] or [N, C, W]; name "
                'the dims to split otherwise, as in dims={2: "depth"}'
            )
        dims = axes_by_dim(len(shape) - 2)
    if not isinstance(dims, Mapping):
        raise UsageError(f'dims={dims!r}: expected which dim is cut where, as in {{2: "depth"}}')
    splits: list[Split | None] = [None] * len(shape)
    for dim, axis in dims.items():
        if not isinstance(dim, int) or not 0 <= dim < len(shape) or axis not in SAMPLE_AXES:
            raise UsageError(f"can't put dim {dim} of {tuple(shape)} on the axis {axis!r}")
        splits[dim] = split_along(mesh, shape[dim], axis)
    return Layout(mesh, shape, splits)
