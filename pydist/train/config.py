"""Defines the configuration of a training run: one dataclass per table of the file.

They are plain dataclasses, so that library users can build them in code; the file and the command
line are checked against the same annotations (`pydist.train.config_io`). Nothing here imports
torch, so that `pydist train --help` answers quickly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from pydist.data.augment.options import AugmentOptions, with_preset
from pydist.data.mpi_io import MpiIo
from pydist.data.store.options import StoreOptions
from pydist.errors import UsageError
from pydist.grid import AXES, SPATIAL_AXES
from pydist.registry import MODELS, Registry, transport_names
from pydist.train.batch_schedules import BatchScheduleConfig
from pydist.train.gradients import GradientsConfig
from pydist.train.optimizers import (
    AdamConfig,
    LambConfig,
    LarsConfig,
    LayerwiseConfig,
    OptimizerConfig,
    SgdConfig,
)  # fmt: skip
from pydist.train.settings import (
    LARGEST,
    Chosen,
    Count,
    CountOrZero,
    Flag,
    Fraction,
    Number,
    Positive,
    Seed,
    Size,
    Table,
    Weight,
    counts_of_axes,
    with_axes,
)  # fmt: skip

__all__ = [
    "AdamConfig", "BatchScheduleConfig", "CheckpointConfig", "Config", "CosmoFlowConfig",
    "DataConfig", "FactoryConfig", "LambConfig", "LarsConfig", "LayerwiseConfig", "MeshConfig",
    "ModelConfig", "OptimizerConfig", "OutputConfig", "SgdConfig", "SharesConfig",
    "StageConfig", "StagesConfig", "TrainConfig", "UNet3dConfig",
]  # fmt: skip


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


def _completed(table: Any) -> Any:
    """Replaces the name of a preset of augmentation by its settings."""
    try:
        return with_preset(table)
    except UsageError as error:
        raise PydanticCustomError("preset", "{why}", {"why": str(error)}) from None


@dataclass(frozen=True)
class DataConfig(Table):
    """Table that configures the data set."""

    path: Path = Path("data")
    """Folder of the data set, as `pydist data universes`, `nifti` and `ct` write it."""
    normalize: Literal["none", "log1p", "mean", "standardize", "window", "ct"] = "none"
    """Normalization of particle counts n: none (the paper), log(1 + n) (MLPerf), n over its mean,
    or log(1 + n) minus its mean, over its standard deviation; or of intensities: "window" maps
    `window` to [0, 1], "ct" is nnU-Net's scheme for CT."""
    window: tuple[Number, Number] | None = None
    """Lowest and highest intensity, in Hounsfield units for CT."""
    prefetch: Count = 2
    """Batches that are read ahead in the background."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """Whether a sample with NaN, infinite values or damaged bytes ends the run: "skip" trains on
    the next good sample instead, and validates without it, while at most 1 % are bad."""
    untrusted: bool = False
    """Whether another process with limited memory reads the files: a file that crashes a library is
    then an error that names it. Each block is copied once more."""
    mpi_io: bool = False
    """Whether HDF5 files are read by MPI-IO, for which h5py must be built with the site's MPI."""
    store: Literal["off", "memory"] = "off"
    """Whether the ranks' memory keeps the samples: "memory" holds each block once, on the rank that
    reads it first. From the second epoch on ranks receive blocks from one another, and no file is
    read."""
    store_memory: Size | None = None
    """Memory of each rank for `store`, such as "4GB", training and validation set together; the
    rest is read from files in each epoch. By default there is no limit."""
    store_disk: Size | None = None
    """Bytes of samples that each rank writes to disk beyond its memory, before compression."""
    store_folder: Path | None = None
    """Folder for samples on disk, on a disk of each machine."""
    store_codec: Literal["raw", "zstd", "lz4", "blosc"] = "raw"
    """Compression of the samples on disk, of each block that gets smaller by it."""
    store_reuse: Flag = False
    """Whether samples stay on disk, those in memory as well, so that the next run reads no file."""
    store_preload: Flag = False
    """Whether all samples are read before the first step."""
    augment: Annotated[AugmentOptions, BeforeValidator(_completed)] = field(
        default_factory=AugmentOptions
    )
    """Random changes of the training samples, in each epoch anew; "nnunet", or a table with
    preset = "nnunet" and changes of it, is nnU-Net's default."""

    @property
    def store_options(self) -> StoreOptions:
        """Settings that the store gets."""
        return StoreOptions(**{name: getattr(self, name) for name in vars(StoreOptions())})

    def check(self) -> None:
        """Checks that the settings suit each other.

        Raises:
            UsageError: they do not.
        """
        if self.mpi_io and self.untrusted:
            raise UsageError("data.mpi_io reads in this process, data.untrusted in another one")
        if self.mpi_io:
            MpiIo()  # refuses an h5py without it
        self.store_options.check("data.")
        self.augment.check("data.augment.")


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
    """What stages are balanced by: the largest stage gets the least time, or the least memory."""
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


@dataclass(frozen=True)
class TrainConfig(Table):
    """Table that configures the training loop."""

    epochs: Count = 100
    """Passes over the training set."""
    steps: Count | None = None
    """Number of steps after which to stop, if that is before the last epoch."""
    batch: Count = 4
    """Samples per step, over all sample groups; with `batch_schedule`, of the first steps."""
    accumulate: Count = 1
    """Passes (forward and backward) over a step's batch, which accumulate its gradient: the same
    step with less memory. Batch norm forms its statistics in each pass."""
    batch_schedule: BatchScheduleConfig = field(default_factory=BatchScheduleConfig)
    """Growth of the batch while the run trains."""
    loss: str = "auto"
    """Loss: by default the squared error for CosmoFlow, cross-entropy for the U-Net (as in the
    paper); "dice" is the mean soft Dice of the classes except background, "dice_ce" the sum of the
    two."""
    class_weights: Annotated[tuple[Weight, ...], Field(min_length=1)] | None = None
    """Weight of each class in the cross-entropy, in the order of the labels, at most 1e6. The mean
    is over the weights of all voxels of the global batch, independent of the distribution."""
    ignore_label: CountOrZero | None = None
    """Label of voxels that are excluded from the loss and the scores: one of the classes, or
    another number, such as 255."""
    seed: Seed = 0
    """Seed of all random numbers: weights, order of the samples, dropout, augmentation."""
    clip_norm: Positive | None = None
    """Norm to which larger gradients are scaled down."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision."""
    gradients: GradientsConfig = "dense"
    """How sample groups average gradients: "dense"; rounded to "fp16" or "bf16"; in two levels, by
    "torus" or "hierarchical" over hosts; compressed, by "powersgd" or "dgc"; or "post_local". Forms
    with settings also as a table, such as {name = "powersgd", rank = 4}."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the network; "auto" is CUDA where each rank has a device and the transport carries
    its memory."""
    channels_last: Literal["auto", "always", "never"] = "auto"
    """Whether input and weights have a channels-last layout; "auto" does so on CUDA devices with
    mixed precision. On CPUs each layer autotunes its layout."""
    tuning: Path | None = None
    """File `tuning.json` of an earlier run, whose choices of kernels this run uses: no autotuning,
    and bit-identical results."""
    cuda_graph: Literal["auto", "always", "never"] = "auto"
    """Whether to capture complete steps as one CUDA graph; "auto" does on one rank, or reports why
    not. On several ranks use "always": a capture that fails there ends the job, with a reason."""
    validate_every: CountOrZero = 1
    """Epochs between validations; 0 never validates."""


Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True)
class CheckpointConfig(Table):
    """Table that configures checkpoints."""

    every: CountOrZero = 0
    """Steps between checkpoints; 0 saves at the end of every epoch."""
    keep: Annotated[int, Field(ge=2, le=LARGEST, strict=True)] = 2
    """Number of latest checkpoints to keep."""
    resume: Resume = "auto"
    """Whether to resume from the last checkpoint: "auto" if there is one, "must" with an error
    without one, "never" to start from scratch."""
    on_error: Literal["stop", "warn"] = "stop"
    """Whether a checkpoint that can't be written (disk full) ends the run."""


@dataclass(frozen=True)
class OutputConfig(Table):
    """Table that configures the run's output."""

    folder: Path = Path("runs/cosmoflow")
    """Folder of config.toml, log.jsonl, ckpt/ and pictures."""
    plot: Flag = True
    """Whether to draw progress.png (loss, measures, learning rate) and a sample in each epoch, and
    result.png at the end, if matplotlib is installed."""
    tensorboard: Flag = False
    """Whether to write the curves for TensorBoard as well, to the folder "tensorboard"."""


@dataclass(frozen=True)
class Config(Table):
    """Tables that configure a training run."""

    model: ModelConfig = field(default_factory=CosmoFlowConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
