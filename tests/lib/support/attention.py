"""Makes attention over split keys use a given form of exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from pydist.ops.attention import scaled
from pydist.ops.attention.forms import AttentionForm, Sizes


@contextmanager
def forced(form: AttentionForm) -> Iterator[None]:
    """Makes attention over split keys use a form; "sum" where queries are whole and no ring is."""

    def chosen(sizes: Sizes) -> AttentionForm:
        return form if form != "ring" or sizes.is_split else "sum"

    with patch.object(scaled, "attention_form", chosen):
        yield
