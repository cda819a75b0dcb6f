"""Defines the tables "optimizer" of a configuration: one dataclass for each optimizer.

Nothing here imports torch, so that `pydist train --help` answers quickly.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydist.errors import UsageError
from pydist.registry import OPTIMIZERS, Registry
from pydist.train.config.settings import (
    Chosen,
    Count,
    CountOrZero,
    Epochs,
    EpochsOrZero,
    Flag,
    Fraction,
    NotNegative,
    Positive,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerConfig(Chosen):
    """Configuration of the optimizer and learning rate; `name` is in `pydist.registry`."""

    registry: ClassVar[Registry] = OPTIMIZERS
    default: ClassVar[str] = "adam"

    name: str
    lr: Positive = 1e-3
    """Learning rate after warm-up."""
    lr_batch: Count | None = None
    """Batch that `lr` and `end_lr` are for: they follow train.batch / lr_batch, see lr_scaling."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """How rates follow the batch: in proportion, or by the square root, as Adam and LAMB need."""
    weight_decay: NotNegative = 0.0
    """L2 penalty."""
    decayed: tuple[str, ...] = ("*",)
    """Patterns of the names of parameters with weight decay, such as "head.fc[12].weight"."""
    warmup_epochs: EpochsOrZero = 0.0
    """Epochs over which the learning rate rises linearly to `lr`."""
    warmup_start: NotNegative = 0.01
    """Learning rate at the beginning of the warm-up, as a factor of `lr`."""
    decay: Literal["linear", "polynomial", "cosine", "step", "none"] = "linear"
    """Form in which the learning rate falls after warm-up; "step" by `milestones`."""
    decay_epochs: Epochs = 100.0
    """Epochs after warm-up over which the learning rate falls to `end_lr`."""
    decay_power: Positive = 2.0
    """Power of the polynomial."""
    milestones: tuple[tuple[Epochs, NotNegative], ...] = ()
    """Epochs, warm-up included, and the factor of `lr` from then on."""
    end_lr: NotNegative = 1e-7
    """Learning rate after decay."""
    sharded: Literal["auto", "always", "never"] = "auto"
    """Whether to partition the optimizer over the ranks (ZeRO-1), with the same result; "auto" does
    from a million parameters on. See `pydist.optim.sharded`."""

    def check(self) -> None:
        """Checks that the settings suit each other.

        Raises:
            UsageError: they do not.
        """
        shown = [list(each) for each in self.milestones]
        places = [place for place, _ in self.milestones]
        if self.decay == "step" and not places:
            raise UsageError('optimizer.decay = "step" needs milestones, as in [[30.0, 0.1]]')
        if self.decay != "step" and places:
            raise UsageError(
                f'optimizer.milestones = {shown}: they are for decay = "step", and it is '
                f'"{self.decay}"'
            )
        if places != sorted(set(places)):
            raise UsageError(f"optimizer.milestones = {shown}: expected ascending epochs")
        if self.decay in ("linear", "polynomial", "cosine") and self.end_lr > self.lr:
            raise UsageError(
                f"optimizer.end_lr = {self.end_lr:g} is above optimizer.lr = {self.lr:g}, which "
                "decays to it"
            )

    def at(self, batch: int) -> OptimizerConfig:
        """Returns the settings with the learning rates for a batch."""
        scale = 1.0 if self.lr_batch is None else self.lr_factor(batch / self.lr_batch)
        return replace(self, lr=self.lr * scale, end_lr=self.end_lr * scale, lr_batch=None)

    def lr_factor(self, ratio: float) -> float:
        """Returns the factor of the learning rates at a batch that is larger by a ratio.

        The square root keeps the variance of Adam's steps, whose gradients are divided by their
        size (Malladi et al. 2022, arXiv 2205.10287).
        """
        return ratio if self.lr_scaling == "linear" else math.sqrt(ratio)

    def groups(self, model: nn.Module) -> list[Any]:
        """Returns the parameters of a model, in two groups if some have no weight decay.

        Raises:
            UsageError: a pattern of `decayed` fits no parameter.
        """
        if self.decayed == ("*",):
            return list(model.parameters())
        named = dict(model.named_parameters())
        decayed = set[str]()
        for pattern in self.decayed:
            found = fnmatch.filter(named, pattern)
            if not found:
                raise UsageError(
                    f"optimizer.decayed: {pattern!r} fits no parameter; there are, for example, "
                    f"{', '.join([*named][:3])}"
                )
            decayed.update(found)
        rest = [p for name, p in named.items() if name not in decayed]
        groups: list[dict[str, Any]] = [{"params": [named[n] for n in named if n in decayed]}]
        return [*groups, *([{"params": rest, "weight_decay": 0.0}] if rest else [])]

    def optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Creates the optimizer of parameters, or of groups of them, with this learning rate."""
        raise NotImplementedError

    def state(self) -> float:
        """Returns the bytes of the optimizer's state, relative to those of the parameters."""
        import torch

        parameter = torch.nn.Parameter(torch.zeros(8))
        optimizer = self.optimizer([parameter])
        parameter.grad = torch.zeros(8)
        optimizer.step()
        kept = [x for x in optimizer.state[parameter].values() if isinstance(x, torch.Tensor)]
        return sum(x.nbytes for x in kept if x.shape == parameter.shape) / parameter.nbytes


@dataclass(frozen=True)
class AdamConfig(OptimizerConfig):
    """Table that configures Adam, with the settings of the CosmoFlow paper."""

    name: Literal["adam"] = "adam"
    """The optimizer: "adam", "sgd" with momentum (MLPerf), "lars" or "lamb"."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of Adam's averages."""
    eps: Positive = 1e-8
    """Added to Adam's denominator."""

    def optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Creates `torch.optim.Adam`."""
        from torch.optim import Adam

        return Adam(
            parameters, self.lr, self.betas, self.eps, weight_decay=self.weight_decay, fused=True
        )


@dataclass(frozen=True)
class SgdConfig(OptimizerConfig):
    """Table that configures SGD with momentum, as in MLPerf's CosmoFlow."""

    name: Literal["sgd"] = "sgd"
    """The optimizer: "sgd" with momentum."""
    momentum: Fraction = 0.9
    """Fraction of the last step that each step repeats."""
    nesterov: Flag = False
    """Nesterov's form of momentum: with warm-up, the baseline for large batches."""
    form: Literal["torch", "paper"] = "torch"
    """Whether the velocity holds no learning rates, as in torch, or does, as in TensorFlow."""

    def check(self) -> None:
        """Refuses Nesterov without momentum; see `OptimizerConfig.check`."""
        super().check()
        _check_nesterov(self.nesterov, self.momentum)

    def optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Creates `torch.optim.SGD`, or LARS without ratios for the form that torch lacks."""
        from torch.optim import SGD

        from pydist.optim import LARS
        from pydist.optim.fused import start_momentum

        if self.form == "paper":
            return LARS(
                parameters, self.lr, self.momentum, self.weight_decay,
                nesterov=self.nesterov, exclude=None, adapt=False,
            )  # fmt: skip

        optimizer = SGD(
            parameters, self.lr, self.momentum, weight_decay=self.weight_decay,
            nesterov=self.nesterov, fused=True,
        )  # fmt: skip
        if self.momentum:
            start_momentum(optimizer)
        return optimizer


@dataclass(frozen=True)
class LayerwiseConfig(OptimizerConfig):
    """Table that configures an optimizer whose steps depend on norms of whole gradients.

    Such an optimizer is a `pydist.optim.layerwise.LayerwiseOptimizer`.
    """

    log_every: CountOrZero = 0
    """Steps between entries of the log with the norms and trust ratios of the layers; 0: none."""


@dataclass(frozen=True)
class LarsConfig(LayerwiseConfig):
    """Table that configures LARS, which is for large batches."""

    name: Literal["lars"] = "lars"
    """The optimizer: "lars"."""
    momentum: Fraction = 0.9
    """Fraction of the last step that each step repeats."""
    trust_coefficient: Positive = 0.001
    """Step of a layer, relative to the norm of its weight, at a learning rate of 1."""
    nesterov: Flag = False
    """Nesterov's form of momentum."""
    form: Literal["paper", "torch"] = "paper"
    """Whether the velocity holds learning rates, as in the paper, or not, as in torch's SGD."""

    def check(self) -> None:
        """Refuses Nesterov without momentum; see `OptimizerConfig.check`."""
        super().check()
        _check_nesterov(self.nesterov, self.momentum)

    def optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Creates `pydist.optim.LARS`."""
        from pydist.optim import LARS

        return LARS(
            parameters, self.lr, self.momentum, self.weight_decay, self.trust_coefficient,
            nesterov=self.nesterov, form=self.form,
        )  # fmt: skip


@dataclass(frozen=True)
class LambConfig(LayerwiseConfig):
    """Table that configures LAMB, the layer-wise form of Adam for large batches."""

    name: Literal["lamb"] = "lamb"
    """The optimizer: "lamb"."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the averages."""
    eps: Positive = 1e-6
    """Added to the denominator."""

    def optimizer(self, parameters: Iterable[Any]) -> Optimizer:
        """Creates `pydist.optim.LAMB`."""
        from pydist.optim import LAMB

        return LAMB(parameters, self.lr, self.betas, self.eps, self.weight_decay)


def _check_nesterov(nesterov: bool, momentum: float) -> None:
    if nesterov and not momentum:
        raise UsageError("optimizer.nesterov = true needs optimizer.momentum > 0")
