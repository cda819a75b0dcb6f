"""Hooks that track the current layer in forward and backward, and measure its computation.

In forward, hooks surround every module's call. For backward, the nodes that a call has added to the
graph, those between its outputs and its inputs, are marked as the module's after the call and get
hooks that measure them. Both work on this rank's shards and exchange nothing, so they can't make
ranks diverge; full backward hooks of modules would add nodes of their own to the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pydist.tensor import ShardedTensor
from pydist.tensor.stage import StageTensor
from pydist.timers import Timers
from pydist.watchdog import MODULE_PATH

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_MARK = "pydist.profile"
"""Key in the metadata of a node that is assigned to a layer."""
_LEAF = "torch::autograd::AccumulateGrad"


class LayerHooks:
    """Hooks on all modules of a model, until `remove`.

    Args:
        model: the model, parallelized or not.
        timers: receives the current layer and its "compute" spans.
    """

    def __init__(self, model: nn.Module, timers: Timers) -> None:
        self.paths: list[str] = []
        """Paths of the layers, in the order of their first call."""
        self._timers = timers
        # For each call in progress: the layer around it, and its measurement.
        self._open: list[tuple[str, AbstractContextManager[None]]] = []
        self._names = {
            module: module.__dict__.get(MODULE_PATH, path or type(model).__name__)
            for path, module in model.named_modules()
        }
        self._handles = [
            handle
            for module in self._names
            for handle in (
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def remove(self) -> None:
        """Removes the hooks from the modules. Nodes of a graph keep theirs until it is freed."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        timers, path = self._timers, self._names[module]
        # Operations on the inputs since the last call of a module belong to the outer layer.
        self._claim((args, kwargs), timers.layer)
        if path not in self.paths:
            self.paths.append(path)
        measured = timers.measure("compute", path)
        self._open.append((timers.layer, measured))
        timers.layer = path
        measured.__enter__()

    def _leave(self, module: nn.Module, _: Any, outputs: Any) -> None:
        outer, measured = self._open.pop()
        measured.__exit__(None, None, None)
        self._claim(outputs, self._names[module])
        self._timers.layer = outer

    def _claim(self, values: Any, layer: str) -> None:
        """Assigns the graph nodes of tensors that have no layer yet to a layer."""
        with self._timers.measure("profiler", layer):
            self._claim_nodes(values, layer)

    def _claim_nodes(self, values: Any, layer: str) -> None:
        unseen = [x.grad_fn for x in _shards(values) if x.grad_fn is not None]
        while unseen:
            node = unseen.pop()
            notes: Any = node.metadata  # torch's types call the property a method
            if _MARK in notes or node.name() == _LEAF:
                continue
            notes[_MARK] = layer
            if layer:
                _measure_node(node, layer, self._timers)
            unseen += [n for n, _ in node.next_functions if n is not None]


def _shards(values: Any) -> Iterator[Tensor]:
    for each in tree_leaves(values):
        # Of a stage's tensors other stages have no value.
        leaf = each.value if isinstance(each, StageTensor) else each
        if isinstance(leaf, ShardedTensor):
            yield leaf._shard  # directly: only its graph is needed
        elif isinstance(leaf, Tensor):
            yield leaf


def _measure_node(node: torch.autograd.graph.Node, layer: str, timers: Timers) -> None:
    """Measures a node in backward as computation of its layer."""
    # A stack: nodes run one after the other, but a node may recompute a checkpointed part, which
    # runs a nested backward.
    open_: list[tuple[str, AbstractContextManager[None]]] = []

    def before(_: Any) -> None:
        measured = timers.measure("compute", layer)
        open_.append((timers.layer, measured))
        timers.layer = layer
        measured.__enter__()

    def after(*_: Any) -> None:
        timers.layer, measured = open_.pop()
        measured.__exit__(None, None, None)

    node.register_prehook(before)
    node.register_hook(after)
