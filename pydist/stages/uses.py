"""The meshes that use each parameter and buffer of a network."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from torch import nn

from pydist.errors import NotSupported
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
        self._trained = set[str]()  # weights that have had a gradient
        self._statistics: dict[str, set[int]] = {}  # of norms: the meshes that have updated them
        self._made_of: dict[str, set[str]] = {}  # by name of what forward computes: the names of it
        self._before: list[Key | None] = []  # each stage from 1 on, the last call with weights
        self._last: Key | None = None
        self._noted: dict[str, set[int]] = {}  # in the present batch
        self._updated: dict[str, set[int]] = {}
        self._written: dict[str, set[str]] = {}
        self._warned = set[str]()
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
        if before is None:
            return True
        is_within = start.module == self._root or f"{before.module}.".startswith(f"{start.module}.")
        begins_there = not start.number and not is_within
        return begins_there or counts[before.module] > before.number

    def possible(self, operands: Iterable[str], *, trains: bool) -> set[int] | None:
        """Returns the meshes that have the weights and statistics of a call up to date.

        Args:
            operands: names of the parameters and buffers that it computes with.
            trains: whether in a training step, which also needs the optimizer's state.

        Returns:
            The meshes; `None` if all may compute it.
        """
        if self.is_gathered and not trains:
            return None
        found: set[int] | None = None
        names = {each for name in operands for each in (name, *self._made_of.get(name, ()))}
        for name in names:
            known = self._of_name if name in self._trained else self._statistics
            if name in known:  # others have not changed on any mesh
                found = known[name] if found is None else found & known[name]
        return found

    def note_pass(self, operands: Iterable[str], statistics: Iterable[str], mesh: int) -> None:
        """Records a call of a pass; `end_batch` counts it, as passes have no common order.

        Args:
            operands: names of the parameters and buffers that it trains.
            statistics: those of the buffers that it updates.
            mesh: computes it.
        """
        for names, noted in ((operands, self._noted), (statistics, self._updated)):
            for name in names:
                noted.setdefault(name, set()).add(mesh)

    def note_written(self, written: Mapping[str, Iterable[str]]) -> None:
        """Records what a pass has computed with parameters and buffers in place.

        Args:
            written: by name of a parameter or buffer, the names of what it was computed with.
        """
        for name, sources in written.items():
            others = {each for s in sources for each in (s, *self._made_of.get(s, ()))} - {name}
            if others:
                self._written.setdefault(name, set()).update(others)

    def end_batch(self, *, completed: bool) -> None:
        """Counts the calls of a batch.

        Args:
            completed: whether all ranks have made all passes; if not, they know different calls.

        Raises:
            NotSupported: several meshes have updated the same running statistics.
        """
        updated = self._updated if completed else {}
        if completed:
            for name, sources in self._written.items():
                self._made_of.setdefault(name, set()).update(sources)
            for name, meshes in self._noted.items():
                if name not in self._trained:
                    self._of_name.setdefault(name, set()).update(meshes)
            for name, meshes in self._updated.items():
                self._statistics.setdefault(name, set()).update(meshes)
        self.is_gathered &= completed and not (self._noted or self._updated)
        self._noted.clear()
        self._written.clear()
        self._updated = {}
        for name in updated:
            if len(meshes := self._statistics[name]) > 1:
                raise NotSupported(
                    f"{name}: micro-batches of a batch have updated it on the meshes "
                    f"{sorted(meshes)}, as they make other calls before it: begin a stage with "
                    "that layer or after it"
                )

    def note_gradient(self, name: str) -> None:
        """Records that a parameter has had a gradient, so that its users alone have its value."""
        self._trained.add(name)

    def meshes_of(self, name: str) -> set[int]:
        """Returns the meshes that use a parameter or buffer.

        One that no call has used belongs to the module that is nearest to it.

        Args:
            name: in the network.
        """
        made_of = self.possible(self._made_of.get(name, ()), trains=True)
        if made_of:
            return made_of
        if made_of is not None and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name} is computed from {', '.join(sorted(self._made_of[name]))}, which are "
                "trained on different stages: its value is wrong on all ranks",
                stacklevel=2,
            )
        found = self._statistics.get(name) or self._of_name.get(name, set())
        while not found and name:
            name = name.rpartition(".")[0]
            found = self._of_module.get(name or self._root, set())
        return found
