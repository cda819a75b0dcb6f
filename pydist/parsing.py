"""Parsing of JSON from untrusted files; every error is a `ValueError`."""

from __future__ import annotations

import json
from typing import Any

DEPTH = 64
"""Largest nesting depth of lists and tables. Python's own limit is higher, and depends on the
caller: beyond it reading, comparing and printing raise `RecursionError`."""


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or nested deeper than `DEPTH`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    require_shallow(value)
    return value


def require_shallow(value: object) -> None:
    """Raises `ValueError` if lists and dicts are nested deeper than `DEPTH`."""
    level = [value]
    for _ in range(DEPTH + 1):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += [found for found in each.values() if isinstance(found, dict | list)]
            elif isinstance(each, list):
                inner += [found for found in each if isinstance(found, dict | list)]
        if not inner:
            return
        level = inner
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"nested too deeply; {DEPTH} levels are possible"
