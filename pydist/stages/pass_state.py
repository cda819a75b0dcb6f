"""The state with which the passes over a micro-batch begin: the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from pydist.entry_hook import entry_hook_of
from pydist.stages.micro_batch import MicroBatch
from pydist.stages.parameters import module_of
from pydist.stages.program_state import ProgramState
from pydist.stages.ranks import Stages, device_of
from pydist.stages.record import copied_buffers


class PassState:
    """State that modules and generators have in the passes over a batch.

    Args:
        model: the network.
        stages: the stages.
        lends: whether this rank runs several passes over a micro-batch.
        collects: whether norms count the micro-batches of a batch once.
    """

    def __init__(self, model: nn.Module, stages: Stages, *, lends: bool, collects: bool) -> None:
        self._model, self._stages = model, stages
        self._lends, self._collects = lends, collects
        self._first: dict[int, _Start] = {}  # by the index of the micro-batch
        self._counters: dict[int, Tensor] = {}  # of norms, before the batch
        self.forwards = -1
        """Number of steps that training passes had begun before the batch."""
        self.batches = 0
        """Number of batches since a training pass has begun a step, with this one."""

    def begin_batch(self) -> None:
        """Forgets the passes over the batch before."""
        self._first.clear()
        forwards = self._stages.mesh.session.forwards
        self.batches = self.batches + 1 if forwards == self.forwards else 1
        self.forwards = forwards
        if self._collects:
            found = self._model.named_buffers()
            counters = (b for name, b in found if name.endswith("num_batches_tracked"))
            self._counters = {id(b): b.clone() for b in counters}

    def has_begun(self, micro_batch: int) -> bool:
        """Returns whether a pass over a micro-batch of the batch has begun."""
        return micro_batch in self._first

    @contextmanager
    def begun(
        self,
        running: MicroBatch,
        repeats: MicroBatch | None = None,
        criterion: Callable[..., Any] | None = None,
    ) -> Iterator[None]:
        """Lets all passes over a micro-batch begin with the same state of modules and generators.

        So what the network itself changes in a forward pass, such as a counter, changes once for a
        micro-batch. Running statistics change in the pass of their stage.
        """
        modules = list(self._model.modules())
        owner = None if criterion is None else module_of(criterion)
        modules += [] if owner is None else owner.modules()
        first, device = self._first.get(running.index), device_of(self._stages.mesh)
        entry_hook_of(self._model).continues = bool(self._first)
        try:
            if first is None:
                counters = {i: b.clone() for i, b in self._counters.items()} if self._first else {}
                program = ProgramState(modules, device) if self._lends else None
                if self._lends:
                    found = _buffers_of(modules)
                    running.before = {i: counters.get(i, b).clone() for i, b in found.items()}
                self._first[running.index] = _Start(running.before, running.updaters, program)
                with copied_buffers(modules, counters):
                    yield
                return
            assert first.program is not None
            with ProgramState(modules, device).kept():
                first.program.restore()
                if repeats is not None:
                    values = repeats.before
                else:
                    kept = first.before.items()
                    values = {i: b.clone() for i, b in kept if i not in first.updaters}
                    found = _buffers_of(modules)
                    running.before = {i: values.get(i, b).clone() for i, b in found.items()}
                with copied_buffers(modules, values):
                    yield
        finally:
            entry_hook_of(self._model).continues = None


class _Start(NamedTuple):
    """What the first pass over a micro-batch began with.

    Attributes:
        before: values of the buffers, by their ids.
        updaters: the running statistics among them, as of `MicroBatch`.
        program: state of modules and generators, if there are further passes.
    """

    before: dict[int, Tensor]
    updaters: Mapping[int, int]
    program: ProgramState | None


def _buffers_of(modules: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Returns the buffers of modules, by their ids."""
    return {id(b): b for m in modules for b in m._buffers.values() if b is not None}
