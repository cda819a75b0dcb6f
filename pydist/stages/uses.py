"""The meshes that use each parameter and buffer of a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from pydist.stages.calls import Call, Key


class Uses:
    """Which meshes compute with each parameter and buffer; the same on all ranks.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._root = type(model).__name__
        self._of_tensor: dict[int, set[int]] = {
            id(tensor): set() for tensor in (*model.parameters(), *model.buffers())
        }
        self._of_module: dict[str, set[int]] = {}
        self._before: list[Key | None] = []  # each stage from 1 on, the last call with weights
        self._last: Key | None = None
        self._with_weights = {
            parent
            for name, _ in model.named_parameters()
            for parent in accumulate(name.split(".")[:-1], "{}.{}".format)
        }

    def possible(self, call: Call) -> set[int] | None:
        """Returns the meshes that have the weights and buffers of a call up to date.

        Weights that the program computes from parameters are known by their graph, without one by
        the module that makes the call.

        Args:
            call: the call.

        Returns:
            The meshes; `None` if all may compute it.
        """
        found: set[int] | None = None
        for operand in call.operands:
            known = [each for each in _leaves(operand) if each in self._of_tensor]
            sets = [self._of_tensor[each] for each in known]
            if not known and operand.dim() and call.key.module in self._with_weights:
                sets = [self._of_module.get(call.key.module, set())]
            for each in filter(None, sets):  # unused ones have changed on no mesh
                found = set(each) if found is None else found & each
        return found

    def note_training(self, call: Call, mesh: int, *, is_first: bool) -> None:
        """Records a call of a training step.

        Args:
            call: the call.
            mesh: computes it.
            is_first: whether no step has ended. Later only weights are recorded that no call has
                used yet; `possible` tells where the others are.
        """
        used = {each for x in call.operands for each in _leaves(x)}
        for operand in used & self._of_tensor.keys():
            if is_first or not self._of_tensor[operand]:
                self._of_tensor[operand].add(mesh)

    def note(self, key: Key, operands: Iterable[int], stage: int, meshes: set[int]) -> None:
        """Records a planned call; those before it are known.

        Args:
            key: the call.
            operands: ids of its plain tensors.
            stage: of the call.
            meshes: those that compute it.
        """
        self._before += [self._last] * (stage - len(self._before))
        self._of_module.setdefault(key.module, set()).update(meshes)
        for operand in operands:
            if (known := self._of_tensor.get(operand)) is not None:
                known.update(meshes)
                self._last = key

    def has_begun(self, stage: int, start: Key, key: Key, counts: Mapping[str, int]) -> bool:
        """Returns whether a stage begins with a call, or has begun before.

        Args:
            stage: from 1 on.
            start: the call at which it begins in the plan.
            key: the call.
            counts: of the calls so far, by module. The network may make others than were planned:
                the stage begins after the layer that is before it in the plan.
        """
        if key.module != start.module or key.number < start.number:
            return False
        before = self._before[stage - 1]
        return before is None or counts[before.module] > before.number

    def meshes_of(self, name: str, tensor: Tensor) -> set[int]:
        """Returns the meshes that use a tensor.

        A tensor from which a weight is computed, as in weight norm, belongs to the module that
        calls with the weight.

        Args:
            name: of the tensor in the network.
            tensor: a parameter or buffer.
        """
        found = self._of_tensor.get(id(tensor), set())
        while not found and name:
            name = name.rpartition(".")[0]
            found = self._of_module.get(name or self._root, set())
        return found


def _leaves(x: Tensor) -> list[int]:
    """Returns the ids of the parameters from which a tensor was computed, or its own."""
    if x.grad_fn is None:
        return [id(x)]
    found: list[int] = []
    nodes: list[Any] = [x.grad_fn]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        found += [] if leaf is None else [id(leaf)]
        nodes += [each for each, _ in node.next_functions]
    return found
