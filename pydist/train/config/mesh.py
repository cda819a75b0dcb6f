"""Defines the table "mesh" of a configuration: axes and stages of the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from pydist.grid import AXES, SPATIAL_AXES
from pydist.registry import transport_names
from pydist.train.config.settings import (
    Count,
    CountOrZero,
    Flag,
    Positive,
    Table,
    counts_of_axes,
    with_axes,
)  # fmt: skip


def _known_transport(name: str) -> str:
    if name not in (names := transport_names()):
        raise PydanticCustomError("transport", "possible are {names}", {"names": ", ".join(names)})
    return name


Shares = Annotated[tuple[Positive, ...], Field(min_length=1)]


@dataclass(frozen=True)
@with_axes("Parts of {}.", Shares | None, None)
class SharesConfig(Table):
    """Parts of an axis that ranks of unequal speed get, one number per part, in proportion.

    `pydist balance` measures them. Without numbers the parts of an axis are even.
    """

    data: Shares | None = None
    """Samples of a batch for each sample group."""
    depth: Shares | None = None
    """Parts of the depth."""
    height: Shares | None = None
    """Parts of the height."""
    width: Shares | None = None
    """Parts of the width."""

    @property
    def given(self) -> dict[str, tuple[float, ...]]:
        """The shares of the axes that have some."""
        return {axis: shares for axis, shares in vars(self).items() if shares is not None}


@dataclass(frozen=True)
@with_axes("Number of parts of {}.", Count, 1)
class StageConfig(Table):
    """Configuration of the ranks of one stage, which has a mesh of its own."""

    spatial: tuple[Count, Count, Count] = (1, 1, 1)
    """Number of parts along depth, height and width of a sample."""
    shares: SharesConfig = field(default_factory=SharesConfig)
    """Unequal parts of the axes. Those of `data` are given to the mesh, for all stages."""

    @property
    def axes(self) -> dict[str, Any]:
        """Numbers of parts along other axes, which `pydist.init` takes by name."""
        return counts_of_axes(self)


NUMBER_OF_STAGES, LIST_OF_STAGES = "(a number)", "(a list)"
"""Names that pydantic adds to the location of an error in `mesh.stages`."""


def _kind_of_stages(given: Any) -> str:
    return LIST_OF_STAGES if isinstance(given, list | tuple) else NUMBER_OF_STAGES


StagesConfig = Annotated[
    Annotated[Count, Tag(NUMBER_OF_STAGES)]
    | Annotated[tuple[StageConfig, ...], Tag(LIST_OF_STAGES)],
    Discriminator(_kind_of_stages),
]


def _kind_of_spatial(given: Any) -> str:
    return "(auto)" if isinstance(given, str) else "(numbers)"


SpatialConfig = Annotated[
    Annotated[tuple[Count, Count, Count], Tag("(numbers)")]
    | Annotated[Literal["auto"], Tag("(auto)")],
    Discriminator(_kind_of_spatial),
]


@dataclass(frozen=True)
class MeshConfig(StageConfig):
    """Table that configures the ranks: a grid, or one for each stage of the network."""

    spatial: SpatialConfig = (1, 1, 1)  # type: ignore[assignment]
    """Number of parts along depth, height and width of a sample; "auto" takes those that `pydist
    plan` predicts to be fastest of those that fit in memory, and of `data` if it is not given."""
    data: Count | None = None
    """Number of sample groups; by default as many as the ranks allow."""
    rebalance: Literal[AXES] | None = None  # type: ignore[valid-type]
    """Axis whose parts change at the end of an epoch, if its ranks' speeds have changed so that
    other parts save 10 % or more of the busiest rank's time."""
    sharded_weights: Flag = False
    """Whether ranks along the channel axis store slices of wide layers' weights, not whole ones."""
    stages: StagesConfig | None = None
    """Stages of the network (`pydist.pipeline`): their number, for equal ones of this grid, or a
    list with the spatial, shares and other axes of each, such as [{spatial = [2, 1, 1]}, {}]."""
    micro_batches: Count = 1
    """Parts into which stages divide a group's batch."""
    schedule: Literal["gpipe", "1f1b", "gems", "zero-bubble"] = "1f1b"
    """Order of the micro-batches in stages; "gems" goes back and forth through their meshes."""
    order: tuple[CountOrZero, ...] | None = None
    """The mesh of each stage, of those in `stages`, if meshes run several, such as [0, 1, 0, 1]."""
    running_statistics: Literal["micro_batch", "batch"] = "micro_batch"
    """When batch norms in stages change running statistics: in each micro-batch, or once a step."""
    balance: Literal["time", "memory"] = "time"
    """What stages are balanced by: the largest stage gets the least time, or the least memory, of
    activations, gradients and the optimizer's state."""
    cuts: tuple[str, ...] | None = None
    """Modules at which the stages from the second on begin, instead of a balance."""
    recompute: Flag = False
    """Whether stages compute activations again in backward, instead of keeping them."""
    transport: Annotated[str, AfterValidator(_known_transport)] = "auto"
    """Communication between ranks. "nccl", "ipc", "cuda-mpi", and "cuda", which chooses one, carry
    the memory of CUDA devices as well; "host" follows the launcher and carries only host memory;
    "auto" is "nccl" where each of several ranks has a device of its own, else "host". "staged"
    joins ranks with and without devices along the data axis, through host memory. Others are "mpi",
    "c10d", "local", and those that installed packages add."""

    def parts(self, ranks: int | None = None) -> dict[str, int]:
        """Returns the numbers of parts by axis; of "data" if it or the number of ranks is given.

        Without the spatial axes if they are "auto".
        """
        spatial = () if self.spatial == "auto" else self.spatial
        parts = dict(zip(SPATIAL_AXES, spatial, strict=bool(spatial))) | self.axes
        groups = self.data
        if groups is None and ranks is not None:
            groups = ranks // math.prod(parts.values())
        return parts if groups is None else {"data": groups, **parts}
