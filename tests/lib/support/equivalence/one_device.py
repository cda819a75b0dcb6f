"""Computes the results of one device for a task, and bounds for the distance of a split run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from support.equivalence import (
    FP64_BOUND,
    Points,
    Task,
    assert_equal,
    error,
    jittered,
    noise_like,
    on_ranks,
    spatial_of,
    train_split,
    whole_step,
)

FLOORS = {torch.float64: FP64_BOUND, torch.float32: 1e-6}
NOISES = range(8)
_FLOAT32_TO_64 = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
ROUNDING = 0.1
"""A tensor that noise moves this far is only rounding, like the gradient of a bias before a norm.
Its size on one device says little about other runs: such a tensor only has to be small."""


class Reference:
    """Step of a task that one device computes in float64 and in the task's own type.

    Bounds are those of docs/architecture.md, Numerics: in float64, 4 × the effect of noise in the
    last bit, or of the rounding of a step in float32 in proportion; in narrower types, 4 × the
    distance of one device from float64. They are only computed for results beyond the floor, as
    that takes time.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.dtype = task.x.dtype
        self.exact = whole_step(_in_type(task, torch.float64))

    @cached_property
    def bounds(self) -> dict[str, float]:
        """Bound of each tensor, which is the worst of several runs with noise in every layer.

        Where that is large, single runs say little, and the bound is wider.
        """
        worst = dict.fromkeys(self.exact, FLOORS[self.dtype])
        if self.dtype == torch.float64:
            # Noise does not show the rounding within torch's calls, such as norms and losses.
            for name, found in whole_step(_in_type(self.task, torch.float32)).items():
                rounding = min(error(found.double(), self.exact[name]), 1.0) * _FLOAT32_TO_64
                worst[name] = max(worst[name], 4 * rounding)
        for seed in NOISES:
            noisy_model = with_noise(copy.deepcopy(self.task.model), seed)
            task = self.task._replace(model=noisy_model)
            noisy = whole_step(task, partial(jittered, seed=seed))
            for name, found in noisy.items():
                worst[name] = max(worst[name], 4 * error(found.double(), self.exact[name]))
        return {name: bound * (100 if bound > ROUNDING else 1) for name, bound in worst.items()}

    def check(self, found: Mapping[str, Tensor]) -> None:
        """Checks that every tensor is within its bound.

        Raises:
            AssertionError: a tensor is not, or is missing.
        """
        wide = {name: t.double() for name, t in found.items()}
        floors = dict.fromkeys(self.exact, FLOORS[self.dtype])
        try:
            assert_equal(wide, self.exact, floors)
        except AssertionError:
            assert_equal(wide, self.exact, self.bounds)

    def check_split(
        self,
        points: list[Points],
        *,
        keep_thin_blocks: bool = False,
        channel: Sequence[float] = (1.0,),
    ) -> None:
        """Checks a step on rank-threads.

        Args:
            points: at which the input's last dims are split.
            keep_thin_blocks: whether thin blocks are not gathered.
            channel: shares of the ranks along the channel axis.
        """
        task = self.task

        def rank(mesh: Any) -> dict[str, Tensor]:
            own = task._replace(model=copy.deepcopy(task.model))
            return train_split(own, mesh, points=points)

        options: Any = {"keep_thin_blocks": keep_thin_blocks, "axes": {"channel": len(channel)}}
        if len(set(channel)) > 1:
            options["shares"] = {"channel": channel}
        for found in on_ranks(spatial_of(points), rank, **options):
            self.check(found)


def _in_type(task: Task, dtype: torch.dtype) -> Task:
    """Returns the task in another type; integers keep theirs."""
    target = task.target.to(dtype) if task.target.is_floating_point() else task.target
    return task._replace(
        model=copy.deepcopy(task.model).to(dtype), x=task.x.to(dtype), target=target
    )


def with_noise(model: nn.Module, seed: int) -> nn.Module:
    """Returns the model, with noise of one unit in the last place in all results and gradients."""
    for i, module in enumerate(model.modules()):
        module.register_forward_hook(partial(_add_noise, 100 * seed + i))
    return model


def _add_noise(seed: int, module: nn.Module, args: Any, y: Any) -> Any:
    """Adds noise to each value, and to each channel in common, as errors of its sums would be."""
    if not isinstance(y, Tensor) or not y.is_floating_point() or y.dim() < 2:
        return y
    largest = y.detach().abs().amax(tuple(range(2, y.dim())) or (0,), keepdim=True)
    return y * noise_like(y, seed) + largest * (noise_like(largest, seed + 50) - 1)
