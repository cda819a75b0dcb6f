"""Handles attributes of sharded tensors, conversions to Python values, and autograd's calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pydist.errors import NotSupported
from pydist.exchange.exchanger import in_memory
from pydist.exchange.history import remember_change
from pydist.gradients import graph
from pydist.gradients.engine import starts_from
from pydist.gradients.partitioned import PartitionedGradient
from pydist.ops.views import hides_order
from pydist.tensor import (
    HANDLERS,
    ShardedTensor,
    implements,
    local_of,
    refusal,
    replace_shard_,
    view_of,
    wrap,
)
from pydist.tensor.operands import shard_in
from pydist.tensor.sharded import whole_of
from pydist.tensor.wrapper import GET_REQUIRES_GRAD, of_wrapper

# The wrapper tensor itself has the global shape, the dtype, and the other attributes.
_OF_THE_WRAPPER = """
shape ndim dtype device is_cuda is_cpu is_sparse is_quantized is_meta
is_mps is_mkldnn is_nested is_complex names is_xpu
""".split()
_METHODS_OF_THE_WRAPPER = """
dim ndimension size numel nelement element_size is_floating_point is_complex is_signed
get_device __len__ __hash__ is_inference is_conj is_neg
""".split()


def _descriptor(name: str) -> Any:
    """Returns an attribute of torch.Tensor; its `__get__` and `__set__` identify the handlers."""
    return getattr(torch.Tensor, name)


_SET_DATA = _descriptor("data").__set__

for _name in _OF_THE_WRAPPER:
    if hasattr(torch.Tensor, _name):
        _get = _descriptor(_name).__get__
        HANDLERS[_get] = partial(of_wrapper, _get)
for _name in _METHODS_OF_THE_WRAPPER:
    _method = getattr(torch.Tensor, _name)
    HANDLERS[_method] = partial(of_wrapper, _method)
for _function in (torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor):
    HANDLERS[_function] = partial(of_wrapper, _function)


@implements(torch.Tensor.is_contiguous)
def is_contiguous(
    x: ShardedTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    """Returns True for the default format; for other formats, whether the shards have it.

    Raises:
        NotSupported: the shards of some ranks are too thin to show their format.
    """
    if memory_format == torch.contiguous_format:
        return True
    if hides_order(x.layout, range(x.dim())):
        why = f"{memory_format}, which shards with an extent of 0 or 1 do not show"
        raise refusal(torch.Tensor.is_contiguous, (x,), {}, why)
    return local_of(x).is_contiguous(memory_format=memory_format)


@implements(_descriptor("grad").__get__)
def grad_of(x: ShardedTensor) -> Tensor | None:
    """Returns the gradient, with the layout of the tensor; a placeholder if it is partitioned."""
    grad = x._local.grad
    if isinstance(grad, PartitionedGradient):
        return grad
    if grad is None:
        return None
    found = wrap(in_memory(grad), x.layout, x)
    found._is_gradient = True
    return found


@implements(_descriptor("grad").__set__, _descriptor("grad").__delete__)
def set_grad(x: ShardedTensor, grad: Tensor | None = None) -> None:
    """Sets or deletes the gradient."""
    if grad is not None and not isinstance(grad, PartitionedGradient):
        grad = shard_in(grad, x.layout)
    x._local.grad = grad


@implements(_descriptor("grad_fn").__get__)
def grad_fn_of(x: ShardedTensor) -> Any:
    """Returns the graph node of the shard."""
    return x._local.grad_fn


@implements(_descriptor("is_leaf").__get__)
def is_leaf(x: ShardedTensor) -> bool:
    """Returns whether the shard is a leaf of the graph."""
    return bool(x._local.is_leaf)


@implements(_descriptor("data").__get__)
def data_of(x: ShardedTensor) -> ShardedTensor:
    """Returns the tensor without its graph."""
    return view_of(x, local_of(x).data, x.layout)


@implements(_SET_DATA)
def set_data(x: ShardedTensor, new: Tensor) -> None:
    """Replaces values, dtype and device of a sharded weight or its gradient; the layout stays.

    Raises:
        NotSupported: the tensor is neither.
        RuntimeError: the shape differs.
    """
    if not x._origin.sizes.of_weight:
        raise refusal(_SET_DATA, (x, new), {}, "other tensors may share its memory")
    if new.shape != x.shape:
        raise RuntimeError(f"x.data of shape {list(x.shape)} = a tensor of {list(new.shape)}")
    local = local_of(x)
    local.data = shard_in(new, x.layout).detach()
    if (x.dtype, x.device) != (local.dtype, local.device):
        # The wrapper knows them; setting its `data` would crash later.
        torch._C._swap_tensor_impl(x, ShardedTensor(local, x.layout, x._origin))
    remember_change(x)


def _set_data_of_plain(parameter: nn.Parameter, new: Tensor) -> None:
    _SET_DATA(parameter, whole_of(new))


# torch asks no override of the new values, and a parameter without storage would crash later.
nn.Parameter.data = property(_descriptor("data").__get__, _set_data_of_plain)  # type: ignore[assignment]  # a variable in its stubs


@implements(torch._has_compatible_shallow_copy_type)
def has_compatible_type(x: Tensor, other: Tensor) -> bool:
    """Returns whether the `data` of one tensor can be set to the other."""
    return isinstance(x, ShardedTensor) and isinstance(other, ShardedTensor)


@implements(torch.Tensor.detach_, torch.detach_)
def detach_(x: ShardedTensor) -> ShardedTensor:
    """Detaches the tensor from its graph in place."""
    shard = local_of(x)
    # A leaf holds the shard of its gradient, so the shard itself has to leave the graph. Other
    # shards may have several owners, or be views, which torch refuses here.
    in_place = x._is_gradient and not shard._is_view()
    x._shard = shard.detach_() if in_place else shard.detach()
    of_wrapper(torch.Tensor.requires_grad_, x, False)
    remember_change(x)
    return x


@implements(torch.Tensor.requires_grad_)
def requires_grad_(x: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    """Sets whether autograd computes the gradient of a leaf."""
    local_of(x).requires_grad_(requires_grad)
    if not requires_grad:
        of_wrapper(torch.Tensor.requires_grad_, x, False)
    return replace_shard_(x, x._local, changed=False)


@implements(_descriptor("requires_grad").__get__)
def get_requires_grad(x: ShardedTensor) -> bool:
    """Returns whether autograd computes the gradient, also after a change in place of a view."""
    return bool(of_wrapper(GET_REQUIRES_GRAD, x) or x._shard.requires_grad)


@implements(_descriptor("requires_grad").__set__)
def set_requires_grad(x: ShardedTensor, value: bool) -> None:
    """Sets whether autograd computes the gradient of a leaf."""
    requires_grad_(x, value)


@implements(torch.Tensor.retain_grad)
def retain_grad(x: ShardedTensor) -> None:
    """Makes backward keep the gradient of a tensor that is not a leaf."""
    local_of(x).retain_grad()


@implements(torch.Tensor.register_hook)
def register_hook(x: ShardedTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Registers a hook that backward calls with the sharded gradient.

    A hook that only reads the local part may be registered on some ranks only. A hook that changes
    or gathers the gradient must be registered on all ranks.
    """

    def on_shard(grad: Tensor | None) -> Tensor | None:
        if grad is None:  # possible in double backward, where torch has no node
            return None
        result = hook(wrap(in_memory(grad), x.layout, x))
        return shard_in(result, x.layout) if isinstance(result, Tensor) else None

    return graph.register_hook(x._local, on_shard)


@implements(torch.Tensor.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(x: ShardedTensor, hook: Callable[[Tensor], None]) -> Any:
    """Registers a hook that is called with the tensor after its gradient was accumulated."""
    return x._local.register_post_accumulate_grad_hook(lambda _: hook(x))


def _value(as_type: Callable[[Any], Any], x: ShardedTensor) -> Any:
    return as_type(x.full_tensor())


for _as_type, _conversion in (
    (torch.Tensor.item, torch.Tensor.item),
    (float, torch.Tensor.__float__),
    (int, torch.Tensor.__int__),
    (bool, torch.Tensor.__bool__),
    (complex, torch.Tensor.__complex__),
    (operator.index, torch.Tensor.__index__),
):
    HANDLERS[_conversion] = partial(_value, _as_type)


@implements(torch.Tensor.tolist)
def tolist(x: ShardedTensor) -> Any:
    """Returns the values of the full tensor as a nested list."""
    return x.full_tensor().tolist()


@implements(torch.Tensor.numpy)
def numpy(x: ShardedTensor, *, force: bool = False) -> Any:
    """Returns the full tensor as a NumPy array that can't be written to, as JAX does.

    It is a copy where the tensor is cut, so a change would be lost on some meshes only.
    """
    return _read_only(x.full_tensor().numpy(force=force))


@implements(torch.Tensor.__array__)
def as_array(x: ShardedTensor, dtype: Any = None) -> Any:
    """Returns the full tensor for `np.asarray`, as `x.numpy()`."""
    return _read_only(x.full_tensor().__array__(dtype))


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@implements(torch.Tensor.__format__)
def format_tensor(x: ShardedTensor, spec: str) -> str:
    """Formats a tensor with one element as its value, other tensors as their repr."""
    return format(x.full_tensor().item(), spec) if x.numel() == 1 and spec else repr(x)


def _locals(tensors: Any) -> Any:
    return tuple(t.to_local() if isinstance(t, ShardedTensor) else t for t in _as_sequence(tensors))


def _histories(tensors: Any) -> list[int]:
    return [t._history for t in _as_sequence(tensors) if isinstance(t, ShardedTensor)]


def _seeds(func: Any, given: Any, outputs: Any) -> Any:
    """Returns the shards of given gradients, in the layouts of the outputs, or of 1 for scalars."""
    outputs = _as_sequence(outputs)
    given = [None] * len(outputs) if given is None else _as_sequence(given)
    if len(given) != len(outputs):
        return given  # torch raises the error
    return tuple(_seed(func, g, y) for g, y in zip(given, outputs, strict=True))


def _seed(func: Any, given: Any, y: Any) -> Any:
    if not isinstance(y, ShardedTensor):
        return given
    if given is not None:
        return shard_in(given, y.layout) if isinstance(given, Tensor) else given
    if y.numel() != 1:
        raise refusal(func, (y,), {}, "it is not a scalar: give the gradient")
    local = local_of(y)
    # One rank alone has the element if its dims are split. For complex ones torch raises the error.
    return None if local.is_complex() else torch.ones_like(local)


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


@implements(torch.Tensor.backward, torch.autograd.backward)
def backward(
    tensors: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    *,
    grad_tensors: Any = None,
) -> None:
    """Runs backward from sharded tensors; a scalar is seeded with 1 on every rank that has it."""
    given = gradient if gradient is not None else grad_tensors
    outputs = _locals(tensors)
    seeds = _seeds(torch.Tensor.backward, given, tensors)
    only = None if inputs is None else _locals(inputs)
    starts_from(_histories(tensors))
    torch.autograd.backward(outputs, seeds, retain_graph, create_graph, inputs=only)


@implements(torch.autograd.grad)
def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Returns gradients of sharded or plain tensors, each in the layout of its input."""
    if is_grads_batched:
        raise NotSupported("torch.autograd.grad(is_grads_batched=True) on sharded tensors")
    asked = _as_sequence(inputs)
    roots, leaves = _locals(outputs), _locals(inputs)
    seeds = _seeds(torch.autograd.grad, grad_outputs, outputs)
    starts_from(_histories(outputs))
    grads = torch.autograd.grad(
        roots,
        leaves,
        seeds,
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    return tuple(
        wrap(in_memory(g), x.layout, x) if isinstance(x, ShardedTensor) and g is not None else g
        for x, g in zip(asked, grads, strict=True)
    )
