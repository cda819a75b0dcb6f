"""Tests of random networks in stages."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pydist.errors import NotSupported, UsageError
from support.random_networks.cases import Case, cases
from support.staged import DEEP, ONE, Meshes, check_stages

MESHES: list[tuple[Meshes, list[int] | None]] = [
    ([ONE] * 2, None), ([ONE] * 3, None), ([ONE] * 4, None), ([DEEP, ONE], None),
    ([ONE, DEEP], None), ([ONE] * 2, [0, 1, 0, 1]), ([ONE] * 2, [0, 1, 1, 0]),
    ([DEEP, ONE], [0, 1, 0]), ([ONE] * 3, [2, 0, 1, 0]),
]  # fmt: skip
"""The meshes, and the mesh of each stage."""


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cases(),
    st.sampled_from(MESHES),
    st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    st.booleans(),
)
def test_a_random_network_equals_one_device(
    case: Case, placed: tuple[Meshes, list[int] | None], schedule: str, recompute: bool
) -> None:
    meshes, order = placed
    assume(len(case.shape) == 5 and any(True for _ in case.model.parameters()))
    assume(case.is_sound())
    try:
        check_stages(case.task(), meshes, order=order, schedule=schedule, recompute=recompute)
    except NotSupported:
        assume(False)  # without an exact form, as on shards; or memory that stages would share
    except UsageError as error:
        assume("forward pass can be cut at" not in str(error))
        raise
