"""Tests of the transport that copies tensors of devices through the memory of the hosts."""

from __future__ import annotations

import pytest

from pydist.comm import run_local
from pydist.comm.transports.staged import StagedTransport
from support.transports.checks import Check
from support.transports.collectives import buffers_outlive_work_that_nobody_waits_for
from support.transports.contract import CHECKS

# Collectives of this transport complete when they start.
_KEPT = [check for check in CHECKS if check is not buffers_outlive_work_that_nobody_waits_for]


@pytest.mark.parametrize("check", _KEPT, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    run_local(lambda host: check(StagedTransport(host, None)), 2)
