"""Tests of what is refused and warned of where steps depend on gradients that a rank lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pydist.errors import NotSupported
from pydist.optim import LAMB, sharded
from pydist.stages import gradient_watch, pipeline
from pydist.stages.trial_steps import combines_gradients
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


class Signs(torch.optim.Optimizer):
    """Steps by signs, each parameter by its own gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p))

    def direction(self, p: Any) -> Any:
        return p.grad.sign()


class Normalized(Signs):
    """Steps by gradients over the norm of all of them."""

    def direction(self, p: Any) -> Any:
        grads = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        return p.grad / torch.stack([g.norm() for g in grads]).norm()


class Late(Normalized):
    """Does so after two steps."""

    def direction(self, p: Any) -> Any:
        self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return super().direction(p) if self.state[p]["step"] > 2 else p.grad.sign()


class Wrapped(Signs):
    """Can't be made from parameters and defaults."""

    def __init__(self, params: Any, base: type) -> None:
        super().__init__(params)


def step_once(optimizer_of, stages):
    model = layers()
    made = pipeline(model, stages, X[:1], balance="memory")
    optimizer = optimizer_of(model.parameters())
    for _ in range(2):
        made.step(X, TARGET, F.mse_loss)
        optimizer.step()


@pytest.mark.parametrize("kind", [Normalized, Late])
def test_an_optimizer_that_combines_gradients_is_refused(kind):
    def rank(stages):
        with pytest.raises(
            NotSupported, match=f"{kind.__name__} of a network in stages: its steps"
        ):
            step_once(kind, stages)

    on_stages([ONE, ONE], rank)
    on_stages([ONE], lambda stages: step_once(kind, stages))  # one mesh has all gradients


@pytest.mark.parametrize(
    ("optimizer_of", "warnings"),
    [(Signs, 0), (torch.optim.AdamW, 0), (LAMB, 0), (lambda params: Wrapped(params, Signs), 2)],
    ids=["own class", "torch's", "norms", "unknown"],
)
def test_an_optimizer_that_can_not_be_tried_is_warned_of(optimizer_of, warnings, monkeypatch):
    said = []
    monkeypatch.setattr(
        gradient_watch, "warnings", SimpleNamespace(warn=lambda text, **_: said.append(text))
    )
    on_stages([ONE, ONE], lambda stages: step_once(optimizer_of, stages))
    assert ["as SAM does" in each for each in said] == [True] * warnings  # of each rank, once


def test_a_trial_draws_no_numbers():
    class Noisy(Signs):
        def direction(self, p):
            return p.grad + torch.randn_like(p)

    optimizer = Noisy([torch.nn.Parameter(torch.ones(3))])
    before = torch.get_rng_state()
    assert combines_gradients(optimizer) is False
    assert torch.equal(torch.get_rng_state(), before)
