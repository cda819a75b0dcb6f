"""The meshes that use each parameter and buffer of a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from pydist.stages.calls import Key


class Uses:
    """Which meshes compute with each parameter and buffer; the same on all ranks.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._root = type(model).__name__
        self._weights = {name for name, _ in model.named_parameters()}
        self._of_name: dict[str, set[int]] = {}
        self._of_module: dict[str, set[int]] = {}
        self._statistics: dict[str, set[int]] = {}  # of norms: the meshes that have updated them
        self._before: list[Key | None] = []  # each stage from 1 on, the last call with weights
        self._last: Key | None = None
        self._first_in_step: dict[str, set[int]] = {}
        self._has_stepped = False
        self.is_gathered = False
        """Whether all meshes have all values of the last step."""

    def note(self, key: Key, operands: Iterable[str], stage: int, meshes: set[int]) -> None:
        """Records a planned call; those before it are known.

        Args:
            key: the call.
            operands: names of the parameters and buffers that it computes with.
            stage: of the call.
            meshes: those that compute it.
        """
        self._before += [self._last] * (stage - len(self._before))
        self._of_module.setdefault(key.module, set()).update(meshes)
        for name in operands:
            self._of_name.setdefault(name, set()).update(meshes)
            if name in self._weights:
                self._last = key

    def has_begun(self, stage: int, start: Key, key: Key, counts: Mapping[str, int]) -> bool:
        """Returns whether a stage begins with a call, or has begun before.

        Args:
            stage: from 1 on.
            start: the call at which it begins in the plan.
            key: the call.
            counts: of the calls so far, by module. The network may make others than were planned:
                the stage begins after the layer that is before it in the plan, or with a module.
        """
        if key.module != start.module or key.number < start.number:
            return False
        before = self._before[stage - 1]
        return before is None or not start.number or counts[before.module] > before.number

    def possible(self, operands: Iterable[str], *, trains: bool) -> set[int] | None:
        """Returns the meshes that have the weights and statistics of a call up to date.

        Args:
            operands: names of the parameters and buffers that it computes with.
            trains: whether in a training step, which also needs the optimizer's state.

        Returns:
            The meshes; `None` if all may compute it.
        """
        if not self._has_stepped or (self.is_gathered and not trains):
            return None
        found: set[int] | None = None
        for name in operands:
            known = self._statistics.get(name)
            if name in self._weights:
                known = self._of_name.get(name)
            if known:  # others have not changed on any mesh
                found = set(known) if found is None else found & known
        return found

    def note_training(self, operands: Iterable[str], statistics: Iterable[str], mesh: int) -> None:
        """Records a call of a training step.

        Args:
            operands: names of the parameters and buffers that it computes with.
            statistics: those of the buffers that it updates.
            mesh: computes it.
        """
        for name in operands:
            if not self._has_stepped or not self._of_name.get(name):
                self._first_in_step.setdefault(name, set()).add(mesh)
        for name in statistics:
            self._statistics.setdefault(name, set()).add(mesh)

    def end_step(self, *, completed: bool) -> None:
        """Counts what a step has trained: other meshes have old values from now on.

        Args:
            completed: whether all ranks have made all passes.
        """
        for name, meshes in self._first_in_step.items() if completed else ():
            self._of_name.setdefault(name, set()).update(meshes)
        self._first_in_step.clear()
        self._has_stepped, self.is_gathered = True, False

    def meshes_of(self, name: str) -> set[int]:
        """Returns the meshes that use a parameter or buffer.

        One that no call has used belongs to the module that is nearest to it.

        Args:
            name: in the network.
        """
        found = self._statistics.get(name) or self._of_name.get(name, set())
        while not found and name:
            name = name.rpartition(".")[0]
            found = self._of_module.get(name or self._root, set())
        return found
