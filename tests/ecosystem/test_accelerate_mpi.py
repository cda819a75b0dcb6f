"""Accelerate, configured with each rank as a single process: pydist partitions the work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from pydist import Mesh, parallelize
from support.networks.vision import declare_missing_operators
from support.training.frameworks import (
    BATCH,
    CLIP,
    EPOCHS,
    SAMPLES,
    assert_as_plainly,
    network,
    optimizer_of,
    train_plainly,
)

declare_missing_operators()
accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.ranks(2), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def alone():
    """Returns an accelerator for a single process, which accumulates two batches."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import clear_environment

    with clear_environment():
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 1
    yield accelerator
    AcceleratorState._reset_state(reset_partial_state=True)


def test_prepared_model_loader_optimizer_and_schedule(world, alone):
    mesh = Mesh(world, 1, (2, 1, 1))
    model = parallelize(network(), mesh)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    batches = DataLoader(SAMPLES, BATCH)
    model, optimizer, batches, schedule = alone.prepare(model, optimizer, batches, schedule)
    losses = []
    for _ in range(EPOCHS):
        for x, labels in batches:
            with alone.accumulate(model):
                loss = F.cross_entropy(model(x), labels)
                alone.backward(loss)
                if alone.sync_gradients:
                    alone.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    assert_as_plainly((losses, list(model.parameters())), train_plainly(accumulate=2))
    state = alone.get_state_dict(model)
    assert state.keys() == network().state_dict().keys()
