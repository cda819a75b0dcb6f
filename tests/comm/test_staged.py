"""Test of the transport that replaces NCCL in GPU tests, since NCCL refuses two ranks per GPU."""

from __future__ import annotations

import pytest

from pydist.comm import run_local
from support.stand_ins.one_gpu import Staged
from support.transports.contract import CHECKS, Check, buffers_outlive_work_that_nobody_waits_for

# Collectives of this transport complete when they start.
_KEPT = [check for check in CHECKS if check is not buffers_outlive_work_that_nobody_waits_for]


@pytest.mark.parametrize("check", _KEPT, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    run_local(lambda host: check(Staged(host, None)), 2)
