"""What measurement has chosen: agreed over a group of ranks, and remembered in a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydist import owner
from pydist.errors import UsageError
from pydist.watchdog import phase

if TYPE_CHECKING:
    from pydist.comm import Transport

UNKNOWN, NEVER = b"unknown", b"never"
"""What else than choices the file may say: that there are none, or that none are wanted."""
_TO_MEASURE = b"to measure"


def is_wanted() -> bool:
    """Whether choices are measured, as `PYDIST_TUNE` says: 1, the default, or 0.

    Raises:
        UsageError: the variable holds something else.
    """
    text = os.environ.get("PYDIST_TUNE") or "1"
    if text not in ("0", "1"):
        raise UsageError(f"PYDIST_TUNE={text}: possible are 0 (off) and 1")
    return text == "1"


class Store:
    """The file that remembers one choice.

    `PYDIST_CACHE` names the folder, by default `pydist` in the user's cache folder. With
    `PYDIST_TUNE=0` nothing is measured, read or written.

    Args:
        kind: begins the file's name.
        facts: all that the choice depends on, as JSON has it.
        is_usable: whether what was read is a choice that can still be made.
    """

    def __init__(
        self, kind: str, facts: dict[str, Any], is_usable: Callable[[bytes], bool]
    ) -> None:
        self._is_usable = is_usable
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get("PYDIST_CACHE") or base / "pydist")
        self._path = folder / f"{kind}-{name}.json"

    def read(self) -> bytes:
        """The choice as JSON, or that it is unknown, or that it is not to be measured."""
        if not is_wanted():
            return NEVER
        try:
            content = self._path.read_bytes()
            if self._is_usable(content):
                return content
        except OSError:
            pass
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return UNKNOWN if os.access(self._path.parent, os.W_OK) else NEVER
        except OSError:
            return NEVER

    def write(self, content: bytes) -> bytes:
        """Keeps the choice unless another job was first; returns what is kept."""
        owner.remove_temporaries(self._path.parent)
        fresh = owner.temporary(self._path)
        try:
            fresh.write_bytes(content)
            try:
                os.link(fresh, self._path)
            except FileExistsError:
                kept = self._path.read_bytes()
                if self._is_usable(kept):
                    content = kept
                else:
                    fresh.replace(self._path)
            except OSError:  # no hard links here: of concurrent jobs the last one stays
                fresh.replace(self._path)
            finally:
                fresh.unlink(missing_ok=True)
        except OSError:
            pass  # the choice holds for this run
        return content


def agree(
    store: Store,
    group: Transport,
    measure: Callable[[], Any],
    pick: Callable[[Sequence[Any]], Any],
    worth_it: bool,
) -> bytes:
    """What the group's first rank remembers, or what all measure now. Collective over `group`.

    Args:
        store: the first rank's counts.
        group: the ranks that choose together.
        measure: this rank's figures, as JSON has them.
        pick: the choice, from the figures of all ranks; the same on every one.
        worth_it: whether to measure what is not remembered; the first rank's counts.

    Returns:
        The choice as JSON; `UNKNOWN` if it is yet to be measured, `NEVER` if it will not be.
    """
    state = store.read() if group.rank == 0 else b""
    if state == UNKNOWN and worth_it:
        state = _TO_MEASURE
    state = group.broadcast_bytes(state)
    if state != _TO_MEASURE:
        return state
    with phase("autotuning"):
        everyone = group.all_gather_bytes(json.dumps(measure()).encode())
    choice = pick([json.loads(each) for each in everyone])
    written = store.write(json.dumps(choice).encode()) if group.rank == 0 else b""
    return group.broadcast_bytes(written)
