"""Holds the state of a running job on one mesh: plans, counters and services."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from pydist.timers import Timers
from pydist.watchdog import at_step

_T = TypeVar("_T")


class Session:
    """Session that holds the state of a running job on one mesh.

    A service, such as the gradient reducer, is an object that a session creates once. Services are
    found by their types, as this module must not import theirs.
    """

    def __init__(self) -> None:
        self.timers = Timers()
        self.plans: dict[Hashable, Any] = {}
        """All plans, by key; see `plan`."""
        self.at_backward: list[Callable[[], None]] = []
        """Functions that the backward of each exchange calls, as a backward pass is running."""
        self.at_form: Callable[[str], None] | None = None
        """Function that is called with the form in which a call exchanges, if it has several."""
        self.part = 0
        """Samples in the earlier passes of the running step; 0 in the first one."""
        self.accumulates: object | None = None
        """Model whose next training pass is a further one of the running step."""
        self._services: dict[type, Any] = {}
        self._forwards = 0

    @property
    def forwards(self) -> int:
        """Number of steps that training passes have begun: part of the key of every random number.

        A pass that accumulates gradients with the one before (`no_sync`) belongs to its step.
        """
        return self._forwards

    @forwards.setter
    def forwards(self, count: int) -> None:
        self._forwards, self.part, self.accumulates = count, 0, None
        at_step(count)  # for reports of hangs

    def plan(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Returns the plan with a key, and creates it on first use.

        Args:
            key: the plan's purpose, and everything that it depends on.
            make: creates the plan; may be collective, as ranks create plans in the same order.
        """
        try:
            found: _T = self.plans[key]
        except KeyError:
            found = self.plans[key] = make()
        return found

    def service(self, kind: type[_T], make: Callable[[], _T]) -> _T:
        """Returns the service of a type, and creates it on first use."""
        found: _T | None = self._services.get(kind)
        if found is None:
            found = self._services[kind] = make()
        return found

    def find(self, kind: type[_T]) -> _T | None:
        """Returns the service of a type; `None` if it was not created."""
        return self._services.get(kind)
