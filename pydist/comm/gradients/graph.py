"""Which parameters a backward pass will reach: autograd graphs walked, and told when they run.

The leaves below a sharded tensor are known from the calls that made it. What remains are plain
tensors before such calls and after them (a computed weight, a head after `full_tensor()`). Their
part of the graph is walked once; nodes from which all is known are marked.

`run_backward` of torch's engine is the one entry of all backward passes that Python starts. It is
private; torch has no public means to learn of their start, their roots and their failure.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from pydist import marks
from pydist.comm.gradients.leaf import leaf_of
from pydist.errors import NotSupported

if TYPE_CHECKING:
    from pydist.group_sizes import GroupSizes
    from pydist.mesh import Mesh

_MARK = "pydist mesh"
_HISTORY = "pydist history"
_functions: Any = torch._C._functions
_engine: Any = type(Variable._execution_engine)


class _Detached(threading.local):
    """Of a model whose last outputs have no graph: mesh and batch; ranks can be threads."""

    mesh: weakref.ref[Mesh] | None = None
    sizes: GroupSizes | None = None


_detached = _Detached()


def mark(tensor: Tensor, mesh: Mesh, history: int = 0) -> None:
    """Notes that all parameters that a tensor was computed from are known to the mesh."""
    marks.mark(tensor, _MARK, mesh)
    marks.mark(tensor, _HISTORY, history)


def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Registers a hook on a tensor, also on a view whose base was changed past autograd.

    torch makes a new graph node for such a view. Where `register_hook` is what makes it, the
    process crashes (torch 2.13), so the node is asked for before.
    """
    _ = tensor.grad_fn
    handle: RemovableHandle = tensor.register_hook(hook)
    return handle


def led_out(mesh: Mesh, sizes: GroupSizes) -> None:
    """Notes that the forward pass of a batch has given outputs without a graph, to several groups.

    What the next backward pass trains without reaching a mesh is a head on frozen features: its
    gradients are those of each group's own samples, and are reduced as others are.
    """
    _detached.mesh, _detached.sizes = weakref.ref(mesh), sizes


def walk(nodes: Iterable[Any], mesh: Mesh | None = None) -> tuple[list[Mesh], list[Tensor], int]:
    """Finds what the unmarked part of a graph leads to.

    Args:
        nodes: where to start.
        mesh: marks what was walked; by default the first mesh that is found does.

    Returns:
        The meshes whose tensors or parameters are met; the leaves that none of them knows; and a
        hash of the calls that have made the tensors (see `pydist.comm.exchange.history`).
    """
    history = 0
    meshes: dict[int, Mesh] = {}
    leaves: list[Tensor] = []
    walked: list[Any] = []
    for node, marked in marks.below(nodes, _MARK):
        walked.append(node)
        if isinstance(node, _functions.AccumulateGrad):
            leaf = leaf_of(node.variable)
            reducer = None if leaf is None else leaf.reducer()
            if reducer is None:
                leaves.append(node.variable)
            else:
                meshes[id(reducer.mesh)] = reducer.mesh
        elif marked is not None:
            meshes[id(marked)] = marked
            history += node.metadata.get(_HISTORY, 0)  # a sum: the order is this rank's own
    found = list(meshes.values())
    owner = mesh or (found[0] if found else None)
    if owner is not None:
        for node in walked:
            node.metadata[_MARK] = owner
    leaves.reverse()  # the order in which they were used, as far as the graph tells it
    return found, leaves, hash(history)


def is_reached(parameter: Tensor) -> bool:
    """Whether the running backward reaches a parameter.

    It also reaches a parameter that was frozen after the forward pass: torch adds nothing to its
    gradient then, but calls its hooks.
    """
    trains = parameter.requires_grad
    try:
        if not trains:
            parameter.requires_grad_(True)  # torch names the node only of those that require it
        # Not remembered: `model.double()` gives a parameter another node.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # the engine refuses the question for what it captures
    finally:
        if not trains:
            parameter.requires_grad_(False)


def _note_history(meshes: Iterable[Mesh], history: int) -> None:
    """Adds what a backward pass starts from to what the ranks compare at its end."""
    for mesh in meshes:
        ledger = mesh.sample.ledger
        ledger.history = hash((ledger.history, history))


class _Engine(_engine):  # type: ignore[misc]
    """torch's engine, which tells the reducers of backward passes that concern them."""

    def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        seeds = args[0] if args else ()
        roots = [getattr(each, "node", None) or getattr(each, "grad_fn", None) for each in outputs]
        roots += [each.grad_fn for each in seeds if isinstance(each, Tensor)]
        direct = [t for t in outputs if isinstance(t, Tensor) and t.grad_fn is None]
        meshes, leaves, history = walk(roots)
        for tensor in direct:
            leaf = leaf_of(tensor)
            reducer = None if leaf is None else leaf.reducer()
            if reducer is not None and reducer.mesh not in meshes:
                meshes.append(reducer.mesh)
        noted, _detached.mesh = _detached.mesh, None
        sizes, _detached.sizes = _detached.sizes, None
        frozen = noted() if noted is not None else None
        if not meshes and frozen is not None and any(isinstance(x, nn.Parameter) for x in leaves):
            meshes.append(frozen)
        if not meshes:
            return super().run_backward(outputs, *args, **kwargs)
        # A pass within another may be this rank's own look at something, if it exchanges nothing.
        is_nested = torch._C._current_graph_task_id() != -1
        calls = [mesh.sample.ledger.count for mesh in meshes]
        if not is_nested:
            _note_history(meshes, history)
        reducers = [mesh.reducer for mesh in meshes if mesh.reducer is not None]
        if reducers:
            for tensor in leaves:
                reducers[0].register(tensor)
        for reducer in reducers:
            reducer.enter(
                roots,
                sizes,
                accumulates=bool(kwargs.get("accumulate_grad", False)),
                create_graph=bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False)),
            )
        try:
            results = super().run_backward(outputs, *args, **kwargs)
        except BaseException:
            for reducer in reducers:
                reducer.leave(interrupted=True)
            raise
        reduced = [reducer.leave(interrupted=False) for reducer in reducers]
        if is_nested and (any(reduced) or calls != [mesh.sample.ledger.count for mesh in meshes]):
            _note_history(meshes, history)
        for result in results or ():
            if isinstance(result, Tensor):
                mark(result, meshes[0])
        return results


def install() -> None:
    """Puts this engine in the place of torch's, once.

    Raises:
        NotSupported: this version of torch starts backward passes in another way.
    """
    if isinstance(Variable._execution_engine, _Engine):
        return
    if not hasattr(_engine, "run_backward") or not hasattr(_engine, "queue_callback"):
        raise NotSupported(
            f"torch {torch.__version__} starts backward passes in a way that pydist does not know: "
            "gradients could not be reduced; use a version that pydist was tested with"
        )
    Variable._execution_engine = _Engine()
