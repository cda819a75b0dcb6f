"""Tests of random networks in stages."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pydist.errors import NotSupported, UsageError
from support.random_networks.cases import Case, cases
from support.staged import DEEP, ONE, Meshes, check_stages

MESHES: list[Meshes] = [[ONE] * 2, [ONE] * 3, [ONE] * 4, [DEEP, ONE], [ONE, DEEP]]


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from(MESHES), st.sampled_from(["gpipe", "1f1b"]))
def test_a_random_network_equals_one_device(case: Case, meshes: Meshes, schedule: str) -> None:
    assume(len(case.shape) == 5 and any(True for _ in case.model.parameters()))
    assume(case.is_sound())
    try:
        check_stages(case.task(), meshes, schedule=schedule)
    except NotSupported:
        assume(False)  # without an exact form, as on shards; or memory that stages would share
    except UsageError as error:
        assume("forward pass can be cut at" not in str(error))
        raise
