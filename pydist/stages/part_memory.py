"""Memory of parts of a recorded pass: what their backward passes need, call by call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pydist.stages.record import RecordedPass, Wait


class PartMemory:
    """Bytes that parts of a pass need in memory at once.

    When the backward pass of a call runs, there are the tensors that it and the calls before it
    have saved, the gradients of its results and arguments, and gradients that wait: of tensors that
    later calls use, or later stages, until the call that made them; of received tensors until all
    of the part's calls have run.

    Args:
        found: the pass.
    """

    def __init__(self, found: RecordedPass) -> None:
        self._found = found
        self._known: dict[tuple[int, ...], list[tuple[np.ndarray, np.ndarray]]] = {}

    def columns(self, starts: Sequence[int]) -> Sequence[tuple[np.ndarray, np.ndarray]]:
        """Returns what the parts need that end where the next one begins, for each of the starts.

        Args:
            starts: the calls with which parts may begin; the last part ends with the pass.

        Returns:
            For each end, by the first call of the part: bytes of saved tensors, and the most bytes
            in memory at once while the backward pass of one micro-batch runs.
        """
        key = tuple(starts)
        if key not in self._known:
            self._known[key] = list(self._columns(np.asarray(starts)))
        return self._known[key]

    def _columns(self, first: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        found, calls = self._found, len(self._found.costs)
        uses: list[list[tuple[int, Wait]]] = [[] for _ in range(calls)]  # with the use before
        made: list[list[Wait]] = [[] for _ in range(calls)]
        for wait in found.waits:
            made[wait.made].append(wait)
            for before, use in zip((wait.made, *wait.uses), wait.uses, strict=False):
                uses[use].append((before, wait))
        # By first call: saved tensors, waiting gradients of own tensors, and the most at once.
        saved, waiting, most = np.zeros(calls), np.zeros(calls), np.zeros(calls)
        at = np.full((calls, calls), -np.inf, dtype=np.float32)  # by first call and running call
        last: dict[int, int] = {}  # the latest call that has saved each memory
        stops = set(first[1:].tolist())
        for call in range(calls):
            if call in stops:
                begun = first[first < call]
                yield saved[begun], most[begun]
            for before, wait in uses[call]:
                if wait.uses[-1] == call:
                    waiting[: wait.made + 1] -= wait.nbytes
                # On parts that receive the tensor, its gradient waits until they have run.
                rows = slice(wait.made + 1, call)
                if wait.made + 1 < call:
                    at[rows, before:call] += wait.nbytes
                    np.maximum(most[rows], at[rows, before:call].max(axis=1), out=most[rows])
            for memory, nbytes in found.saved[call].items():
                saved[last.get(memory, -1) + 1 : call + 1] += nbytes
                last[memory] = call
            rows = slice(0, call + 1)
            at[rows, call] = saved[rows] + waiting[rows] + found.costs[call].gradients
            np.maximum(most[rows], at[rows, call], out=most[rows])
            for wait in made[call]:
                waiting[: call + 1] += wait.nbytes
        yield saved[first], most[first]
