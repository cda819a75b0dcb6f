"""Convolves a rank's own tensor, without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.backend.autotuner import autotuner_of
from pydist.backend.conv import padded
from pydist.backend.conv_kernels import ConvKernels, by_rule
from pydist.backend.conv_tuning import choose
from pydist.backend.problem import ConvProblem, onednn_has
from pydist.exchange.function import Function, own_grad
from pydist.exchange.left_weights import LeftWeight, out_of_graph
from pydist.exchange.memory_formats import all_channels_last
from pydist.mesh import Mesh
from pydist.tensor.aliasing import as_result


class ConvChooser:
    """Chooser that selects the kernels of one convolution when it first runs, and keeps them.

    On a GPU there is one kernel, torch's, which accepts either memory format. The format of the
    first operands is kept, as in torch.

    Args:
        problems: the convolution of each rank of the sample group.
        mesh: the mesh.
    """

    def __init__(self, problems: Sequence[ConvProblem], mesh: Mesh) -> None:
        self._problems, self._mesh = problems, mesh
        self._ruled = by_rule(problems, mesh.sample.rank)
        self._chosen: ConvKernels | None = None

    def kernels(self, x: Tensor, weight: Tensor) -> ConvKernels:
        """Returns the kernels. Collective over the sample group, like the convolution itself."""
        if self._chosen is None and self._ruled.problem.device != "cpu":
            self._chosen = self._of_device(x, weight)
        if self._chosen is None:
            # Evaluation uses tuned kernels if there are any; otherwise tuning is not worthwhile.
            learns = torch.is_grad_enabled() and weight.requires_grad
            mesh, tuner = self._mesh, autotuner_of(self._mesh)
            self._chosen = choose(
                tuner, self._problems, mesh.sample, x, weight, mesh.ranks_per_host, learns
            )
        return self._chosen or self._ruled

    def kernels_ahead(self, shard: Tensor, weight: Tensor) -> ConvKernels:
        """Returns the kernels before the input exists; measures, if at all, on an input of ones.

        Args:
            shard: the shard from which the input is made.
            weight: as in `kernels`.
        """
        problem = self._ruled.problem
        if self._chosen is None and problem.device != "cpu":
            self._chosen = self._of_device(shard, weight)
        if self._chosen is not None:
            return self._chosen
        ones = weight.new_ones((), dtype=problem.dtype).expand(problem.input)
        return self.kernels(ones, weight.view(problem.weight))

    def _of_device(self, x: Tensor, weight: Tensor) -> ConvKernels:
        is_last = all_channels_last(x, self._mesh, weight)
        # cuDNN has no channels-last kernels in float64.
        keeps = self._ruled.problem.dtype != torch.float64
        return replace(self._ruled, channels_last=is_last and keeps)


def onednn_on_all(local: Tensor, mesh: Mesh) -> bool:
    """Returns whether oneDNN supports the shard's dtype on all ranks of the sample group.

    The first call is collective over the group: the memory format of the halos depends on it, and
    processors may differ.
    """
    if local.dtype != torch.bfloat16 or local.device.type != "cpu":
        return True

    def vote() -> bool:
        votes = mesh.sample.all_gather(torch.tensor([int(onednn_has(local.dtype))]))
        return bool(votes.all())

    return mesh.session.plan(("oneDNN", local.dtype), vote)


class _LocalConv(Function):
    boxed_grads_call = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernels: ConvKernels,
        mesh: Mesh,
        adds_bias: bool,
        left: LeftWeight | None,
    ) -> Tensor:
        ctx.kernels, ctx.mesh, ctx.left = kernels, mesh, left
        ctx.save_for_backward(x, weight)  # not the bias, which may change, as in torch
        with mesh.session.timers.measure("convolution"):
            return kernels.run_forward(x, with_dims(weight, x), bias if adds_bias else None)

    @staticmethod
    def backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        kernels: ConvKernels = ctx.kernels
        needed, rest = ctx.needs_input_grad, (None,) * 4
        if torch.is_grad_enabled():
            x, weight = ctx.saved_tensors
            left: LeftWeight | None = ctx.left
            weight = weight if left is None else left.weight
            x, weight = apart(x, weight, needed)
            p = kernels.problem
            kernel = with_dims(weight, x)
            y = unpadded_conv(padded(p, x), kernel, p.stride, p.dilation, p.groups)
            return *with_bias(y, (x, weight), needed, grads[0]), *rest
        grad = kernels.in_format(grads.pop())
        own = shard_gradients(
            ctx,
            lambda x, kernel: kernels.run_dgrad(x, grad, kernel),
            lambda x, kernel: kernels.run_wgrad(x, grad, kernel),
            frees=not kernels.dgrad_reads_input,
        )
        return *own, bias_gradient(grad) if needed[2] else None, *rest


def with_dims(weight: Tensor, x: Tensor) -> Tensor:
    """Returns the weight, with a dim of 1 before its only spatial dim if x has such a dim.

    Called within autograd functions, which must save the parameter itself.
    """
    return weight if weight.dim() == x.dim() else weight.unsqueeze(2)


def in_autocast_type(*tensors: Tensor | None) -> list[Any]:
    """Converts operands of a convolution to autocast's dtype, if autocast is on."""
    given = next((t for t in tensors if t is not None), None)
    if given is None or not torch.is_autocast_enabled(given.device.type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(given.device.type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def shard_gradients(
    ctx: Any,
    dgrad: Callable[[Tensor, Tensor], Tensor],
    wgrad: Callable[[Tensor, Tensor], Tensor],
    *,
    frees: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Computes dL/dx and dL/dweight of a rank-local call, each if it is needed.

    That of the weight is first: then the input may be freed before dL/dx, which is as large.

    Args:
        ctx: of the call's backward, with its `mesh`, and in `left` where a gradient is left. It has
            saved x and the weight.
        dgrad: returns dL/dx, from x and the weight with the dims of x.
        wgrad: returns dL/dweight, in the dims of that.
        frees: whether `dgrad` reads the shape of x at most, so that x may be freed.
    """
    x, weight = ctx.saved_tensors
    timers, kernel = ctx.mesh.session.timers, with_dims(weight, x)
    left: LeftWeight | None = ctx.left
    for_x, for_weight = ctx.needs_input_grad[:2]

    def of_weight(x: Tensor) -> Tensor:
        with timers.measure("wgrad"):
            found = wgrad(x, kernel)
        return found if kernel is weight else found.squeeze(2)

    if left is not None:
        left.leave(ctx, partial(of_weight, x))
    grad_weight = of_weight(x) if for_weight else None
    if not for_x:
        return None, grad_weight
    if frees:
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept
        x = x.new_empty(()).expand(x.shape)
    with timers.measure("dgrad"):
        return dgrad(x, kernel), grad_weight


def bias_gradient(grad: Tensor) -> Tensor:
    """Returns the sum over all dims except the channels."""
    return grad.sum([0, *range(2, grad.dim())])


def apart(x: Tensor, weight: Tensor, needed: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Makes views of saved operands, from which double backward recomputes the result.

    They are views because x may be computed from the weight, or the weight from x. An operand that
    was frozen after the forward pass is unfrozen: torch computes its gradient as well, for hooks.

    Args:
        x: the input.
        weight: the weight.
        needed: whether the gradients of both are needed.
    """
    x, weight = (
        t.detach().requires_grad_() if need and not t.requires_grad else t.view_as(t)
        for t, need in zip((x, weight), needed, strict=False)
    )
    return x, weight


def differentiable(
    y: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Computes differentiable gradients of `y`, which was recomputed from `inputs`.

    Args:
        y: the result, with a graph.
        inputs: the operands; `None` for those that are missing.
        needed: whether the gradient of each is needed; longer than `inputs` at most at the end.
        grad: dL/dy.
    """
    wanted = [t for t, need in zip(inputs, needed, strict=False) if need and t is not None]
    found = iter(own_grad(y, wanted, grad) if wanted else ())
    return [next(found) if need else None for need in needed[: len(inputs)]]


def with_bias(
    y: Tensor, inputs: Sequence[Tensor], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Computes differentiable gradients of a convolution: of x, the weight and the bias.

    Args:
        y: the convolution without its bias, recomputed from `inputs`.
        inputs: x and the weight.
        needed: whether the gradients of x, the weight and the bias are needed.
        grad: dL/dy.
    """
    grads = differentiable(y, inputs, needed, grad)
    if not y.numel():
        # torch's convolution of an empty tensor has no second derivatives; other ranks have them.
        # That of zeros has theirs, also those that are undefined, as of dL/dx by x.
        x, kernel, of_y = (t.flatten()[:0].sum().view(1, 1, 1) for t in (*inputs, grad))
        zeros = differentiable(unpadded_conv(x, kernel, (1,), (1,), 1), (x, kernel), needed, of_y)
        grads = [
            g if g is None or zero is None else g + zero
            for g, zero in zip(grads, zeros, strict=True)
        ]
    return [*grads, bias_gradient(grad) if needed[2] else None]


def unpadded_conv(
    x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Computes a convolution without bias by torch, for double backward.

    It runs without padding and not in narrow dtypes: oneDNN's gradients may be wrong with them.
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
    """Computes a rank-local convolution, with the zero padding of the chooser's problem.

    Args:
        x: [N, Ci, ...] with one to three spatial dims.
        weight: [Co, Ci / groups, ...].
        bias: [Co] or `None`.
        chooser: of this convolution; with one spatial dim, of the 2D one with a dim of 1 before it.
        mesh: the mesh.
        adds_bias: whether to add the bias; if not, the caller does, and only its gradient is here.

    Returns:
        [N, Co, ...], channels-last where that was chosen.
    """
    if x.dim() == 3:
        y = local_conv(x.unsqueeze(2), weight, bias, chooser, mesh, adds_bias)
        return as_result(y.squeeze(2))
    kernels = chooser.kernels(x, with_dims(weight, x))
    # Outside of the autograd function, which must save its own inputs.
    x = kernels.in_format(x)
    weight, left = out_of_graph(mesh, x, weight)
    return _LocalConv.apply(x, weight, bias, kernels, mesh, adds_bias, left)
