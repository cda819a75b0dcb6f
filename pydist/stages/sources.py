"""The parameters and buffers from which a network computes its plain tensors in a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pydist.stages.shapes import tensors_of
from pydist.tensor.stage import StageTensor

_NONE = frozenset[str]()


def names_of(model: nn.Module) -> list[tuple[frozenset[str], Tensor]]:
    """Returns the parameters and buffers of a network with their names."""
    found = (*model.named_parameters(), *model.named_buffers())
    return [(frozenset([name]), x) for name, x in found]


class Sources(TorchFunctionMode):
    """Follows plain tensors to the parameters and buffers that they come from, without a graph.

    As of weights that are normalized, scaled, cut or transposed, also in evaluation and detached.

    Args:
        named: the network's parameters and buffers; see `names_of`.
    """

    def __init__(self, named: Sequence[tuple[frozenset[str], Tensor]]) -> None:
        super().__init__()
        self._of = {id(x): name for name, x in named}
        self._alive = [x for _, x in named]  # so that no other tensor has their ids

    def of(self, x: Tensor) -> frozenset[str]:
        """Returns the names of the parameters and buffers."""
        return self._of.get(id(x), _NONE)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], StageTensor):
            return result  # as most calls
        given = tensors_of((args, kwargs or {}))
        if any(isinstance(x, StageTensor) for x in given):
            return result
        sources = _NONE.union(*(self.of(x) for x in given))
        for x in tensors_of(result) if sources else ():
            self._of[id(x)] = sources
            self._alive.append(x)
        return result
