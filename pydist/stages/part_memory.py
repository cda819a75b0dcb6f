"""Memory of parts of a recorded pass: what their backward passes need, call by call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pydist.stages.record import RecordedPass, Wait


class PartMemory:
    """Bytes that a rank needs in memory at once for parts of a pass.

    When the backward pass of a call runs, there are the tensors that it and the calls before it
    have saved, the gradients of its results, arguments and parameters, and gradients that wait: of
    tensors that several of the part's calls use, from the last of these to the first; and of those
    that it made until the call that made them. A gradient of a later stage waits only if no call of
    the part uses the tensor: else it is received when the pass arrives at the call that made it.

    After the forward pass there are the saved tensors, and those that later stages use too: made by
    the part, or received for its calls, as the network still holds them.

    At all times there is what stays from step to step: gradients and the optimizer's state of the
    parameters that the part's calls train.

    Args:
        found: the pass.
        ranks: that compute a sample together: each has a part of the tensors, but all parameters.
        state: bytes that stay for each byte of parameters.
        frees: whether calls free saved tensors as they did in the pass, on one rank.
    """

    def __init__(
        self, found: RecordedPass, ranks: int = 1, *, state: float = 0.0, frees: bool = True
    ) -> None:
        self._found, self._ranks, self._state, self._frees = found, ranks, state, frees
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
        ranks = self._ranks
        # By first call, of all ranks: saved tensors, waiting gradients of own tensors, and the most
        # at once; of each rank: what stays.
        saved, waiting, most = np.zeros(calls), np.zeros(calls), np.zeros(calls)
        stays = np.zeros(calls)
        at = np.full((calls, calls), -np.inf, dtype=np.float32)  # by first call and running call
        last: dict[int, int] = {}  # the latest call that has saved each memory
        trained: dict[str, int] = {}  # the latest call that trains each parameter
        stops = set(first[1:].tolist())
        crossing: dict[int, Wait] = {}  # tensors that calls from the next on use, by memory
        for call in range(calls):
            if call in stops:
                begun = first[first < call]
                sending = saved.copy()
                for memory, wait in crossing.items():
                    held = max([wait.made, *(use for use in wait.uses if use < call)])
                    sending[last.get(memory, -1) + 1 : held + 1] += wait.nbytes
                at_once = np.maximum(most[begun], sending[begun])
                yield saved[begun] / ranks, at_once / ranks + stays[begun]
            for before, wait in uses[call]:
                if before == wait.made:
                    waiting[: wait.made + 1] -= wait.nbytes
                    continue
                rows = slice(0, before + 1)
                at[rows, before:call] += wait.nbytes
                np.maximum(most[rows], at[rows, before:call].max(axis=1), out=most[rows])
            own = np.zeros(calls)  # what this call alone has saved
            for memory, nbytes in found.saved[call].items():
                own[last.get(memory, -1) + 1 : call + 1] += nbytes
                last[memory] = call
            saved += own
            for parameter, nbytes in found.trained[call].items():
                stays[trained.get(parameter, -1) + 1 : call + 1] += self._state * nbytes
                trained[parameter] = call
            rows, cost = slice(0, call + 1), found.costs[call]
            freed = np.minimum(own[rows], cost.freed if self._frees else 0)
            of_parameters = ranks * sum(found.trained[call].values())
            at[rows, call] = saved[rows] + waiting[rows] + cost.gradients + of_parameters - freed
            np.maximum(most[rows], at[rows, call], out=most[rows])
            for wait in made[call]:
                waiting[: call + 1] += wait.nbytes
                crossing[wait.memory] = wait
            crossing = {key: wait for key, wait in crossing.items() if wait.uses[-1] > call}
        yield saved[first] / ranks, most[first] / ranks + stays[first]
