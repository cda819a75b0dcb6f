"""Trains in steps of several passes, on a mesh and in plain torch, with samples in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from pydist import Mesh, parallelize
from pydist.data.batch_sizes import BatchSizes, PassRule
from pydist.data.loader import Loader
from pydist.exchange.own_slice import is_sharded_weight
from pydist.optim import gather_gradients, sharded
from pydist.partition import Box
from pydist.tensor import ShardedTensor
from pydist.train.config import CosmoFlowConfig, TrainConfig, UNet3dConfig
from pydist.train.network import MeshNetwork
from pydist.train.step import TrainStep
from pydist.train.tasks import Task
from pydist.train.tasks.regression import CosmoFlowRegression
from pydist.train.tasks.segmentation import UNet3dSegmentation
from support.equivalence import randint, randn, whole_of
from support.networks.small import initialized

SHAPE = 2, 6, 4, 3
CLASSES = 3
WEIGHTS = 0.25, 1.0, 2.5


class Samples:
    """Source that holds random samples, with two values to predict or with classes of voxels."""

    sample_shape = SHAPE
    num_targets = 2
    dtype = torch.float64

    def __init__(self, count: int, *, labeled: bool = False) -> None:
        self.inputs = randn(count, *SHAPE, seed=1)
        self.labeled = labeled
        self.values = randn(count, 2, seed=2)
        self.labels = randint(CLASSES, count, *SHAPE[1:])
        self.identity = f"{count} samples"

    @property
    def targets(self) -> Tensor:
        return self.labels if self.labeled else self.values

    def __len__(self) -> int:
        return len(self.inputs)

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        return SHAPE

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        return self.inputs[index][... if box is None else box.slices]

    def read_labels(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        return self.labels[index][... if box is None else box.slices]

    def target(self, index: int) -> Tensor:
        return self.values[index]


class _Pooled(nn.Module):
    """Network that pools two convolutions, and applies its head to plain tensors; with dropout."""

    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(2, 4, 3, padding=1),
            nn.BatchNorm3d(4) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Conv3d(4, 3, 3, padding=1),
            nn.Tanh(),
        )
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        pooled = self.body(x).mean((2, 3, 4))
        if isinstance(pooled, ShardedTensor):
            pooled = pooled.full_tensor()
        return self.head(self.drop(pooled))


def network(labeled: bool, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    """Creates a network of voxels, or of values."""
    if not labeled:
        return initialized(_Pooled(dropout, norm))
    return initialized(
        nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, CLASSES, 3, padding=1))
    )


def _task(labeled: bool) -> Task:
    """Returns the mean squared error, or a weighted cross-entropy with one label ignored."""
    if labeled:
        config = TrainConfig(class_weights=WEIGHTS, ignore_label=1)
        return UNet3dSegmentation(UNet3dConfig(), config)
    return CosmoFlowRegression(CosmoFlowConfig(), TrainConfig())


@dataclass
class Trained:
    """Losses that the steps had, and the final parameters, buffers and gradients."""

    losses: list[float]
    state: dict[str, Tensor]
    figures: list[tuple[float, float, int]] = field(default_factory=list)
    """Of each step, as of `GradientSquares`."""


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def loader_of(
    mesh: Mesh, source: Samples, sizes: BatchSizes, rule: PassRule, pad: bool = False
) -> Loader:
    return Loader(source, mesh, sizes, seed=3, pad=pad, passes=rule)


def steps_of(loader: Loader) -> Iterator[Any]:
    """Yields the passes of each step of an epoch."""
    batches = iter(loader)
    for first in batches:
        yield chain([first], islice(batches, first.parts - 1))


def on_mesh(
    mesh: Mesh,
    source: Samples,
    sizes: BatchSizes,
    rule: PassRule,
    *,
    epochs: int = 2,
    partitioned: bool = False,
    measures: bool = False,
    sharded_weights: bool = False,
    pad: bool = False,
    **options: Any,
) -> Trained:
    """Trains with pydist's steps; the gradients of the last step are gathered and kept."""
    made = network(source.labeled, **options)
    model = parallelize(made, mesh, sharded_weights=sharded_weights)
    optimizer = optimizer_of(model)
    if partitioned:
        optimizer = sharded(optimizer, model, "always")
    found: dict[str, Tensor] = {}

    class Keeping(MeshNetwork):
        def clip(self, *arguments: Any) -> None:
            if partitioned:
                gather_gradients(model)
            for name, p in model.named_parameters():
                assert p.grad is not None
                found[name] = whole_of(p.grad).clone()

    if sharded_weights and mesh.size > 1:
        assert any(map(is_sharded_weight, model.parameters()))
    losses, figures = [], []
    with loader_of(mesh, source, sizes, rule, pad) as loader:
        state: Any = SimpleNamespace(
            mesh=mesh, model=model, network=Keeping(model, mesh), optimizer=optimizer,
            scaler=GradScaler("cpu", enabled=False), loader=loader,
        )  # fmt: skip
        step = TrainStep(state, _task(source.labeled), TrainConfig())
        for _ in range(epochs):
            for each in steps_of(loader):
                passes = list(each)
                if measures:
                    loss, measured = step.measured(passes)
                    figures.append(measured)
                else:
                    loss = step.accumulated(passes)
                loss /= mesh.sample_size
                mesh.world.all_reduce(loss)
                losses.append(float(loss) / passes[0].step_size)
    gradients = {f"grad of {name}": grad for name, grad in found.items()}
    buffers = {n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()}
    parameters = {n: whole_of(p.detach()).clone() for n, p in model.named_parameters()}
    return Trained(losses, parameters | gradients | buffers, figures)


def plainly(
    source: Samples,
    steps: Sequence[Sequence[int]],
    passes: Callable[[int], int] | None = None,
    **options: Any,
) -> Trained:
    """Trains in plain torch on one device.

    Args:
        source: the samples.
        steps: the samples of each step.
        passes: number of passes over a number of samples; by default each step is one batch.
        options: of the network.
    """
    model, losses = network(source.labeled, **options), []
    optimizer = optimizer_of(model)
    for rows in steps:
        optimizer.zero_grad()
        count, total = 1 if passes is None else passes(len(rows)), 0.0
        for i in range(count):
            part = rows[len(rows) * i // count : len(rows) * (i + 1) // count]
            output, target = model(source.inputs[part]), source.targets[part]
            if source.labeled:
                loss = F.cross_entropy(
                    output, target, torch.tensor(WEIGHTS).double(), ignore_index=1
                )
            else:
                loss = F.mse_loss(output, target) * len(part) / len(rows)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    state = {n: p.detach() for n, p in model.named_parameters()}
    state |= {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    state |= {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    return Trained(losses, state)


def assert_as(found: Trained, expected: Trained, bound: float = 1e-12) -> None:
    """Checks losses, parameters, buffers and gradients, each relative to its largest value."""
    assert len(found.losses) == len(expected.losses)
    for a, b in zip(found.losses, expected.losses, strict=True):
        assert abs(a - b) <= bound * max(1.0, abs(b))
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        error = float((found.state[name] - tensor).abs().max())
        assert error <= bound * max(float(tensor.abs().max()), 1e-3), (name, error)
