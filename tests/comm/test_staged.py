"""What GPU tests put in the place of NCCL, where it takes no two ranks of a GPU."""

from __future__ import annotations

import pytest

from pydist.comm import run_local
from support.stand_ins.one_gpu import Staged
from support.transports.contract import CHECKS, Check, buffers_outlive_work_that_nobody_waits_for

# Collectives of this one are over when they have started.
_KEPT = [check for check in CHECKS if check is not buffers_outlive_work_that_nobody_waits_for]


@pytest.mark.parametrize("check", _KEPT, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    run_local(lambda host: check(Staged(host, None)), 2)
