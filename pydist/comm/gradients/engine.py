"""torch's autograd engine, extended to tell gradient reducers when a backward pass starts and ends.

`run_backward` of torch's engine is the one entry of all backward passes that Python starts. It is
private; torch has no public means to learn of their start, their roots and their failure.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pydist.comm.gradients.graph import mark, walk
from pydist.comm.gradients.leaf import leaf_of
from pydist.comm.gradients.reducer import Reducer
from pydist.errors import NotSupported
from pydist.group_sizes import GroupSizes
from pydist.mesh import Mesh

_engine: Any = type(Variable._execution_engine)


class _Detached(threading.local):
    """Of a model whose last outputs have no graph: mesh and batch; ranks can be threads."""

    mesh: weakref.ref[Mesh] | None = None
    sizes: GroupSizes | None = None


_detached = _Detached()


def led_out(mesh: Mesh, sizes: GroupSizes) -> None:
    """Notes that the forward pass of a batch has given outputs without a graph, to several groups.

    What the next backward pass trains without reaching a mesh is a head on frozen features: its
    gradients are those of each group's own samples, and are reduced as others are.
    """
    _detached.mesh, _detached.sizes = weakref.ref(mesh), sizes


def _note_history(meshes: Iterable[Mesh], history: int) -> None:
    """Adds what a backward pass starts from to what the ranks compare at its end."""
    # A pass within another is of one block, and may meet what this rank alone has looked at.
    if torch._C._current_graph_task_id() == -1:
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
        _note_history(meshes, history)
        found = [mesh.session.find(Reducer) for mesh in meshes]
        reducers = [reducer for reducer in found if reducer is not None]
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
        for reducer in reducers:
            reducer.leave(interrupted=False)
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
