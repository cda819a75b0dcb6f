"""What a training run is made of: one dataclass a table of the configuration file.

Plain dataclasses, so that a library user builds them in code; the file and the command line are
checked against the same annotations (`pydist.train.config_io`). Nothing here imports torch:
`pydist train --help` answers at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pydist.errors import UsageError
from pydist.registry import MODELS, OPTIMIZERS, Registry, transport_names

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

# Strict: 1 is no flag and "8" no number, in a file as little as in Python.
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Bounded: products of a few of them and of what torch counts stay within 64 bits.
_LARGEST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=_LARGEST, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, le=_LARGEST, strict=True)]
Epochs = Annotated[float, Field(gt=0, le=_LARGEST, strict=True, allow_inf_nan=False)]
EpochsOrZero = Annotated[float, Field(ge=0, le=_LARGEST, strict=True, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
Weight = Annotated[float, Field(ge=0, le=1e6, strict=True)]


class _Table:
    """A table of the configuration: unknown keys are errors."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class _Chosen(_Table):
    """A table whose `name` chooses its class among those of a registry."""

    registry: ClassVar[Registry]
    default: ClassVar[str]
    """The name, where the table has none."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if "registry" not in cls.__dict__:
            return handler(source)  # one of the classes
        classes = {}
        for name in cls.registry.names:
            with contextlib.suppress(UsageError):  # of a package that can't be imported
                classes[name] = handler.generate_schema(cls.registry.get(name))
        return core_schema.tagged_union_schema(classes, discriminator=cls._name_of)

    @classmethod
    def _name_of(cls, table: Any) -> Any:
        if isinstance(table, dict):
            return table.get("name", cls.default)
        return getattr(table, "name", None)


@dataclass(frozen=True)
class ModelConfig(_Chosen):
    """The network, and with it what is trained; `name` says which one (`pydist.registry`)."""

    registry: ClassVar[Registry] = MODELS
    default: ClassVar[str] = "cosmoflow"
    losses: ClassVar[tuple[str, ...]] = ()
    """What `train.loss` may be; the first is "auto"."""
    task: ClassVar[str]
    """What is trained, as "module:class": see `pydist.train.tasks.Task`. Its module imports torch,
    which this one does not."""

    name: str
    statistics: Literal["global", "group", "rank"] = "global"
    """Over which samples batch norm takes its statistics; "global" is one device's result."""

    def loss(self, train: TrainConfig) -> str:
        """The name of the loss.

        Raises:
            UsageError: it is none of this network's.
        """
        if train.loss not in (names := ("auto", *self.losses)):
            raise UsageError(
                f"train.loss = {train.loss!r}: possible with model.name = {self.name!r} are "
                f"{', '.join(names)}"
            )
        return self.losses[0] if train.loss == "auto" else train.loss


@dataclass(frozen=True)
class CosmoFlowConfig(ModelConfig):
    """CosmoFlow: a universe in, its parameters out."""

    losses: ClassVar[tuple[str, ...]] = ("mse",)
    task: ClassVar[str] = "pydist.train.tasks.regression:Regression"

    name: Literal["cosmoflow"] = "cosmoflow"
    """The network, which decides what is trained: "cosmoflow", or "unet3d" for segmentation."""
    variant: Literal["paper", "mlperf"] = "paper"
    """Which CosmoFlow: that of the paper, or that of the MLPerf HPC benchmark."""
    width: Literal[32, 64, 128, 256, 512] = 128
    """Edge of the input cube in voxels."""
    batch_norm: Flag = False
    """Batch normalization between convolution and activation (variant "paper")."""
    dropout: Fraction | None = None
    """Probability of zeroing; by default the variant's own."""


@dataclass(frozen=True)
class UNet3dConfig(ModelConfig):
    """3D U-Net: a volume in, a class for each of its voxels out."""

    losses: ClassVar[tuple[str, ...]] = ("cross_entropy", "dice", "dice_ce")
    task: ClassVar[str] = "pydist.train.tasks.segmentation:UNet3dSegmentation"

    name: Literal["unet3d"] = "unet3d"
    """The network, which decides what is trained: "unet3d" for segmentation, or "cosmoflow"."""
    features: Count = 64
    """Channels of the first level; they double from level to level. The paper has 64."""
    levels: Annotated[int, Field(ge=1, le=16, strict=True)] = 3
    """How often the width is halved."""


@dataclass(frozen=True)
class DataConfig(_Table):
    """The data set."""

    path: Path = Path("data")
    """Folder of the data set, as `pydist data universes`, `nifti` and `ct` write it."""
    normalize: Literal["none", "log1p", "mean", "standardize", "window", "ct"] = "none"
    """What is done to the particle counts n: nothing (the paper), log(1 + n) (MLPerf), n over its
    mean, or log(1 + n) less its mean over its standard deviation. And to intensities: "window" maps
    `window` to [0, 1], "ct" is nnU-Net's scheme for CT."""
    window: tuple[Number, Number] | None = None
    """Lowest and highest intensity, in Hounsfield units for CT."""
    prefetch: Count = 2
    """Batches that are read ahead in the background."""


def _known_transport(name: str) -> str:
    if name not in (names := transport_names()):
        raise PydanticCustomError("transport", "possible are {names}", {"names": ", ".join(names)})
    return name


@dataclass(frozen=True)
class MeshConfig(_Table):
    """The grid of ranks."""

    data: Count | None = None
    """Number of sample groups; by default as many as the ranks allow."""
    spatial: tuple[Count, Count, Count] = (1, 1, 1)
    """How often depth, height and width of a sample are split."""
    transport: Annotated[str, AfterValidator(_known_transport)] = "auto"
    """What carries the bytes between ranks. "nccl", "ipc", "cuda-mpi", and "cuda", which chooses,
    carry the memory of CUDA devices as well; "host" follows the launcher and carries none; "auto"
    is "nccl" where each of several ranks has a device of its own, else "host". Others are "mpi",
    "c10d", "local", and those that installed packages add."""


@dataclass(frozen=True)
class OptimizerConfig(_Chosen):
    """The optimizer and its learning rate; `name` says which one (`pydist.registry`)."""

    registry: ClassVar[Registry] = OPTIMIZERS
    default: ClassVar[str] = "adam"

    name: str
    lr: Positive = 1e-3
    """Learning rate after warm-up."""
    weight_decay: NotNegative = 0.0
    """L2 penalty."""
    warmup_epochs: EpochsOrZero = 0.0
    """Epochs over which the learning rate rises linearly from 1 % of `lr`."""
    decay_epochs: Epochs = 100.0
    """Epochs after warm-up over which the learning rate falls linearly to `end_lr`."""
    end_lr: NotNegative = 1e-7
    """Learning rate after decay."""
    sharded: Literal["auto", "always", "never"] = "auto"
    """Whether the ranks share the optimizer's step, each doing its own part of the parameters, with
    the same result; "auto" from a million parameters on. See `pydist.optim.sharded`."""

    def optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """The optimizer of a model's parameters, with this learning rate."""
        raise NotImplementedError


@dataclass(frozen=True)
class AdamConfig(OptimizerConfig):
    """Adam, with the settings of the CosmoFlow paper."""

    name: Literal["adam"] = "adam"
    """The optimizer: "adam", or "sgd" with momentum (MLPerf)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of Adam's averages."""
    eps: Positive = 1e-8
    """Added to Adam's denominator."""

    def optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """`torch.optim.Adam`."""
        from torch.optim import Adam

        return Adam(
            parameters, self.lr, self.betas, self.eps, weight_decay=self.weight_decay, fused=True
        )


@dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """SGD with momentum, as in MLPerf's CosmoFlow."""

    name: Literal["sgd"] = "sgd"
    """The optimizer: "sgd" with momentum, or "adam"."""
    momentum: Fraction = 0.9
    """Part of the last step that each step repeats."""

    def optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """`torch.optim.SGD`."""
        from torch.optim import SGD

        from pydist.optim.fused import start_momentum

        optimizer = SGD(
            parameters, self.lr, self.momentum, weight_decay=self.weight_decay, fused=True
        )
        if self.momentum:
            start_momentum(optimizer)
        return optimizer


@dataclass(frozen=True)
class TrainConfig(_Table):
    """The loop."""

    epochs: Count = 100
    """Passes over the training set."""
    steps: Count | None = None
    """Stop after so many steps, if that comes before the last epoch."""
    batch: Count = 4
    """Samples a step, over all sample groups."""
    loss: str = "auto"
    """What is minimised: by default the squared error for CosmoFlow, cross-entropy for the U-Net
    (as the paper); "dice" is the mean soft Dice of the classes but background, "dice_ce" the sum of
    the two."""
    class_weights: Annotated[tuple[Weight, ...], Field(min_length=1)] | None = None
    """Weight of each class in the cross-entropy, in the order of the labels, at most 1e6. The mean
    is over the weights of all voxels of the global batch, however they are spread over the
    ranks."""
    ignore_label: CountOrZero | None = None
    """Label of voxels that count neither in the loss nor in the scores: one of the classes, or a
    number that is none of them, such as 255."""
    seed: Seed = 0
    """Start of all random numbers: weights, order of the samples, dropout, augmentation."""
    clip_norm: Positive | None = None
    """Scale the gradient down to this norm where it is larger."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the network computes; "auto" is CUDA where each rank has a device and the transport
    carries its memory."""
    channels_last: Literal["auto", "always", "never"] = "auto"
    """Whether input and weights lie with the channels last; "auto" does so on CUDA devices with
    mixed precision. On CPUs the layers choose for themselves."""
    tuning: Path | None = None
    """A file `tuning.json` of an earlier run, whose choices of kernels this run takes: nothing is
    measured, and both give the same bits."""
    cuda_graph: Literal["auto", "always", "never"] = "auto"
    """Whether whole steps are captured as one CUDA graph; "auto" does it on one rank, or says why
    not. On several say "always": there a capture that fails midway ends the job, with a reason."""
    validate_every: CountOrZero = 1
    """Epochs between validations; 0 never validates."""


@dataclass(frozen=True)
class CheckpointConfig(_Table):
    """Checkpoints."""

    every: CountOrZero = 0
    """Steps between checkpoints; 0 saves at the end of every epoch."""
    keep: Annotated[int, Field(ge=2, le=_LARGEST, strict=True)] = 2
    """How many of the latest checkpoints stay."""
    resume: Literal["auto", "must", "never"] = "auto"
    """Go on from the last checkpoint if there is one, insist on one, or start afresh."""
    on_error: Literal["stop", "warn"] = "stop"
    """Whether a checkpoint that can't be written (disk full) ends the run."""


@dataclass(frozen=True)
class OutputConfig(_Table):
    """What the run writes."""

    folder: Path = Path("runs/cosmoflow")
    """Folder of config.toml, log.jsonl, result.png and ckpt/."""
    plot: Flag = True
    """Draw result.png at the end, if matplotlib is installed."""


@dataclass(frozen=True)
class Config(_Table):
    """One training run."""

    model: ModelConfig = field(default_factory=CosmoFlowConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
