"""Tests of sessions: each plan and service is made once, and services are found by type."""

from __future__ import annotations

import pytest

from pydist.session import Session


def test_a_plan_is_made_once_even_if_it_is_nothing() -> None:
    session, made = Session(), []
    for _ in range(2):
        assert session.plan("empty", lambda: made.append(1)) is None
    assert made == [1]


def test_a_plan_that_raised_is_made_again() -> None:
    session = Session()
    with pytest.raises(ZeroDivisionError):
        session.plan("key", lambda: 1 / 0)
    assert session.plan("key", lambda: 2) == 2


def test_services_are_found_by_their_type() -> None:
    session = Session()
    assert session.find(dict) is None
    first = session.service(dict, dict)
    assert session.service(dict, dict) is session.find(dict) is first
    assert session.find(list) is None
