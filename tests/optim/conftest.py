"""Each test of a shared step runs with both kinds of buckets."""

from __future__ import annotations

import pytest

import pydist.gradients.buckets


@pytest.fixture(params=["alone", "together"])
def sizes(request, monkeypatch):
    """The small networks' parameters travel alone, or the larger ones do."""
    limit = 1 if request.param == "alone" else 2000
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", limit)
