"""Element-wise calls: they run on the shards as they are, after their operands are aligned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.errors import UsageError
from pydist.layout import Layout, Split
from pydist.ops.redistribute import operand_for, parameter_for, refuse_shard_shaped
from pydist.tensor import (
    HANDLERS,
    ShardedTensor,
    adopt_local,
    implements,
    local_of,
    refusal,
    wrap,
)

_UNARY = """
abs absolute neg negative positive sign sgn square sqrt rsqrt reciprocal exp exp2 expm1 log log2
log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc
erfinv floor ceil round trunc frac isnan isinf isfinite isposinf isneginf nan_to_num relu
logical_not bitwise_not clamp clamp_min clamp_max clip deg2rad rad2deg i0 lgamma digamma sinc
threshold hardshrink celu selu rrelu bernoulli zeros_like ones_like full_like
""".split()
_METHODS_ONLY = """
clone detach contiguous float double half bfloat16 int long short bool byte char to type
type_as __invert__ __abs__ __neg__ __pos__ cpu detach_
""".split()
_BINARY = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power
maximum minimum fmax fmin atan2 hypot copysign logaddexp logaddexp2 xlogy lerp addcmul addcdiv
where masked_fill eq ne lt le gt ge greater greater_equal less less_equal not_equal logical_and
logical_or logical_xor bitwise_and bitwise_or bitwise_xor isclose rsub heaviside
""".split()
_BINARY_METHODS = """
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
__truediv__ __rtruediv__ __rdiv__ __div__ __floordiv__ __rfloordiv__ __mod__ __pow__ __rpow__
__and__ __or__ __xor__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ copy_
""".split()
_ACTIVATIONS = """
relu relu6 elu selu celu leaky_relu gelu silu mish hardtanh hardswish hardsigmoid sigmoid tanh
softplus softsign tanhshrink logsigmoid hardshrink softshrink threshold
""".split()
# Random or order-dependent per element: they would draw other numbers under another split.
_NOT_ELEMENTWISE = {"bernoulli", "rrelu"}


def broadcast_layout(operands: Iterable[Tensor]) -> Layout:
    """The layout of a broadcasting call's result.

    Every dim is cut as the operand with the most cuts has it; dims in which that operand has
    extent 1 are cut as another sharded operand has them, where the mesh axes are still free.
    """
    operands = list(operands)
    shape = torch.broadcast_shapes(*(o.shape for o in operands))
    sharded = sorted(
        (o for o in operands if isinstance(o, ShardedTensor)),
        key=lambda o: -len(o._layout.split_dims),
    )
    if any(o._layout.mesh is not sharded[0]._layout.mesh for o in sharded):
        raise UsageError(
            f"operands of two meshes, {' and '.join(repr(o._layout.mesh) for o in sharded)}: "
            "tensors of one mesh can be combined"
        )
    splits: list[Split | None] = [None] * len(shape)
    used: set[str] = set()
    for operand in sharded:
        missing = len(shape) - operand.dim()
        for dim, split in enumerate(operand._layout.splits):
            if split is None or operand.shape[dim] != shape[missing + dim]:
                continue
            if splits[missing + dim] is None and not used & set(split.axes):
                splits[missing + dim] = split
                used |= set(split.axes)
    return Layout(sharded[0]._layout.mesh, tuple(shape), splits)


def elementwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `func` on the aligned shards of its tensor arguments."""
    if kwargs.get("out") is not None:
        raise refusal(func, args, kwargs, "out= would fill only this rank's block")
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    first = next(o for o in operands if isinstance(o, ShardedTensor))
    in_place = _is_in_place(func, kwargs)
    if len(operands) == 1:
        layout = first._layout
        args, kwargs = _map_tensors(local_of, args, kwargs)
    else:
        layout = _common_layout(func, operands, in_place, args, kwargs)
        align = partial(operand_for, layout=layout, out_shape=layout.shape)
        for operand in operands:
            if isinstance(operand, ShardedTensor):
                local_of(operand)
            else:
                refuse_shard_shaped(operand, layout)
        args, kwargs = _map_tensors(align, args, kwargs)
    result = func(*args, **kwargs)
    if in_place:
        return adopt_local(first, result)
    return wrap(result, layout, first)


def _common_layout(
    func: Callable[..., Any],
    operands: list[Tensor],
    in_place: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Layout:
    if not in_place:
        try:
            return broadcast_layout(operands)
        except RuntimeError:
            sharded = next(o for o in operands if isinstance(o, ShardedTensor))
            for operand in operands:
                if not isinstance(operand, ShardedTensor):
                    refuse_shard_shaped(operand, sharded._layout)
            raise
    target = args[0]
    if not isinstance(target, ShardedTensor):
        why = "in place on a plain tensor it would fill only this rank's block"
        raise refusal(func, args, kwargs, why)
    return target._layout


def _map_tensors(
    f: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (
        tuple(f(a) if isinstance(a, Tensor) else a for a in args),
        {k: f(a) if isinstance(a, Tensor) else a for k, a in kwargs.items()},
    )


def _is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__",)
    return name.endswith("_") or bool(kwargs.get("inplace"))


def _register() -> None:
    names = [n for n in (*_UNARY, *_BINARY) if n not in _NOT_ELEMENTWISE]
    functions: list[Any] = []
    for name in names:
        for variant in (name, name + "_"):
            functions += [getattr(torch, variant, None), getattr(torch.Tensor, variant, None)]
    for name in (*_METHODS_ONLY, *_BINARY_METHODS):
        functions.append(getattr(torch.Tensor, name, None))
    for name in _ACTIVATIONS:
        for owner in (F, torch._C._nn, torch):
            functions += [getattr(owner, name, None), getattr(owner, name + "_", None)]
    for function in functions:
        if function is not None:
            HANDLERS.setdefault(function, partial(elementwise, function))


_register()


@implements(torch.prelu, F.prelu)
def prelu(input: ShardedTensor, weight: Tensor) -> ShardedTensor:
    """PReLU: its weight has one entry a channel (dim 1), or one in all."""
    local = local_of(input)
    layout = input._layout
    if weight.numel() > 1 and input.dim() > 1 and layout.splits[1] is not None:
        raise refusal(torch.prelu, (input, weight), {}, "the channels are split")
    return wrap(torch.prelu(local, parameter_for(weight, layout)), layout, input)
