"""Tests of losses that are read a step late: the same log, checkpoints and errors."""

from __future__ import annotations

import math

import pytest
import torch

from pydist import run_local
from pydist.comm import LocalTransport
from pydist.errors import PydistError
from pydist.train import checkpoint, log
from pydist.train.readback import LateLosses
from support.training.runs import alone, change, job


@pytest.fixture
def late(monkeypatch):
    """Reads losses late on the CPU, too."""
    before = LateLosses.__init__

    def made(self, device, world, late=True):
        before(self, device, world, late)
        self.behind = int(late)

    return lambda: monkeypatch.setattr(LateLosses, "__init__", made)


def test_a_loss_is_read_after_the_next_step():
    losses = LateLosses(torch.device("cpu"), LocalTransport())
    assert losses.behind == 0
    value = torch.tensor(1.0)
    for step in range(3):
        losses.add(value, step)
        value += 1  # as a graph overwrites its output
    assert list(losses.read(1)) == [(1.0, 0), (2.0, 1)]
    assert list(losses.read(1)) == []
    assert list(losses.read()) == [(3.0, 2)]


def test_log_and_checkpoints_are_the_same(config, tmp_path, late):
    early = change(config, checkpoint={"every": 3})
    run_local(job, 2, early, 2)
    late()
    other = change(early, output={"folder": tmp_path / "late"})
    run_local(job, 2, other, 2)
    one, two = (list(log.read(c.output.folder / "log.jsonl")) for c in (early, other))
    kinds = [[(e["event"], e.get("step")) for e in events] for events in (one, two)]
    assert kinds[0] == kinds[1]
    for a, b in zip(one, two, strict=True):
        if a["event"] == "step":
            assert (a["loss"], a["lr"], a["epoch"]) == (b["loss"], b["lr"], b["epoch"])
            assert b["seconds"] > 0
    saved = [checkpoint.complete(c.output.folder / "ckpt")[-1] for c in (early, other)]
    assert saved[0].name == saved[1].name
    assert (saved[0] / "model.safetensors").read_bytes() == (
        saved[1] / "model.safetensors"
    ).read_bytes()


def test_a_loss_that_is_not_finite_is_found_before_it_is_saved(config, monkeypatch, late):
    late()
    read, found = LateLosses.read, []

    def spoiled(self, most=0):
        for value, taken in read(self, most):
            found.append(taken.step)
            yield (math.nan if taken.step == 3 else value), taken

    monkeypatch.setattr(LateLosses, "read", spoiled)
    with pytest.raises(PydistError, match=r"the loss is nan at step 3 \(epoch 2\)"):
        alone(change(config, checkpoint={"every": 3}))
    assert found == [1, 2, 3]
    assert [path.name for path in checkpoint.complete(config.output.folder / "ckpt")] == []
