"""What the training loop asks of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from pydist.data import Manifest, ShardDataset
    from pydist.data.loader import Batch


@dataclass(frozen=True)
class Validation:
    """What a validation found, equal on all ranks."""

    samples: int
    loss: float

    def figures(self) -> dict[str, Any]:
        """What the log says of it, besides the number of samples."""
        return {"loss": self.loss}


class Task(Protocol):
    """A network with its loss, what validation measures, and what is reported at the end."""

    @property
    def multiple(self) -> int | None:
        """What the extents of volumes are multiples of, where `pydist predict` can predict them.

        `None` for tasks that predict no classes of voxels.
        """
        ...

    def check(self, data: ShardDataset) -> None:
        """Raises `UsageError` if the network can't be trained on this data set."""
        ...

    def network(self, manifest: Manifest) -> nn.Module:
        """The network for a data set, with initial weights."""
        ...

    def expression(self, manifest: Manifest) -> str:
        """The same network, as one writes it in Python."""
        ...

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """The mean loss over the batch's samples, a scalar."""
        ...

    def measure(self, output: Tensor, batch: Batch) -> Tensor:
        """What validation keeps of each sample: [N, ...] float64, equal on the group's ranks."""
        ...

    def judge(self, rows: Tensor) -> Validation:
        """What all samples' rows, in the order of the data set, come to."""
        ...

    def write_results(self, folder: Path, data: ShardDataset, validation: Validation) -> None:
        """Writes the last validation's table. On rank 0."""
        ...

    def draw(
        self,
        folder: Path,
        curves: Mapping[str, Mapping[int, float]],
        data: ShardDataset,
        spatial: tuple[int, int, int],
    ) -> Path:
        """Draws `result.png` after `write_results`. On rank 0.

        Args:
            folder: the run's.
            curves: training loss by step, by the name of the run.
            data: the training set.
            spatial: how often depth, height and width were split.
        """
        ...


def call_of(network: type[nn.Module], arguments: Mapping[str, Any]) -> str:
    """A call as one writes it in Python."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{network.__module__}.{network.__name__}({given})"
