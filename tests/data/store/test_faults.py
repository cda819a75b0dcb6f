"""Tests that a rank which fails while another one waits for its blocks ends all of them."""

from __future__ import annotations

import time

import pytest

from pydist.launch.backends import available
from support.jobs.children import run_python
from support.jobs.programs import path_of

SECONDS = 30.0
"""Limit of a job with its start; without the fault it takes longer."""


@pytest.mark.parametrize(
    ("mpi", "fault", "says"),
    [
        *((each.name, "raise", "the fault") for each in available()),
        ("gloo", "gone", "is gone"),
        (available()[0].name, "kill", "rank"),
    ],
)
def test_a_failed_rank_ends_all(mpi: str, fault: str, says: str) -> None:
    script = path_of("storing")
    began = time.monotonic()
    command = "-m", "pydist.launch", "2", mpi, script, fault
    ended = run_python(*command, folder=script.parent, seconds=2 * SECONDS)
    assert ended.returncode != 0
    assert time.monotonic() - began < SECONDS
    assert says in ended.stderr, ended.stderr
    if fault == "gone":
        assert ended.returncode == 65
        assert ended.stderr.count("is gone") == 1
