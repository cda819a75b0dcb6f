"""Tracking of the batches that several sample groups pass to a parallelized model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pydist.arguments import leaves
from pydist.errors import NotSupported
from pydist.gradients.engine import led_out
from pydist.gradients.graph import register_hook
from pydist.gradients.registration import use_as_parameter
from pydist.group_sizes import GroupSizes, mark_batch, weights_of
from pydist.tensor import ShardedTensor
from pydist.tensor.stage import StageTensor

if TYPE_CHECKING:
    from pydist.mesh import Mesh


def refuse_pickling(hook: object, protocol: object) -> NoReturn:
    """Refuses to pickle a model, whose hooks refer to its mesh."""
    raise NotSupported(
        "a parallelized model can't be pickled (torch.save): save its state_dict(), which a model "
        "that is not parallelized loads too, or use pydist's checkpoints"
    )


class Batches:
    """Hooks that exchange batch sizes between groups, and assign them to backward passes.

    The exchange starts when a training forward begins, and is complete when it ends. A forward pass
    without gradients in evaluation mode exchanges nothing: groups evaluate at their own pace. With
    gradients in evaluation mode, backward exchanges the sizes.

    A batch enters with a call of the model, or of a part of the model from outside.

    Args:
        mesh: the mesh.
        weighs: whether the loss of a group is weighted by its samples.
    """

    def __init__(self, mesh: Mesh, weighs: bool) -> None:
        self._mesh = mesh
        self.weighs = weighs
        """Whether the loss of a group is weighted by its samples."""
        weights_of(mesh).weighs &= weighs
        self._inside: list[tuple[nn.Module, GroupSizes | None]] = []
        self._by_themselves = WeakSet[nn.Module]()

    __reduce_ex__ = refuse_pickling

    def __deepcopy__(self, memo: dict[int, Any]) -> Batches:
        copy = memo[id(self)] = Batches(self._mesh, self.weighs)
        return copy

    def enter(
        self, module: nn.Module, inputs: Iterable[Any], known: GroupSizes | None = None
    ) -> GroupSizes | None:
        """Begins a call of the model, and returns the sizes of its batch.

        Args:
            module: the model.
            inputs: its arguments, also from containers among them; volumes are sharded.
            known: sizes of the batch, if a checkpoint repeats the call.

        Returns:
            The sizes; `None` with one sample group, or without a tensor.
        """
        self.note_replaced(module)
        if self._mesh.data_size == 1:
            return known
        batch, sizes = batch_of(inputs), known
        if batch is not None and sizes is None:
            first = batch._origin.sizes.given_first if isinstance(batch, ShardedTensor) else None
            after = self._mesh.session.part if module.training else 0
            sizes = self._sizes(module, batch.shape[0], first, after)
            self._begin(module, sizes)
        self._inside.append((module, sizes))
        return sizes

    @property
    def running(self) -> GroupSizes | None:
        """Sizes of the batch that the running call has received."""
        return self._inside[-1][1] if self._inside else None

    def is_inside(self, module: nn.Module) -> bool:
        """Returns whether a part of the model is called from within the model.

        In backward, where a checkpointed region is recomputed, the last forward call counts.
        """
        if self._inside:
            self._by_themselves.discard(module)
            return self._inside[-1][0] is not module
        if torch._C._current_graph_task_id() == -1:
            self._by_themselves.add(module)
        return module not in self._by_themselves

    def enter_part(self, module: nn.Module, batch: ShardedTensor) -> GroupSizes | None:
        """Begins a call of a part of the model from outside.

        Args:
            module: the part.
            batch: the sharded tensor among its arguments that determines the number of samples.

        Returns:
            The sizes of the batch: the earlier ones, if it comes from another part, or new ones.
            `None` if the part calls itself.
        """
        sizes = None
        if not self._inside:
            sizes = batch._origin.sizes
            if not (sizes.agreed and sizes.entered is self):
                sizes = self._sizes(module, batch.shape[0], sizes.given_first)
            self._begin(module, sizes)
        self._inside.append((module, sizes))
        return sizes

    def note_replaced(self, module: nn.Module) -> None:
        """Records tensors that replace parameters, as by `torch.func.functional_call`."""
        if self._mesh.size == 1:
            return
        for tensor in _in_places_of_parameters(module):
            if not isinstance(tensor, (nn.Parameter, ShardedTensor)):
                use_as_parameter(tensor, self._mesh)

    def _sizes(
        self, module: nn.Module, own: int, first: int | None, after: int | None = None
    ) -> GroupSizes:
        agreed = torch.is_grad_enabled() or module.training
        use = f"a forward in {'training' if module.training else 'evaluation mode'}"
        sizes = GroupSizes(
            self._mesh, own, first, after=after, agreed=agreed, weighs=self.weighs, use=use
        )
        sizes.entered = self
        return sizes

    def _begin(self, module: nn.Module, sizes: GroupSizes) -> None:
        # In backward, a checkpointed part is recomputed, whose batch has already entered.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            # A frozen network has no gradients to weight: its group may be alone.
            together = module.training and any(p.requires_grad for p in module.parameters())
            sizes.in_features = self.weighs and not together
            weights_of(self._mesh).begin(sizes, together=together)
            if together:
                sizes.start()

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Ends a call of the model or a part; a forward hook, also called when it raises."""
        if not self._inside or self._inside[-1][0] is not module:
            return  # called from within the model, or the inputs were refused
        _, sizes = self._inside.pop()
        if sizes is None or output is None or not torch.is_grad_enabled():
            return
        sizes.finish()
        # Of a network in stages, the outputs that this stage has.
        values = [x.value if isinstance(x, StageTensor) else x for x in leaves((output,))]
        tensors = [x for x in values if isinstance(x, Tensor)]
        if tensors and not any(x.requires_grad for x in tensors):
            led_out(self._mesh, sizes)
        if not self.weighs:
            return
        reached = _reached(self._mesh, sizes)
        for value in tensors:
            local = value._local if isinstance(value, ShardedTensor) else value
            if local.requires_grad and not local.is_leaf:
                mark_batch(local, sizes)
                register_hook(local, reached)


def _in_places_of_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yields a module's parameters, and its parts', that are not plain `nn.Parameter`s.

    Every forward pass calls this, so it is optimized: a third of the time of `module.modules()`.
    """
    parts, seen = [module], {module}
    while parts:
        part = parts.pop()
        for tensor in part._parameters.values():
            if tensor is not None and type(tensor) is not nn.Parameter:
                yield tensor
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)


def batch_of(inputs: Iterable[Any]) -> Tensor | None:
    """Returns the input of a model whose dim 0 counts the samples.

    This is the first sharded tensor, or else the first tensor with dims. Tensors whose extent in
    dim 0 is not 1 are preferred: an extent of 1, as of an atlas, may be shared by all samples.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor) and x.dim()]
    tensors = [x for x in tensors if isinstance(x, ShardedTensor)] or tensors
    return next((x for x in tensors if x.shape[0] != 1), next(iter(tensors), None))


def _reached(mesh: Mesh, sizes: GroupSizes) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        weights_of(mesh).reached(sizes)

    return hook
