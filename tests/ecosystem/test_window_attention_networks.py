"""Networks of MONAI with attention that take long: window attention, many layers."""

from __future__ import annotations

import pytest

pytest.importorskip("monai.networks.nets")

from support.equivalence import whole_answer
from support.networks.libraries import check_splits, task_of


@pytest.mark.parametrize("name", ["SPADEDiffusionModelUNet", "SwinUNETR"])
def test_split_equals_whole(name):
    task = task_of(name, 1)
    check_splits(task, whole_answer(task))
