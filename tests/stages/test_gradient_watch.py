"""Tests of what is refused and warned of where steps depend on gradients that a rank lacks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pydist.errors import NotSupported
from pydist.optim import LAMB, sharded
from pydist.stages import gradient_watch, pipeline
from support.staged import ONE, TWO_GROUPS, on_stages
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


class Signs(torch.optim.Optimizer):
    """Steps by signs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.sub_(0.01 * p.grad.sign())


class Momentum(torch.optim.SGD):
    """An optimizer of torch by another name."""


@pytest.mark.parametrize(
    ("optimizer_of", "partitioned", "warnings"),
    [
        (Signs, False, 2),
        (Momentum, False, 0),
        (torch.optim.AdamW, False, 0),
        (torch.optim.AdamW, True, 0),
        (LAMB, False, 0),
        (LAMB, True, 0),
    ],
)
def test_a_class_that_may_combine_gradients_is_warned_of(
    optimizer_of, partitioned, warnings, monkeypatch
):
    said = []
    monkeypatch.setattr(
        gradient_watch, "warnings", SimpleNamespace(warn=lambda text, **_: said.append(text))
    )

    def rank(stages):
        model = layers()
        made = pipeline(model, stages, X[:1], balance="memory")
        other = Signs([torch.nn.Parameter(torch.ones(2))])
        own: Any = optimizer_of(model.parameters())
        own = sharded(own, model, "always") if partitioned else own
        for _ in range(2):
            made.step(X, TARGET, F.mse_loss)
            other.step()  # of no parameter of the network
            own.step()

    on_stages([ONE, ONE], rank)
    assert ["as Prodigy and SAM do" in each for each in said] == [True] * warnings  # once a rank


def test_a_closure_that_runs_a_step_in_uneven_groups():
    """Its loss is that of the whole batch, whose micro-batches the groups share differently."""
    net = layers()
    expected = float(F.mse_loss(net(X), TARGET).detach())

    class Closed(Signs):
        elementwise = True

        def step(self, closure: Any) -> Any:  # type: ignore[override]
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    def rank(stages):
        rows = slice(*[0, 5, 8][stages.mesh.data_index :][:2])
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], balance="memory", micro_batches=2)
        optimizer = Closed(own.parameters())
        loss = optimizer.step(lambda: made.step(X[rows], TARGET[rows], F.mse_loss))
        assert float(loss) == pytest.approx(expected, rel=1e-12)

    on_stages([TWO_GROUPS, TWO_GROUPS], rank)


def test_lbfgs_is_refused_each_time():
    def rank(stages):
        model = layers()
        made = pipeline(model, stages, X[:1], balance="memory")
        optimizer = torch.optim.LBFGS(model.parameters())
        for _ in range(2):
            with pytest.raises(NotSupported, match="LBFGS of a network in stages"):
                optimizer.step(lambda: made.step(X, TARGET, F.mse_loss))

    on_stages([ONE, ONE], rank)
