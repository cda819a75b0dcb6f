"""Extends torch's autograd engine to notify reducers when a backward pass starts and ends.

`run_backward` of torch's engine is the only entry of backward passes that Python starts. It is
private; torch has no public API that reports their start, their roots and their failure.
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
from pydist.exchange.function import is_own_pass
from pydist.exchange.history import also_made_by
from pydist.gradients import replaced
from pydist.gradients.graph import NOTHING, Histories, mark_mesh, walk
from pydist.gradients.leaf import leaf_of
from pydist.gradients.reducer import Reducer
from pydist.group_sizes import GroupSizes
from pydist.mesh import Mesh

_engine: Any = type(Variable._execution_engine)


class _Detached(threading.local):
    """Mesh and batch of the last model outputs without a graph; thread-local, as ranks may be."""

    mesh: weakref.ref[Mesh] | None = None
    sizes: GroupSizes | None = None


_detached = _Detached()


def led_out(mesh: Mesh, sizes: GroupSizes) -> None:
    """Records a forward pass of a batch, of several groups, that gave outputs without a graph.

    If the next backward pass reaches no mesh, it trains a head on frozen features: its gradients
    are of each group's own samples, and are reduced like others.
    """
    _detached.mesh, _detached.sizes = weakref.ref(mesh), sizes


class _Next(threading.local):
    """Histories of the sharded tensors that are roots of a thread's next pass."""

    histories: Collection[int] = ()


_next = _Next()


def starts_from(histories: Iterable[int]) -> None:
    """Records the histories of the sharded tensors that are roots of this thread's next pass."""
    _next.histories = tuple(histories)


class _Engine(_engine):  # type: ignore[misc]
    """torch's engine, which notifies reducers of the backward passes that concern them."""

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
        # Other groups' graphs may reach a requested parameter, or its mesh, that this one does not.
        allow_unused = not accumulates and bool(args[4] if len(args) > 4 else False)
        known = dict.fromkeys(_meshes_of_leaves((*outputs, *(inputs if allow_unused else ()))))
        meshes += [mesh for mesh in known if mesh not in meshes]
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
                reducers[0].members.register(tensor)
        for reducer in reducers:
            reducer.enter(roots, sizes, accumulates=accumulates, create_graph=create_graph)
        keeps = accumulates and not is_nested
        with _compared(meshes, histories, keeps=keeps), _told(reducers):
            with replaced.means(inputs):
                results = super().run_backward(outputs, *args, **kwargs)
            if not accumulates:
                with torch.set_grad_enabled(create_graph):
                    for reducer in reducers:
                        results = reducer.returned(inputs, results, allow_unused=allow_unused)
        if not is_nested:  # else another call is running, with another result
            also_made_by(histories.total())
        for result in results or ():
            if isinstance(result, Tensor):
                mark_mesh(result, meshes[0], histories)
        return results


def _refuse_batched(seeds: Iterable[Any]) -> None:
    """Raises for a pass that computes a batch of gradients with torch's vmap."""
    if any(isinstance(x, Tensor) and torch._C._functorch.is_legacy_batchedtensor(x) for x in seeds):
        raise NotSupported(
            "is_grads_batched=True (vectorize=True in torch.autograd.functional) with a model or a "
            "tensor that is split: exchanges carry one gradient; call torch.autograd.grad once for "
            "each of grad_outputs"
        )


def _counted(found: Histories, *, is_nested: bool) -> Histories:
    """Returns the histories of a pass that starts: of its graph, or of the given roots."""
    given, _next.histories = _next.histories, ()
    is_own = is_own_pass()
    if not is_nested:
        return found
    # Within another pass, only given ones: its roots may be in a checkpointed region.
    return NOTHING if is_own else Histories({*found.wholes, *given}, ())


def _meshes_of_leaves(outputs: Iterable[Any]) -> Iterator[Mesh]:
    """Yields the meshes of members that are roots of a pass."""
    for tensor in outputs:
        if isinstance(tensor, Tensor) and tensor.grad_fn is None:
            leaf = leaf_of(tensor)
            reducer = None if leaf is None else leaf.reducer()
            if reducer is not None:
                yield reducer.mesh


@contextmanager
def _told(reducers: Sequence[Reducer]) -> Iterator[None]:
    """Notifies reducers of the end of a pass."""
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
    """Adds the histories of a pass to the hashes that the ranks compare.

    A pass that exchanges nothing may run on this rank alone, for inspection, so its histories are
    removed again: its results carry them.

    Args:
        meshes: the meshes that the pass concerns.
        histories: of the pass.
        keeps: whether the histories stay in any case, as accumulated gradients carry none.
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
    """Returns the number of calls that the groups of these meshes have started on this rank."""
    return sum(group.ledger.count for mesh in meshes for group in mesh.transports)


def install() -> None:
    """Replaces torch's engine by this one, once.

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
