"""Element-wise calls, which run on the shards after their operands are aligned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.errors import UsageError
from pydist.layout import Layout, Split
from pydist.ops.pointwise.in_place import in_place_on_plain
from pydist.ops.views import in_format
from pydist.tensor import (
    HANDLERS,
    ShardedTensor,
    implements,
    local_of,
    refusal,
    replace_shard_,
    source_among,
    view_of,
    wrap,
    wrap_new,
)
from pydist.tensor.operands import operand_for, refuse_shard_shaped

_UNARY = """
abs absolute neg negative positive sign sgn signbit square sqrt rsqrt reciprocal exp exp2 expm1 log
log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh arcsin arccos arctan
arcsinh arccosh arctanh sigmoid logit erf erfc erfinv floor ceil round trunc fix frac isnan isinf
isfinite isposinf isneginf isreal nan_to_num relu logical_not bitwise_not clamp clamp_min clamp_max
clip deg2rad rad2deg i0 lgamma digamma polygamma mvlgamma sinc angle conj_physical
resolve_conj resolve_neg threshold hardshrink celu selu zeros_like ones_like full_like empty_like
clone
""".split()
_METHODS_ONLY = """
float double half bfloat16 int long short bool byte char type cpu cuda fill_ zero_
__invert__ __abs__ __neg__ __pos__
""".split()
_BINARY = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power
maximum minimum fmax fmin atan2 arctan2 hypot copysign nextafter ldexp logaddexp logaddexp2 xlogy
lerp addcmul addcdiv where masked_fill eq ne lt le gt ge greater greater_equal less less_equal
not_equal complex polar logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
bitwise_left_shift bitwise_right_shift gcd lcm isclose rsub heaviside
""".split()
_BINARY_METHODS = """
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
__truediv__ __rtruediv__ __rdiv__ __div__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__
__rpow__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rshift__ __rlshift__
__rrshift__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__
__iand__ __ior__ __ixor__ __ilshift__ __irshift__ copy_
""".split()
_SPECIAL = """
digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammainc gammaincc gammaln i0 i0e i1 i1e log1p
log_ndtr logit ndtr ndtri polygamma psi round sinc xlog1py xlogy zeta
""".split()
_ACTIVATIONS = """
relu relu6 elu selu celu leaky_relu gelu silu mish hardtanh hardswish hardsigmoid sigmoid tanh
softplus softsign tanhshrink logsigmoid hardshrink softshrink threshold
""".split()


_ARITHMETIC = {
    getattr(owner, name)
    for name in (*_BINARY, *_BINARY_METHODS)
    for owner in (torch, torch.Tensor)
    if hasattr(owner, name)
}
"""Calls whose result has new memory, unless in place."""


def broadcast_layout(operands: Iterable[Tensor]) -> Layout:
    """Returns the layout of a broadcasting call's result.

    Each dim is split as in the operand with the most split dims. Dims in which that operand has
    extent 1 are split as in another sharded operand, if the mesh axes are still free.
    """
    operands = list(operands)
    shape = torch.broadcast_shapes(*(o.shape for o in operands))
    sharded = sorted(
        (o for o in operands if isinstance(o, ShardedTensor)),
        key=lambda o: -len(o.layout.split_dims),
    )
    if any(o.layout.mesh is not sharded[0].layout.mesh for o in sharded):
        raise UsageError(
            f"operands of two meshes, {' and '.join(repr(o.layout.mesh) for o in sharded)}: "
            "tensors of one mesh can be combined"
        )
    splits: list[Split | None] = [None] * len(shape)
    used: set[str] = set()
    for operand in sharded:
        missing = len(shape) - operand.dim()
        for dim, split in enumerate(operand.layout.splits):
            if split is None or operand.shape[dim] != shape[missing + dim]:
                continue
            if splits[missing + dim] is None and not used & set(split.axes):
                splits[missing + dim] = split
                used |= set(split.axes)
    return Layout(sharded[0].layout.mesh, tuple(shape), splits)


def elementwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `func` on the aligned shards of its tensor arguments."""
    if kwargs.get("out") is not None:
        raise refusal(func, args, kwargs, "out= would fill only this rank's block")
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    first = source_among(operands)
    in_place = _is_in_place(func, kwargs)
    target: Any = args[0] if in_place else None
    if in_place and not isinstance(target, ShardedTensor):
        return in_place_on_plain(elementwise, func, args, kwargs, broadcast_layout(operands))
    layout = first.layout
    if all(isinstance(o, ShardedTensor) and o.layout == layout for o in operands):
        args, kwargs = _map_tensors(local_of, args, kwargs)
    else:
        layout = target.layout if in_place else common_layout(operands)
        align = partial(operand_for, layout=layout, out_shape=layout.shape)
        for operand in operands:
            if isinstance(operand, ShardedTensor):
                local_of(operand)
            else:
                refuse_shard_shaped(operand, layout)
        args, kwargs = _map_tensors(align, args, kwargs)
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor):
        return result  # NotImplemented, or the name of the dtype
    if in_place:
        return replace_shard_(target, result)
    if result is first._shard:
        return first
    return (wrap_new if func in _ARITHMETIC else wrap)(result, layout, first)


def common_layout(operands: Sequence[Tensor]) -> Layout:
    """Returns the layout of a call on operands, at least one of them sharded.

    Raises:
        UsageError: a plain operand has the shape of this rank's shard.
        RuntimeError: the shapes do not broadcast.
    """
    try:
        return broadcast_layout(operands)
    except RuntimeError:
        sharded = next(each for each in operands if isinstance(each, ShardedTensor))
        for operand in operands:
            if not isinstance(operand, ShardedTensor):
                refuse_shard_shaped(operand, sharded.layout)
        raise


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


def _handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `elementwise` of a function, with a fast path for a single tensor."""
    if _is_in_place(func, {}):
        return partial(elementwise, func)

    def handler(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            x = args[0]
            local = local_of(x)
            result = func(local)
            if result is local:
                return x  # torch, too, returns the tensor itself if there is nothing to do
            return wrap(result, x.layout, x) if isinstance(result, Tensor) else result
        return elementwise(func, *args, **kwargs)

    return handler


def _alias(func: Callable[..., Tensor]) -> Callable[[ShardedTensor], ShardedTensor]:
    """Returns a handler of a one-tensor call whose result shares memory with the tensor."""

    def handler(input: ShardedTensor) -> ShardedTensor:
        local = local_of(input)
        result = func(local)
        return input if result is local else view_of(input, result, input.layout)

    return handler


def _register() -> None:
    functions: list[Any] = []
    for name in (*_UNARY, *_BINARY):
        for variant in (name, name + "_"):
            functions += [getattr(torch, variant, None), getattr(torch.Tensor, variant, None)]
    for name in (*_METHODS_ONLY, *_BINARY_METHODS):
        functions.append(getattr(torch.Tensor, name, None))
    for name in _ACTIVATIONS:
        for owner in (F, torch._C._nn, torch):
            functions += [getattr(owner, name, None), getattr(owner, name + "_", None)]
    functions += [getattr(torch.special, name) for name in _SPECIAL]
    for function in functions:
        if function is not None:
            HANDLERS.setdefault(function, _handler(function))
    for name in ("detach", "real", "imag", "conj"):
        for function in (getattr(torch, name), _method(name)):
            HANDLERS[function] = _alias(function)


def _method(name: str) -> Any:
    """Returns a method of torch.Tensor, or the getter that identifies an attribute's handler."""
    found = getattr(torch.Tensor, name)
    return found.__get__ if name in ("real", "imag") else found


_register()


@implements(torch.Tensor.to)
def to(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Converts dtype, device or memory format; `to(other)` copies `other`'s dtype and device."""
    other = kwargs.pop("other", args[0] if args else None)
    if isinstance(other, Tensor):
        args = (other.device, other.dtype, *args[1:])
    if not isinstance(input, ShardedTensor):
        return input.to(*args, **kwargs)
    local = local_of(input)
    moved = local.to(*args, **kwargs)
    memory_format = kwargs.get("memory_format", torch.preserve_format)
    if memory_format != torch.preserve_format and _keeps(local, moved):
        return in_format(input, moved, memory_format)
    return input if moved is local else wrap(moved, input.layout, input)


def _keeps(local: Tensor, moved: Tensor) -> bool:
    return moved.dtype == local.dtype and moved.device == local.device


@implements(torch.Tensor.type_as)
def type_as(input: Tensor, other: Tensor) -> Tensor:
    """Converts to the dtype and device of another tensor."""
    return to(input, other)


@implements(F.glu)
def glu(input: ShardedTensor, dim: int = -1) -> Tensor:
    """Gates the first half along a dim by the second half."""
    if input.shape[dim] % 2:
        raise RuntimeError(
            f"Halving dimension must be even, but dimension {dim} is size {input.shape[dim]}"
        )
    value, gate = torch.chunk(input, 2, dim)
    return value * torch.sigmoid(gate)
