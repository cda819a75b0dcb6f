"""ShardedTensor: the global tensor is what the user sees, this rank's shard is what it holds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pydist.comm.adjoints import with_true_gradient
from pydist.errors import NotSupported, UsageError
from pydist.layout import Layout, layout_for_sample
from pydist.mesh import SPATIAL_AXES

if TYPE_CHECKING:
    from pydist.mesh import Mesh

HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""What each torch call does on sharded tensors; filled by the modules of `pydist.ops`."""

_H = TypeVar("_H", bound=Callable[..., Any])


def implements(*functions: Callable[..., Any]) -> Callable[[_H], _H]:
    """Registers the decorated function as the handler of torch calls.

    The handler is called with the arguments of the call as they are, so its signature is that of
    the torch function.
    """

    def register(handler: _H) -> _H:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


class Origin(NamedTuple):
    """What a tensor inherits from the forward pass it belongs to."""

    forward: int
    """Number of the training forward: part of the key of random numbers."""
    first_sample: int
    """Index in the global batch of the sample at index 0 of dim 0."""
    statistics: str
    """Over which ranks batch norm forms its statistics: "global", "group" or "rank"."""


class ShardedTensor(torch.Tensor):
    """A tensor that is cut over the ranks of a sample group.

    It shows the global shape and holds this rank's shard, on which autograd's graph lives. Torch
    calls go to the handlers of `pydist.ops`; a call without one is refused by name. Make one with
    `distribute_tensor` or `ShardedTensor.from_local`.
    """

    _local: Tensor
    _layout: Layout
    _origin: Origin

    @staticmethod
    def __new__(cls, local: Tensor, layout: Layout, origin: Origin) -> ShardedTensor:
        """Wraps a shard; `from_local` is the checked way."""
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        wrapper._local, wrapper._layout, wrapper._origin = local, layout, origin
        if local.requires_grad:
            _set_tripwire(wrapper)
        return wrapper

    @classmethod
    def from_local(
        cls,
        local: Tensor,
        layout: Layout,
        first_sample: int | None = None,
        statistics: str = "global",
    ) -> ShardedTensor:
        """Wraps this rank's shard.

        Args:
            local: the shard, of shape `layout.local_shape`.
            layout: where the shards lie.
            first_sample: index in the global batch of the group's first sample; by default the
                groups are taken to have equally many.
            statistics: over which ranks batch norm forms its statistics.

        Raises:
            UsageError: the shard has another shape than the layout gives this rank.
        """
        if tuple(local.shape) != layout.local_shape:
            raise UsageError(
                f"a shard of shape {tuple(local.shape)} was given, but rank "
                f"{layout.mesh.rank} holds {layout.local_shape} of {layout.shape}"
            )
        if first_sample is None:
            first_sample = layout.mesh.data_index * (layout.shape[0] if layout.shape else 1)
        return cls(local, layout, Origin(layout.mesh.forwards, first_sample, statistics))

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Where the shards lie (this is pydist's layout, not `torch.strided`)."""
        return self._layout

    @property
    def mesh(self) -> Mesh:
        """The mesh that holds the tensor."""
        return self._layout.mesh

    def to_local(self) -> Tensor:
        """This rank's shard, a plain tensor in the same autograd graph."""
        return local_of(self)

    def full_tensor(self) -> Tensor:
        """The whole tensor, plain, equal on all ranks of the sample group.

        The gradient that goes back into this tensor is the mean over the group.
        """
        from pydist.ops.redistribute import redistribute

        whole = redistribute(self, self._layout.whole())._local
        if whole is self._local:
            whole = with_true_gradient(whole, self.mesh, SPATIAL_AXES)
        return whole

    def redistribute(self, layout: Layout) -> ShardedTensor:
        """The same tensor in another layout of the same shape and mesh."""
        from pydist.ops.redistribute import redistribute

        return redistribute(self, layout)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        return f"ShardedTensor(shape={self._layout.shape}, {self._layout!r}, local={self._local!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        return ShardedTensor(self._local.__deepcopy__(memo), self._layout, self._origin)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupported(
            "a ShardedTensor can't be pickled: use full_tensor(), or pydist's checkpoints"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            # Perhaps another thread is still importing them: this import waits for it.
            importlib.import_module("pydist.ops")
            handler = HANDLERS.get(func)
        if handler is None:
            raise refusal(func, args, kwargs or {})
        return handler(*args, **kwargs) if kwargs else handler(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Only what goes around __torch_function__ gets here (torch.func, vmap, torch.tensor(x),
        # code that switched the override off): it would see a tensor without storage.
        raise refusal(func, args, kwargs or {})


def wrap(local: Tensor, layout: Layout, like: ShardedTensor) -> ShardedTensor:
    """A result of `like`: the shard `local` in `layout`."""
    return ShardedTensor(local, layout, like._origin)


def local_of(x: ShardedTensor) -> Tensor:
    """The shard of a handler's argument."""
    _refuse_foreign_graph(x)
    return x._local


def distribute_tensor(
    tensor: Tensor,
    mesh: Mesh,
    dims: Mapping[int, str] | None = None,
    first_sample: int | None = None,
) -> ShardedTensor:
    """Cuts a tensor that all ranks of the sample group hold equally.

    Differentiable: the gradient that reaches `tensor` is the true one, equal on all ranks.

    Args:
        tensor: the whole tensor, equal on all ranks of the group; the first few calls prove it.
        mesh: the mesh.
        dims: which dim lies on which mesh axis; by default [N, C, D, H, W] over depth, height
            and width.
        first_sample: index in the global batch of the group's first sample.

    Raises:
        UsageError: the ranks of the group hold different tensors, or `dims` does not fit.
    """
    from pydist.ops.redistribute import shard_of_plain

    layout = layout_for_sample(mesh, tensor.shape, dims)
    return ShardedTensor.from_local(shard_of_plain(tensor, layout), layout, first_sample)


def refusal(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str = ""
) -> NotSupported:
    """The error for a call that has no handler: its name, the module it was made in, a way on."""
    name = getattr(func, "__qualname__", None) or str(func)
    if name.startswith("getset_descriptor"):
        name = f"Tensor.{getattr(getattr(func, '__self__', None), '__name__', 'attribute')}"
    name = name.replace("TensorBase.", "Tensor.").replace("_VariableFunctionsClass.", "torch.")
    shapes = [
        list(a._layout.shape) if isinstance(a, ShardedTensor) else list(a.shape)
        for a in args
        if isinstance(a, Tensor)
    ]
    where = module_path()
    return NotSupported(
        f"{name} on a sharded tensor{f' in module {where}' if where else ''} "
        f"(shapes {shapes}) has no handler{f': {why}' if why else ''}; "
        "use x.full_tensor() to compute it on the whole tensor, or register a handler with "
        "pydist.tensor.implements"
    )


def module_path() -> str:
    """The path of the innermost parallelized module that is being called, "" outside of one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            path = module.__dict__.get("_pydist_path")
            if path is not None:
                return path
        frame = frame.f_back
    return ""


def _refuse_foreign_graph(x: ShardedTensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        node = x.grad_fn
    if node is not None:
        raise NotSupported(
            f"{node.name()} was applied to a sharded tensor itself, so its backward would be "
            "skipped: autograd.Function bypasses torch's overrides; apply it to x.to_local() and "
            "wrap the result with ShardedTensor.from_local"
        )


def _tripwire(_: Tensor) -> Tensor:
    raise NotSupported(
        "a gradient arrived at a ShardedTensor itself instead of its shard: an autograd.Function "
        "was applied to a sharded tensor; apply it to x.to_local()"
    )


def _set_tripwire(wrapper: ShardedTensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        wrapper.register_hook(_tripwire)


def adopt_local(x: ShardedTensor, local: Tensor) -> ShardedTensor:
    """Makes `local`, the result of a call in place, the shard of `x`."""
    x._local = local
    with torch._C.DisableTorchFunctionSubclass():
        if local.requires_grad and not x.requires_grad:
            x.requires_grad_()
            x.register_hook(_tripwire)
    return x
