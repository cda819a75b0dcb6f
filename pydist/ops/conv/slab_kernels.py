"""Kernels that add the contributions of halo slabs to a convolution by correction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pydist.backend.autotuner import autotuner_of
from pydist.backend.problem import ROLES
from pydist.backend.slab_tuning import by_rule, choose
from pydist.backend.slabs import SlabProblem, run_slab
from pydist.ops.windows import WindowPlan
from pydist.partition import Box


def as_read(weight: Tensor) -> Tensor:
    """Returns the weight, or its gradient, in the memory layout that the slab kernels read.

    On a CPU it is contiguous. Tensor cores read contiguous channels, as in the activations, so on
    a GPU it keeps its layout.
    """
    return weight if weight.is_cuda else weight.contiguous()


def _of_3d(numbers: Sequence[int], dims: int, one: int) -> tuple[int, ...]:
    """Returns the numbers of 3 spatial dims that the kernels need; images lack the first dim.

    Args:
        numbers: of each spatial dim; a shape also has batch and channels before these.
        dims: number of spatial dims, 2 or 3.
        one: the number of a dim with one element.
    """
    return (*numbers[:-dims], *(one,) * (3 - dims), *numbers[-dims:])


class SlabKernels:
    """Kernels that the slabs of a convolution use, by role.

    Args:
        problems: by role, one per slab.
        names: of the kernels, in the same order, role by role.
    """

    def __init__(self, problems: dict[str, list[SlabProblem]], names: Sequence[str]) -> None:
        rest = iter(names)
        self._problems = problems
        self._names = {role: [next(rest) for _ in problems[role]] for role in ROLES}

    def add(
        self, role: str, slab: int, first: Tensor, second: Tensor, target: Tensor,
        first_lo: Sequence[int], target_lo: Sequence[int],
    ) -> None:  # fmt: skip
        """Adds the contribution of slab number `slab` to `target`; see `slabs.run_slab`."""
        problem, name = self._problems[role][slab], self._names[role][slab]
        if len(first_lo) == 2:
            first, second, target = (x.unsqueeze(2) for x in (first, second, target))
            first_lo, target_lo = (0, *first_lo), (0, *target_lo)
        run_slab(name, problem, first, second, target, first_lo, target_lo)


class SlabChooser:
    """Chooser that selects the kernels of one convolution's slabs at its first run, and keeps them.

    It keeps others for runs in which torch may round float32 to TF32 than for those in which it
    may not, as a program may change that at any time. Backward uses those of its forward pass.

    Args:
        plan: of the convolution.
        padding: before each spatial dim.
        weights: shape of each rank's weight, and its number of groups.
        is_adjoint: whether the convolution runs backward, as a transposed one.
    """

    def __init__(
        self,
        plan: WindowPlan,
        padding: tuple[int, ...],
        weights: Sequence[tuple[tuple[int, ...], int]],
        is_adjoint: bool,
    ) -> None:
        self._plan, self._padding, self._weights = plan, padding, weights
        self._is_adjoint = is_adjoint
        self._chosen: dict[bool, SlabKernels] = {}

    def kernels(self, x: Tensor, weight: Tensor, channels_last: bool) -> SlabKernels:
        """Returns the kernels. Collective over the sample group, like the convolution itself.

        Args:
            x: this rank's shard.
            weight: of the convolution.
            channels_last: the memory format of activations.
        """
        # Not `cudnn.allow_tf32`, which raises where a program has set only this. torch has no type
        # for `conv`.
        tf32 = x.is_cuda and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
        if tf32 in self._chosen:
            return self._chosen[tf32]
        group = self._plan.layout.mesh.sample
        problems = [self._of_rank(r, x, channels_last, tf32) for r in range(group.size)]
        flat = [[p for role in ROLES for p in each[role]] for each in problems]
        learns = torch.is_grad_enabled() and weight.requires_grad
        tuner = autotuner_of(self._plan.layout.mesh)
        names = choose(tuner, flat, group, x, learns)
        if names is None:
            return SlabKernels(problems[group.rank], by_rule(flat[group.rank]))
        self._chosen[tf32] = SlabKernels(problems[group.rank], names)
        return self._chosen[tf32]

    def _of_rank(
        self, rank: int, x: Tensor, channels_last: bool, tf32: bool
    ) -> dict[str, list[SlabProblem]]:
        plan, (shape, groups) = self._plan, self._weights[rank]
        own, out = plan.layout.boxes[rank], plan.out.boxes[rank]
        window, dims = plan.window, len(plan.window.kernel)
        sizes, place = (partial(_of_3d, dims=dims, one=one) for one in (1, 0))

        def problem(
            role: str, first: Box, second: Sequence[int], target: Sequence[int], at: Box
        ) -> SlabProblem:
            return SlabProblem(
                role, sizes(first.shape), sizes(second), sizes(target), place(first.lo[2:]),
                place(at.lo[2:]), sizes(window.stride), place(self._padding),
                sizes(window.dilation), groups, x.dtype, channels_last, x.device.type, tf32,
            )  # fmt: skip

        def wgrad(inputs: Box, outputs: Box) -> SlabProblem:
            return problem("wgrad", inputs, outputs.shape, shape, outputs)

        halos, grad_halos = plan.halos[rank], plan.grad_halos[rank]
        wgrads = (
            [wgrad(own, slab) for slab in grad_halos]
            if self._is_adjoint
            else [wgrad(slab, out) for slab in halos]
        )
        return {
            "forward": [problem("forward", slab, shape, out.shape, out) for slab in halos],
            "dgrad": [problem("dgrad", slab, shape, own.shape, own) for slab in grad_halos],
            "wgrad": wgrads,
        }
