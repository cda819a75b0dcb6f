"""Fixture of bucket sizes: tests of the partitioned optimizer run with both kinds of buckets."""

from __future__ import annotations

import pytest

import pydist.gradients.buckets


@pytest.fixture(params=["alone", "together"])
def sizes(request, monkeypatch):
    """Sets the size from which a parameter is sent alone: every parameter, or the larger ones."""
    limit = 1 if request.param == "alone" else 2000
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", limit)
