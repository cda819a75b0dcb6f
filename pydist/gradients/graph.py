"""Walks of the autograd graph, which find the parameters that a backward pass will reach.

The leaves below a sharded tensor are known from the calls that made it. The others are below plain
tensors before and after such calls (a computed weight, a head after `full_tensor()`). Their part of
the graph is walked; the start node of a walk is marked with the results, and later walks end there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pydist import marks
from pydist.exchange.adjoints import mean_ranks
from pydist.gradients.leaf import leaf_of

if TYPE_CHECKING:
    from pydist.mesh import Mesh

_MARK = "pydist mesh"
_HISTORIES = "pydist histories"
_USED_BEFORE = "pydist used before"
WHOLE, USED_IN = "pydist whole", "pydist used in"
"""Marks of nodes: a value that all ranks have; and the mesh with whose shards it was used."""
_functions: Any = torch._C._functions


class Histories(NamedTuple):
    """Histories of the tensors that a graph leads to; sets, since their order is rank-local."""

    wholes: Collection[int]
    """Histories of plain tensors that all ranks have."""
    shards: Collection[int]
    """Histories of shards; other ranks may not have read theirs, if one rank inspects its own."""

    def total(self) -> int:
        """Returns one number for all histories."""
        return sum(self.wholes) + sum(self.shards)


NOTHING = Histories((), ())


def mark_mesh(tensor: Tensor, mesh: Mesh, histories: Histories) -> None:
    """Marks a plain tensor whose parameters are all known to the mesh.

    Args:
        tensor: the plain tensor.
        mesh: the mesh.
        histories: of the tensor.
    """
    marks.mark(tensor, _MARK, mesh)
    marks.mark(tensor, _HISTORIES, histories)


def mark_whole(tensor: Tensor) -> None:
    """Marks a plain tensor, computed from sharded ones, that all ranks have."""
    marks.mark(tensor, WHOLE, True)


def mean_of(grad: Tensor, mesh: Mesh, axes: tuple[str, ...], weight: float) -> Tensor:
    """Averages a parameter's gradient over the ranks along `axes`. Collective, differentiable.

    Args:
        grad: the gradient, in the parameter's shape.
        mesh: the mesh.
        axes: names of its axes.
        weight: of this rank's gradient.
    """
    mean = mean_ranks(grad, mesh, axes, "gradients", weight)
    if torch.is_grad_enabled():
        mark_mesh(mean, mesh, NOTHING)
        mark_whole(mean)
    return mean


def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Registers a hook on a tensor, also on a view whose base was changed past autograd.

    torch makes a new graph node for such a view. If `register_hook` makes it, the process crashes
    (torch 2.13), so the node is read before.
    """
    _ = tensor.grad_fn
    handle: RemovableHandle = tensor.register_hook(hook)
    return handle


def walk(
    nodes: Iterable[Any], mesh: Mesh | None = None
) -> tuple[list[Mesh], list[Tensor], Histories]:
    """Finds the meshes, leaves and histories that the unmarked part of a graph leads to.

    Args:
        nodes: the start nodes.
        mesh: marks the start node; by default the first mesh that is found.

    Returns:
        The meshes whose tensors or parameters are reached; the leaves that none of them knows; and
        the histories of the tensors.
    """
    roots = [node for node in nodes if node is not None]
    wholes, shards = set[int](), set[int]()
    meshes: dict[int, Mesh] = {}
    leaves: list[Tensor] = []
    for node, marked in marks.below(roots, _MARK):
        if isinstance(node, _functions.AccumulateGrad):
            leaf = leaf_of(node.variable)
            reducer = None if leaf is None else leaf.reducer()
            if reducer is None:
                leaves.append(node.variable)
            else:
                meshes[id(reducer.mesh)] = reducer.mesh
        elif marked is not None:
            meshes[id(marked)] = marked
            of_node: Histories = node.metadata[_HISTORIES]
            wholes.update(of_node.wholes)
            shards.update(of_node.shards)
    found, histories = list(meshes.values()), Histories(wholes, shards)
    owner = mesh or (found[0] if found else None)
    if owner is not None and len(roots) == 1 and (mesh is not None or len(found) == 1):
        # Not the nodes below, as different ranks walk different ones.
        roots[0].metadata.update({_MARK: owner, _HISTORIES: histories})
    leaves.reverse()  # roughly the order in which they were used
    return found, leaves, histories


def leads_to(nodes: Iterable[Any], mesh: Mesh) -> bool:
    """Returns whether a graph contains results of calls on a mesh."""
    return any(marked is mesh for _, marked in marks.below(nodes, _MARK))


def note_move(parameter: Tensor, mesh: Mesh) -> None:
    """Records that a parameter was used on a mesh before it moves to another one.

    The record belongs to the node of the graphs that use the parameter now, and is gone with them.
    """
    if parameter.requires_grad:
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        node.metadata.setdefault(_USED_BEFORE, {})[id(mesh)] = mesh


def meshes_before(parameter: Tensor) -> list[Mesh]:
    """Returns the meshes on which a graph may use a parameter that has moved to another one."""
    if not parameter.requires_grad:
        return []
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    return list(node.metadata.get(_USED_BEFORE, {}).values())


def is_reached(parameter: Tensor) -> bool:
    """Returns whether the running backward reaches a parameter.

    Backward also reaches a parameter that was frozen after the forward pass: torch adds nothing to
    its gradient, but calls its hooks.
    """
    trains = parameter.requires_grad
    try:
        if not trains:
            parameter.requires_grad_(True)  # torch returns the node only if a gradient is required
        # Not cached: `model.double()` gives a parameter another node.
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # the engine refuses the query for inputs of autograd.grad
    finally:
        if not trains:
            parameter.requires_grad_(False)
