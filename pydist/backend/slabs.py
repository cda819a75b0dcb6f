"""Kernels, by name, that add a halo slab's part to a convolution's outputs and gradients.

`plain` is pydist's kernel for any device and type. On CUDA, `mma` and `tf32` do the same on tensor
cores: they read the slab from the receive buffer and add into the boundary planes. `library` is
torch's (cuDNN's) convolution of the slab, whose result is added afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pydist._loader import native
from pydist.backend.slab_library import BY_LIBRARY
from pydist.backend.slab_problem import SlabProblem


def run_slab(
    name: str, problem: SlabProblem, first: Tensor, second: Tensor, target: Tensor,
    first_lo: Sequence[int], target_lo: Sequence[int],
) -> None:  # fmt: skip
    """Adds one slab's part to `target`.

    Args:
        name: of the kernel, one of `problem.candidates`.
        problem: the problem; the tensors and positions may be parts of it.
        first: inputs, or for dgrad the output's gradient.
        second: the weight; for wgrad the output's gradient.
        target: the tensor that is added to.
        first_lo: global spatial position of `first`.
        target_lo: of the target; for wgrad of the output's gradient.
    """
    where = first_lo, target_lo
    if name == "library":
        BY_LIBRARY[problem.role](problem, first, second, target, *where)
        return
    kernel: Callable[..., None] = getattr(native, f"boundary_conv_{problem.role}")
    arguments = (first, second, target, *where, *problem.geometry)
    plan = _plan(name, problem, first, second, target, *where)
    if plan is None or plan[0]:
        kernel(*arguments)
        return
    workspace = first.new_empty(plan[1], dtype=torch.float32) if plan[1] else None
    kernel(*arguments, kernel=name, workspace=workspace)


def unsupported(
    name: str, problem: SlabProblem, first: Tensor, second: Tensor, target: Tensor
) -> str:
    """Returns why a kernel would leave tensors to `plain`; empty if it supports them.

    Args:
        name: of the kernel; see `SlabProblem.candidates`.
        problem: the slab's part of the convolution.
        first: the first operand, of shape `problem.first`.
        second: the second operand, of shape `problem.second`.
        target: what is added to, of shape `problem.target`.
    """
    plan = _plan(name, problem, first, second, target, problem.first_lo, problem.target_lo)
    return "" if plan is None else plan[0]


def _plan(
    name: str, problem: SlabProblem, first: Tensor, second: Tensor, target: Tensor,
    first_lo: Sequence[int], target_lo: Sequence[int],
) -> tuple[str, int, float] | None:  # fmt: skip
    """Asks a tensor-core kernel about its operands; `None` for kernels that support all."""
    if name not in ("mma", "tf32"):
        return None
    return native.boundary_conv_plan(
        problem.role, first, second, target, first_lo, target_lo, *problem.geometry, name
    )
