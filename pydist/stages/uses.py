"""The meshes that use each parameter and buffer of a network."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


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

    def note(self, module: str, operands: Iterable[int], meshes: set[int]) -> None:
        """Records a call.

        Args:
            module: the path of the module that makes it.
            operands: ids of its plain tensors.
            meshes: those that compute it.
        """
        self._of_module.setdefault(module, set()).update(meshes)
        for operand in operands:
            if (known := self._of_tensor.get(operand)) is not None:
                known.update(meshes)

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
