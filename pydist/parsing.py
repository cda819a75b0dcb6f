"""Parsing of untrusted text, JSON and sizes; every error is a `ValueError`."""

from __future__ import annotations

import json
import re
from fractions import Fraction
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


_UNITS = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([A-Za-z]+)")


def byte_count(text: str) -> int:
    """Returns the bytes of a size such as "4GB", "512 MiB" or "1.5TB".

    Raises:
        ValueError: the text is not a size, or less than one byte or more than 2^63 - 1.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f'a size is expected, such as "4GB", in {", ".join(_UNITS)}')
    nbytes = int(Fraction(found[1]) * _UNITS[found[2]])
    if not 1 <= nbytes < 1 << 63:
        raise ValueError("a size is at least one byte, and less than 2^63")
    return nbytes
