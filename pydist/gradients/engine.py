"""torch's autograd engine, extended to tell gradient reducers when a backward pass starts and ends.

`run_backward` of torch's engine is the one entry of all backward passes that Python starts. It is
private; torch has no public means to learn of their start, their roots and their failure.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pydist.errors import NotSupported
from pydist.exchange.history import also_made_by
from pydist.gradients import replaced
from pydist.gradients.graph import NOTHING, Histories, mark, walk
from pydist.gradients.leaf import leaf_of
from pydist.gradients.reducer import Reducer
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


class _Next(threading.local):
    """What is known of the next pass of a thread.

    Attributes:
        histories: of the sharded tensors that a program starts it from.
        is_own: whether a backward function of pydist starts it, and no program.
    """

    histories: Collection[int] = ()
    is_own = False


_next = _Next()


def starts_from(histories: Iterable[int]) -> None:
    """Notes what has made the sharded tensors that the next pass of this thread starts from."""
    _next.histories = tuple(histories)


def own_grad(y: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients with a graph, for a backward function that has computed `y` anew from `inputs`."""
    _next.is_own = True
    try:
        return torch.autograd.grad(y, inputs, grad, create_graph=True)
    finally:
        _next.is_own = False


class _Engine(_engine):  # type: ignore[misc]
    """torch's engine, which tells the reducers of backward passes that concern them."""

    def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        seeds = args[0] if args else ()
        roots = [getattr(each, "node", None) or getattr(each, "grad_fn", None) for each in outputs]
        roots += [each.grad_fn for each in seeds if isinstance(each, Tensor)]
        meshes, leaves, found = walk(roots)
        is_nested = torch._C._current_graph_task_id() != -1
        histories = _counted(found, is_nested=is_nested)
        accumulates = bool(kwargs.get("accumulate_grad", False))
        create_graph = bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False))
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        meshes += [mesh for mesh in dict.fromkeys(_meshes_of_leaves(outputs)) if mesh not in meshes]
        noted, _detached.mesh = _detached.mesh, None
        sizes, _detached.sizes = _detached.sizes, None
        frozen = noted() if noted is not None else None
        if not meshes and frozen is not None and any(isinstance(x, nn.Parameter) for x in leaves):
            meshes.append(frozen)
        if not meshes:
            return super().run_backward(outputs, *args, **kwargs)
        services = [mesh.session.find(Reducer) for mesh in meshes]
        reducers = [reducer for reducer in services if reducer is not None]
        if reducers:
            _refuse_batched(seeds)
            for tensor in leaves:
                reducers[0].register(tensor)
        for reducer in reducers:
            reducer.enter(roots, sizes, accumulates=accumulates, create_graph=create_graph)
        keeps = accumulates and not is_nested
        with _compared(meshes, histories, keeps=keeps), _told(reducers):
            with replaced.means(inputs):
                results = super().run_backward(outputs, *args, **kwargs)
            if not accumulates:
                with torch.set_grad_enabled(create_graph):
                    for reducer in reducers:
                        results = reducer.returned(inputs, results)
        if not is_nested:  # else another call is running, which returns something else
            also_made_by(histories.total())
        for result in results or ():
            if isinstance(result, Tensor):
                mark(result, meshes[0], histories)
        return results


def _refuse_batched(seeds: Iterable[Any]) -> None:
    """Names a pass that computes several gradients at once, by torch's vmap."""
    if any(isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) for x in seeds):
        raise NotSupported(
            "is_grads_batched=True (vectorize=True in torch.autograd.functional) with a model or a "
            "tensor that is split: exchanges carry one gradient; call torch.autograd.grad once for "
            "each of grad_outputs"
        )


def _counted(found: Histories, *, is_nested: bool) -> Histories:
    """Which histories a pass that starts has: of those that its graph leads to, and those given."""
    given, _next.histories = _next.histories, ()
    is_own, _next.is_own = _next.is_own, False
    if not is_nested:
        return found
    # Within another pass only what the program says: its roots may be in a checkpointed part.
    return NOTHING if is_own else Histories({*found.wholes, *given}, ())


def _meshes_of_leaves(outputs: Iterable[Any]) -> Iterator[Mesh]:
    """The meshes of members that a pass starts from."""
    for tensor in outputs:
        if isinstance(tensor, Tensor) and tensor.grad_fn is None:
            leaf = leaf_of(tensor)
            reducer = None if leaf is None else leaf.reducer()
            if reducer is not None:
                yield reducer.mesh


@contextmanager
def _told(reducers: Sequence[Reducer]) -> Iterator[None]:
    """Tells reducers of the end of a pass."""
    try:
        yield
    except BaseException:
        for reducer in reducers:
            reducer.leave(interrupted=True)
        raise
    for reducer in reducers:
        reducer.leave(interrupted=False)


@contextmanager
def _compared(meshes: Sequence[Mesh], histories: Histories, *, keeps: bool) -> Iterator[None]:
    """Adds the histories of a pass to what the ranks compare.

    A pass that exchanges nothing may be this rank's own look at something, and then does not count:
    what it returns carries its histories.

    Args:
        meshes: those that the pass concerns.
        histories: of the pass.
        keeps: whether it counts in any case: what it accumulates carries no history.
    """
    ledgers = [mesh.sample.ledger for mesh in meshes] if histories is not NOTHING else []
    before, calls = [ledger.history for ledger in ledgers], _calls(meshes)
    for ledger in ledgers:
        ledger.history = hash((ledger.history, histories.total()))
    try:
        yield
    finally:
        if not keeps and _calls(meshes) == calls:
            for ledger, history in zip(ledgers, before, strict=True):
                ledger.history = history


def _calls(meshes: Iterable[Mesh]) -> int:
    """How many calls the groups of these meshes have started on this rank."""
    return sum(group.ledger.count for mesh in meshes for group in mesh.transports)


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
