"""The convolution of what one rank holds, with nothing to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pydist.backend.autotuner import autotuner_of
from pydist.backend.conv import padded
from pydist.backend.conv_kernels import ConvKernels, by_rule
from pydist.backend.conv_tuning import choose
from pydist.backend.problem import ConvProblem, onednn_has
from pydist.exchange.formats import all_channels_last
from pydist.exchange.function import Function
from pydist.gradients.engine import own_grad
from pydist.mesh import Mesh
from pydist.tensor.aliasing import as_result
from pydist.timers import Timers


class ConvChooser:
    """Finds the kernels of one convolution when it first runs, and keeps them.

    On a device there is one kernel, torch's, which takes either memory format: that of the first
    operands stays, as it does with torch.

    Args:
        problems: what each rank of the sample group computes.
        mesh: the mesh.
    """

    def __init__(self, problems: Sequence[ConvProblem], mesh: Mesh) -> None:
        self._problems, self._mesh = problems, mesh
        self._ruled = by_rule(problems, mesh.sample.rank)
        self._chosen: ConvKernels | None = None

    def kernels(self, x: Tensor, weight: Tensor) -> ConvKernels:
        """The kernels. Collective over the sample group, as the convolution itself is."""
        if self._chosen is None and self._ruled.problem.device != "cpu":
            self._chosen = self._of_device(x, weight)
        if self._chosen is None:
            # Evaluation takes what is remembered, and else has no choice worth measuring.
            learns = torch.is_grad_enabled() and weight.requires_grad
            tuner = autotuner_of(self._mesh)
            self._chosen = choose(tuner, self._problems, self._mesh.sample, x, weight, learns)
        return self._chosen or self._ruled

    def kernels_ahead(self, shard: Tensor, weight: Tensor) -> ConvKernels:
        """Returns the kernels before the input exists; measures, if at all, on an input of ones.

        Args:
            shard: that the input is made from.
            weight: as of `kernels`.
        """
        problem = self._ruled.problem
        if self._chosen is None and problem.device != "cpu":
            self._chosen = self._of_device(shard, weight)
        if self._chosen is not None:
            return self._chosen
        ones = weight.new_ones((), dtype=problem.dtype).expand(problem.input)
        return self.kernels(ones, weight.view(problem.weight))

    def _of_device(self, x: Tensor, weight: Tensor) -> ConvKernels:
        lies = all_channels_last(x, self._mesh, weight)
        # cuDNN has none of these in float64.
        keeps = self._ruled.problem.dtype != torch.float64
        return replace(self._ruled, channels_last=lies and keeps)


def onednn_on_all(local: Tensor, mesh: Mesh) -> bool:
    """Whether oneDNN takes the dtype of a shard on the machines of all ranks of the sample group.

    An exchange of the group, the first time: the memory format in which halos travel follows from
    it, and processors may differ.
    """
    if local.dtype != torch.bfloat16 or local.device.type != "cpu":
        return True

    def vote() -> bool:
        votes = mesh.sample.all_gather(torch.tensor([int(onednn_has(local.dtype))]))
        return bool(votes.all())

    return mesh.session.plan(("oneDNN", local.dtype), vote)


class _LocalConv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernels: ConvKernels,
        mesh: Mesh,
        adds_bias: bool,
    ) -> Tensor:
        ctx.kernels, ctx.mesh = kernels, mesh
        ctx.save_for_backward(x, weight)  # the bias may change, as with torch
        with mesh.session.timers.measure("convolution"):
            return kernels.run_forward(x, with_dims(weight, x), bias if adds_bias else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            x, weight = apart(x, weight, ctx.needs_input_grad)
            p = ctx.kernels.problem
            kernel = with_dims(weight, x)
            y = unpadded_conv(padded(p, x), kernel, p.stride, p.dilation, p.groups)
            grads = with_bias(y, (x, weight), ctx.needs_input_grad, grad)
        else:
            needed = ctx.needs_input_grad
            timers, kernel = ctx.mesh.session.timers, with_dims(weight, x)
            grads = gradients(ctx.kernels, x, grad, kernel, needed, timers)
            if grads[1] is not None and kernel is not weight:
                grads[1] = grads[1].squeeze(2)
        return (*grads, None, None, None)


def with_dims(weight: Tensor, x: Tensor) -> Tensor:
    """The weight with a dim of 1 before the only spatial one, if x has that.

    Made within autograd functions, as what these save has to be the parameter itself.
    """
    return weight if weight.dim() == x.dim() else weight.unsqueeze(2)


def in_autocast_type(*tensors: Tensor | None) -> list[Any]:
    """Operands of a convolution in the type that autocast gives them, where it is on."""
    given = next((t for t in tensors if t is not None), None)
    if given is None or not torch.is_autocast_enabled(given.device.type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(given.device.type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context manager that turns autocast off."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()  # opened in a tenth of the time


def gradients(
    kernels: ConvKernels,
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    needed: Sequence[bool],
    timers: Timers,
) -> list[Tensor | None]:
    """dL/dx, dL/dweight and dL/dbias of a convolution, each if it is needed."""
    grad = kernels.in_format(grad)
    grad_x = grad_weight = None
    if needed[0]:
        with timers.measure("dgrad"):
            grad_x = kernels.run_dgrad(x, grad, weight)
    if needed[1]:
        with timers.measure("wgrad"):
            grad_weight = kernels.run_wgrad(x, grad, weight)
    return [grad_x, grad_weight, bias_gradient(grad) if needed[2] else None]


def bias_gradient(grad: Tensor) -> Tensor:
    """The sum over all dims but the channels."""
    return grad.sum([0, *range(2, grad.dim())])


def apart(x: Tensor, weight: Tensor, needed: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Makes views of saved operands, from which double backward recomputes the result.

    They are views: of x and weight either may be computed from the other. An operand that was
    frozen after the forward pass is one that trains: torch forms its gradient as well, for hooks.
    """
    x, weight = (
        t.detach().requires_grad_() if need and not t.requires_grad else t.view_as(t)
        for t, need in zip((x, weight), needed, strict=False)
    )
    return x, weight


def differentiable(
    y: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Computes differentiable gradients of `y`, which was recomputed from `inputs`."""
    wanted = [t for t, need in zip(inputs, needed, strict=False) if need and t is not None]
    found = iter(own_grad(y, wanted, grad) if wanted else ())
    return [next(found) if need else None for need in needed[: len(inputs)]]


def with_bias(
    y: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Computes differentiable gradients of a convolution: for x, the weight and the bias.

    Args:
        y: the convolution without its bias, computed anew from `inputs`.
        inputs: x and the weight.
        needed: whether the gradient is needed: of x, of the weight, of the bias.
        grad: dL/dy.
    """
    grads = differentiable(y, inputs, needed, grad)
    if not y.numel():
        # Of nothing torch's convolution has no further derivatives; other ranks have them.
        zero = sum(t.sum() * 0 for t in (*inputs, grad) if t is not None)
        grads = [None if g is None else g + zero for g in grads]
    return [*grads, bias_gradient(grad) if needed[2] else None]


def unpadded_conv(
    x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """A convolution by torch, without its bias, for gradients of gradients.

    It is given no padding and no narrow type: oneDNN's gradients may be wrong with them.
    """
    if x.dtype.itemsize < 4:
        wide = unpadded_conv(x.float(), weight.float(), stride, dilation, groups)
        return wide.to(x.dtype)
    none = (0,) * len(stride)
    return torch.convolution(x, weight, None, stride, none, dilation, False, none, groups)


def local_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chooser: ConvChooser,
    mesh: Mesh,
    adds_bias: bool = True,
) -> Tensor:
    """A convolution of whole inputs, with zero padding as the chooser's problem says.

    Args:
        x: [N, Ci, ...] with one to three spatial dims.
        weight: [Co, Ci / groups, ...].
        bias: [Co] or `None`.
        chooser: of this convolution; with one spatial dim, of that with a dim of 1 before it.
        mesh: the mesh.
        adds_bias: if not, the caller does so, and only the gradients are here.

    Returns:
        [N, Co, ...], channels-last where that was chosen.
    """
    if x.dim() == 3:
        y = local_conv(x.unsqueeze(2), weight, bias, chooser, mesh, adds_bias)
        return as_result(y.squeeze(2))
    kernels = chooser.kernels(x, with_dims(weight, x))
    # Here, and not in the function: what that saves has to be its input.
    x = kernels.in_format(x)
    return _LocalConv.apply(x, weight, bias, kernels, mesh, adds_bias)
