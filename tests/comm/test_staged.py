"""What GPU tests put in the place of NCCL, where it takes no two ranks of a GPU."""

from __future__ import annotations

import pytest
from one_gpu import Staged
from transport_contract import CHECKS, Check

from pydist.comm import run_local


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    run_local(lambda host: check(Staged(host, None)), 2)
