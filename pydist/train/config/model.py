"""Defines the table "model" of a configuration: one dataclass for each network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from pydist.errors import UsageError
from pydist.registry import MODELS, Registry
from pydist.train.config.settings import Chosen, Count, Flag, Fraction
from pydist.train.config.train import TrainConfig


@dataclass(frozen=True)
class ModelConfig(Chosen):
    """Configuration of the network, which determines the task; `name` is in `pydist.registry`."""

    registry: ClassVar[Registry] = MODELS
    default: ClassVar[str] = "cosmoflow"
    losses: ClassVar[tuple[str, ...]] = ()
    """Possible values of `train.loss`; the first one is the default."""
    task: ClassVar[str]
    """The task as "module:class", see `pydist.train.tasks.Task`. Its module imports torch, which
    this one does not."""

    name: str
    statistics: Literal["global", "group", "rank"] = "global"
    """Samples over which batch norm computes statistics; "global" gives one device's result."""

    @property
    def path_of_task(self) -> str:
        """Path of the class that implements the task, as "module:class"."""
        return self.task

    @classmethod
    def _name_of(cls, table: Any) -> Any:
        if isinstance(table, dict) and "factory" in table:
            return table.get("name", "factory")
        return super()._name_of(table)

    def loss(self, train: TrainConfig) -> str:
        """Returns the name of the loss.

        Raises:
            UsageError: the network does not support the loss.
        """
        if train.loss not in (names := ("auto", *self.losses)):
            raise UsageError(
                f"train.loss = {train.loss!r}: possible with model.name = {self.name!r} are "
                f"{', '.join(names)}"
            )
        return self.losses[0] if train.loss == "auto" else train.loss


@dataclass(frozen=True)
class CosmoFlowConfig(ModelConfig):
    """Configuration of CosmoFlow, which predicts the parameters of a universe."""

    losses: ClassVar[tuple[str, ...]] = ("mse",)
    task: ClassVar[str] = "pydist.train.tasks.regression:CosmoFlowRegression"

    name: Literal["cosmoflow"] = "cosmoflow"
    """The network, which decides what is trained: "cosmoflow", or "unet3d" for segmentation."""
    variant: Literal["paper", "mlperf"] = "paper"
    """Variant of CosmoFlow: as in the paper, or as in the MLPerf HPC benchmark."""
    width: Literal[32, 64, 128, 256, 512] = 128
    """Edge of the input cube in voxels."""
    batch_norm: Flag = False
    """Batch normalization between convolution and activation (variant "paper")."""
    batch_norm_momentum: Fraction = 0.001
    """Weight of a batch in its running statistics; a short run needs more, such as 0.1."""
    dropout: Fraction | None = None
    """Dropout probability; by default the variant's."""


@dataclass(frozen=True)
class UNet3dConfig(ModelConfig):
    """Configuration of the 3D U-Net, which predicts the class of each voxel of a volume."""

    losses: ClassVar[tuple[str, ...]] = ("cross_entropy", "dice", "dice_ce")
    task: ClassVar[str] = "pydist.train.tasks.segmentation:UNet3dSegmentation"

    name: Literal["unet3d"] = "unet3d"
    """The network, which decides what is trained: "unet3d" for segmentation, or "cosmoflow"."""
    features: Count = 64
    """Channels of the first level; each level doubles them. The paper has 64."""
    levels: Annotated[int, Field(ge=1, le=16, strict=True)] = 3
    """Number of times that the width is halved."""


def _known_task(text: str) -> str:
    if text in TASKS or ":" in text:
        return text
    raise PydanticCustomError(
        "task",
        "possible are {names}, or a class as FILE.py:NAME or MODULE:NAME",
        {"names": ", ".join(TASKS)},
    )


def _place_of(text: str) -> str:
    where, _, name = text.rpartition(":")
    if where and name:
        return text
    raise PydanticCustomError("place", "expected FILE.py:NAME or MODULE:NAME", {})


TASKS = {
    "segmentation": ("cross_entropy", "dice", "dice_ce"),
    "regression": ("mse",),
    "classification": ("cross_entropy",),
}
"""The tasks for any network, with their losses; the first one is the default."""


@dataclass(frozen=True)
class FactoryConfig(ModelConfig):
    """Configuration of any network, which a function or a class makes."""

    name: Literal["factory"] = "factory"
    """The network: one that `factory` makes."""
    factory: Annotated[str, AfterValidator(_place_of)] = field(kw_only=True)
    """Function or class that makes the network, such as "nets.py:make" (relative to the working
    folder) or "monai.networks.nets:UNet"."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments by name. `in_channels` (or `input_channels`) and `out_channels` (or
    `num_classes`, `classes`, `outputs`) are those of the data set, unless they are given."""
    # An instance variable here, as the user chooses it.
    task: Annotated[str, AfterValidator(_known_task)] = "segmentation"  # type: ignore[misc]
    """What is trained: "segmentation" (the class of each voxel), "regression" (values of a sample),
    "classification" (the class of a sample), or a class such as "mine.py:MyTask"
    (`pydist.train.tasks.Task`)."""
    multiple: Count = 1
    """Divisor of the extents of volumes that the network needs, such as 16 for four halvings."""

    @property
    def path_of_task(self) -> str:
        """Path of the class that implements the task, as "module:class"."""
        known = self.task in TASKS
        return f"pydist.train.tasks.factory:Any{self.task.title()}" if known else self.task

    def loss(self, train: TrainConfig) -> str:
        """Returns the name of the loss; that of a task of the user's own is not checked.

        Raises:
            UsageError: the task does not have the loss.
        """
        if self.task not in TASKS:
            return train.loss
        losses = TASKS[self.task]
        if train.loss not in ("auto", *losses):
            raise UsageError(
                f"train.loss = {train.loss!r}: possible with model.task = {self.task!r} are auto, "
                f"{', '.join(losses)}"
            )
        return losses[0] if train.loss == "auto" else train.loss
