"""Attention in a given form of exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from pydist.ops.attention import scaled
from pydist.ops.attention.forms import Form, Sizes


@contextmanager
def forced(form: Form) -> Iterator[None]:
    """Makes attention over split keys use a form; "sum" where queries are whole and no ring is."""

    def chosen(sizes: Sizes) -> Form:
        return form if form != "ring" or sizes.is_split else "sum"

    with patch.object(scaled, "attention_form", chosen):
        yield
