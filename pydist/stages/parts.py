"""Cuts a batch into micro-batches, with their weights and the indices of their samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from pydist._loader import native
from pydist.arguments import leaves, mapped
from pydist.batches import batch_of
from pydist.errors import UsageError
from pydist.gradients.leaf import leaf_of
from pydist.group_sizes import GroupSizes, weights_of
from pydist.mesh import Mesh
from pydist.tensor import ShardedTensor, local_of
from pydist.tensor.operands import distribute_tensor

_CHECKED = 4096


class BatchPart(NamedTuple):
    """Micro-batch that a stage receives.

    Attributes:
        number: of earlier ones in its batch.
        samples: their indices in the global batch, by which random numbers are drawn.
        share: its samples, divided by the samples of the group's batch.
        of_groups: its samples, divided by the samples of all groups' parts with this number.
        weight: of its gradient.
        inputs: the network's arguments.
        cut_later: the indices of those that each pass cuts over the stage, as their graphs differ.
        target: the criterion's.
    """

    number: int
    samples: range
    share: float
    of_groups: float
    weight: float
    inputs: tuple[Any, ...]
    cut_later: frozenset[int]
    target: Any

    def entered(self, mesh: Mesh, dims: int) -> tuple[Any, ...]:
        """Returns the arguments of a pass, cut over a stage.

        Args:
            mesh: of the stage.
            dims: number of dims of plain arguments that are cut over the mesh.
        """
        first = self.samples.start
        return tuple(
            on_mesh(x, mesh, dims, first) if i in self.cut_later else x
            for i, x in enumerate(self.inputs)
        )


def is_count(micro_batches: Any) -> bool:
    """Returns whether a value is a possible number of micro-batches."""
    return isinstance(micro_batches, int) and micro_batches >= 1


def check_count(micro_batches: int) -> None:
    """Checks a number of micro-batches that a user gives.

    Raises:
        UsageError: it is not a count >= 1.
    """
    if not is_count(micro_batches):
        raise UsageError(f"micro_batches={micro_batches!r}: expected a count >= 1")


def split_batch(
    inputs: Any, target: Any, count: int, mesh: Mesh, dims: int, own_dims: int, *, weighs: bool
) -> Iterator[BatchPart]:
    """Yields the micro-batches of a batch. Collective over the groups of a mesh.

    Args:
        inputs: an argument of the network, or a tuple of them.
        target: the criterion's.
        count: number of micro-batches.
        mesh: of this rank's stage.
        dims: number of dims of plain arguments that are cut over the mesh.
        own_dims: number of dims of the network's batches, on any mesh.
        weighs: whether sample groups are weighted by their samples.

    Raises:
        UsageError: there is no tensor among the inputs, or there are too few samples.
    """
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    batch = _batch_of(arguments, own_dims)
    if batch is None:
        raise UsageError("inputs: expected the network's arguments, with a tensor among them")
    samples = batch.shape[0]
    sizes = GroupSizes(mesh, samples, _given_first(arguments), weighs=weighs)
    weights_of(mesh).begin(sizes, together=False)  # for closures that run a step
    if min(sizes.counts) < count:
        raise UsageError(f"{min(sizes.counts)} samples in {count} micro-batches")
    begins = sizes.first_sample
    # Kernels are passed in containers, too, and the network's entry cuts none of them either.
    later = frozenset(
        i
        for i, x in enumerate(arguments)
        if isinstance(x, Tensor) and x.requires_grad and x.dim() and x.shape[0] == samples
    )
    cuts = [[n * i // count for i in range(count + 1)] for n in sizes.counts]
    for i, (a, b) in enumerate(pairwise(cuts[mesh.data_index])):
        share = weight = (b - a) / samples
        of_groups = sum(each[i + 1] - each[i] for each in cuts)
        if weighs:
            # Weights of groups make up for their different shares of this micro-batch.
            weight = of_groups / sum(sizes.counts)
        cut = _Cut(mesh, dims, samples, range(a, b), begins + a, share / weight)
        found = mapped(cut.sharded, arguments), later, mapped(cut.own, target)
        numbers = range(begins + a, begins + b)
        yield BatchPart(i, numbers, share, (b - a) / of_groups, weight, *found)


@dataclass(frozen=True)
class _Cut:
    """Cuts a micro-batch out of arguments.

    Attributes:
        mesh: of this rank's stage.
        dims: number of dims of plain tensors that are cut over the mesh.
        samples: in the batch.
        part: the indices of the micro-batch's samples in the batch, an interval.
        first: index in the global batch of the first sample.
        scale: of gradients of inputs, which are the group's own: the loss has weights by which
            gradients of parameters become means over groups.
    """

    mesh: Mesh
    dims: int
    samples: int
    part: range
    first: int
    scale: float

    def _samples(self, x: Any) -> Any:
        """Returns the samples of a tensor; anything else unchanged."""
        if not self._is_batch(x):
            return x
        part = slice(self.part.start, self.part.stop)
        if not isinstance(x, ShardedTensor):
            return x[part]
        layout = x.layout.replace((len(self.part), *x.shape[1:]))
        return ShardedTensor.from_local(local_of(x)[part], layout, self.first, x._origin.statistics)

    def own(self, x: Any) -> Any:
        """Returns the samples of a tensor, with gradients of the group's own loss.

        A plain leaf without samples, such as a template, is an input as well; parameters have means
        over the groups, and so has what the reducer knows.
        """
        part = self._samples(x)
        if self.scale == 1 or not isinstance(part, Tensor) or not part.requires_grad:
            return part
        if part is x and x.is_leaf and not isinstance(x, ShardedTensor | nn.Parameter):
            part = x.view_as(x)
        if part is not x and not isinstance(part, ShardedTensor):
            part.register_hook(lambda grad: grad * self.scale if leaf_of(x) is None else grad)
        return part

    def sharded(self, x: Any) -> Any:
        """Returns the samples of an argument of the network, if it has no gradient cut over it."""
        part = self.own(x)
        if not self._is_batch(x) or isinstance(part, ShardedTensor):
            return part
        if len(part) < self.samples:
            part = part.clone()  # or micro-batches would notice each other's changes in place
        return part if x.requires_grad else on_mesh(part, self.mesh, self.dims, self.first)

    def _is_batch(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == self.samples


def on_mesh(x: Tensor, mesh: Mesh, dims: int, first_sample: int | None = None) -> Tensor:
    """Returns an argument of the network as a stage's ranks hold it.

    Args:
        x: plain or sharded.
        mesh: of the stage.
        dims: number of dims of plain tensors that are cut over the mesh; see `Grid.batch_dims`.
        first_sample: index of the first one in the global batch, in a step.
    """
    if isinstance(x, ShardedTensor) or x.dim() < 3:
        return x
    return distribute_tensor(x, mesh, None if x.dim() == dims else {}, first_sample=first_sample)


def _batch_of(arguments: tuple[Any, ...], dims: int) -> Tensor | None:
    """Returns the argument whose dim 0 counts the samples, the same on the meshes of all stages.

    It is sharded or has the dims of the network's batches, if there is such a tensor; one in a
    container, as kernels are, only if no direct argument has them. See `batch_of`.
    """
    nested = list(leaves(arguments))
    for given in (arguments, nested):
        tensors = (x for x in given if isinstance(x, Tensor))
        batches = (x for x in tensors if isinstance(x, ShardedTensor) or x.dim() == dims)
        if (batch := batch_of(batches)) is not None:
            return batch
    return batch_of(nested)


def batch_checksum(values: Any) -> int:
    """Returns a checksum of the first elements of all plain tensors on the host, one each 4 KiB.

    It tells batches of different samples apart; sharded tensors differ between stages.
    """
    checksum = 0
    for x in leaves((values,)):
        if isinstance(x, Tensor) and not isinstance(x, ShardedTensor) and not x.is_cuda:
            first = x.detach().flatten()[: _CHECKED // x.element_size()]
            checksum = native.crc32c(first.contiguous(), checksum)
    return checksum


def _given_first(arguments: Any) -> int | None:
    """Returns the index in the global batch of the first sample, if the loader has given it."""
    found = (x for x in leaves(arguments) if isinstance(x, ShardedTensor))
    return next((x._origin.sizes.given_first for x in found), None)
