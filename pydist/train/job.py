"""Groups the ranks of a run: those of one mesh, or of several stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydist.stages import Stages

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.mesh import Mesh


@dataclass(frozen=True)
class Job:
    """Ranks that a run uses.

    Attributes:
        world: the transport over all ranks.
        mesh: the mesh of this rank, whose blocks of the data it reads; in stages its stage's.
        stages: the stages, if the network is divided into stages.
    """

    world: Transport
    mesh: Mesh
    stages: Stages | None = None

    @staticmethod
    def of(ranks: Mesh | Stages) -> Job:
        """Returns the job on a mesh, or in stages."""
        if isinstance(ranks, Stages):
            return Job(ranks.world, ranks.mesh, ranks)
        return Job(ranks.world, ranks)

    def __str__(self) -> str:
        size = self.world.size
        if self.stages is not None:
            grids = " + ".join(str(mesh.grid) for mesh in self.stages.meshes)
            return f"{size} ranks in {self.stages.count} stages: {grids}"
        return f"{size} ranks: {self.mesh.grid}" if size > 1 else "1 rank"

    @property
    def writer(self) -> int:
        """The rank that writes the files, the first of those with the network's output."""
        return self.with_output(0)

    def with_output(self, data_index: int) -> int:
        """Returns the first rank that has the network's output for a sample group."""
        if self.stages is None:
            return self.mesh.sample_size * data_index
        return self.stages.meshes[self.stages.order[-1]].rank(data_index, 0)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the files."""
        return self.world.rank == self.writer

    @property
    def ranks_a_sample(self) -> int:
        """Number of ranks through which a sample goes, in all stages."""
        return self.world.size // self.mesh.data_size
