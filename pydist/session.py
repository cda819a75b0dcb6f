"""The state of a running job on one mesh: plans, counters, and services, apart from the mesh."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from pydist.timers import Timers
from pydist.watchdog import at_step

_T = TypeVar("_T")


class Session:
    """What a job keeps while it runs.

    A service, such as the gradient reducer, is an object that a session makes once. The modules
    of services are above this one, which knows none of them, so a service is found by its type.
    """

    def __init__(self) -> None:
        self.timers = Timers()
        self.plans: dict[Hashable, Any] = {}
        """Every plan, by what it does; see `plan`."""
        self.at_backward: list[Callable[[], None]] = []
        """Called by the backward of each exchange: a backward pass is running."""
        self._services: dict[type, Any] = {}
        self._forwards = 0

    @property
    def forwards(self) -> int:
        """Training forwards so far: part of the key of every random number."""
        return self._forwards

    @forwards.setter
    def forwards(self, count: int) -> None:
        self._forwards = count
        at_step(count)  # a report of a hang names it

    def plan(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The plan with a key, made at the first call.

        Args:
            key: what the plan does, and all that it depends on.
            make: makes it; may be collective, as ranks make their plans in one order.
        """
        try:
            found: _T = self.plans[key]
        except KeyError:
            found = self.plans[key] = make()
        return found

    def service(self, kind: type[_T], make: Callable[[], _T]) -> _T:
        """The service of a type, made at the first call."""
        found: _T | None = self._services.get(kind)
        if found is None:
            found = self._services[kind] = make()
        return found

    def find(self, kind: type[_T]) -> _T | None:
        """The service of a type; `None` if nobody has asked for it."""
        return self._services.get(kind)
