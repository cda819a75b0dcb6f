"""Tests of the warning for gradients that one rank of several stages has changed by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pydist.optim import sharded
from pydist.stages import gradient_watch, pipeline
from support.staged import ONE, on_stages
from support.staged_layers import TARGET, X, layers


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize(
    ("change", "warns"),
    [
        (lambda pipe: torch.nn.utils.clip_grad_norm_(pipe.model.parameters(), 0.5), True),
        (lambda pipe: pipe.clip_grad_norm_(0.5), False),
        (lambda pipe: None, False),
    ],
    ids=["one stage", "all stages", "none"],
)
def test_a_norm_of_one_stage_is_warned_of(change, warns, partitioned, monkeypatch):
    said = []  # by all ranks: threads share the filters of warnings
    monkeypatch.setattr(
        gradient_watch, "warnings", SimpleNamespace(warn=lambda text, **_: said.append(text))
    )

    def rank(stages):
        model = layers()
        made = pipeline(model, stages, X[:1], balance="memory")
        own: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        own = sharded(own, model, "always") if partitioned else own
        for _ in range(2):
            own.zero_grad()
            made.step(X, TARGET, F.mse_loss)
            change(made)
            own.step()

    on_stages([ONE, ONE], rank)
    assert ["pipe.clip_grad_norm_" in each for each in said] == [True, True] * warns  # once each
    said.clear()
    on_stages([ONE], rank)  # one mesh has all gradients
    assert not said
