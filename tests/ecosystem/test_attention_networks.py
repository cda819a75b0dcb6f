"""Networks of MONAI whose tokens attend to each other, unmodified, on split volumes."""

from __future__ import annotations

import pytest

pytest.importorskip("monai.networks.nets")

from support.attention import forced
from support.equivalence import whole_answer
from support.networks.attention import CASES
from support.networks.libraries import check_splits, task_of

LONG = {"SPADEDiffusionModelUNet", "SwinUNETR"}
"""Networks that `test_window_attention_networks` runs."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in LONG])
def test_split_equals_whole(name):
    task = task_of(name, 1)
    check_splits(task, whole_answer(task))


def test_in_a_ring():
    task = task_of("DiffusionModelUNet, fused", 1)
    with forced("ring"):
        check_splits(task, whole_answer(task))
