"""Random networks: the split run equals the one-device run, or is refused, which is rare."""

from __future__ import annotations

import collections

import pytest
from hypothesis import HealthCheck, assume, given, settings

from pydist.errors import NotSupported
from support.random_networks.cases import Case, cases, compare

NETWORKS, MOST_REFUSED = 200, 0.1
"""The minimum number of networks, and the largest share that may be refused."""


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("splits_channels", [False, True], ids=["space", "channels"])
def test_any_network_is_the_same_when_it_is_split(splits_channels, record_property):
    ran = undecided = 0
    refused: collections.Counter[str] = collections.Counter()

    # One network alone proves little.
    examples = max(NETWORKS, settings().max_examples)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(case=cases(splits_channels))
    def check(case: Case) -> None:
        nonlocal ran, undecided
        assume(case.is_sound())
        ran += 1
        try:
            undecided += not compare(case)
        except NotSupported as refusal:
            refused[str(refusal).split(" on a sharded tensor")[0]] += 1

    check()
    calls = ", ".join(f"{name} ({n})" for name, n in refused.most_common())
    line = (
        f"{refused.total()} of {ran} random networks refused: {calls or 'none'}; "
        f"{undecided} differ, and noise in the last bit moves them as well"
    )
    record_property("networks", line)
    assert refused.total() <= MOST_REFUSED * ran, line
