"""Training steps as a CUDA graph, against the same steps without a graph."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LinearLR
from torch.torch_version import TorchVersion

from pydist import parallelize
from pydist.comm import LocalTransport
from pydist.data import Loader
from pydist.mesh import Mesh
from pydist.optim.fused import start_momentum
from pydist.train.cuda_graph import RECOVERS, WARMUP, GraphedStep
from pydist.train.device import own_stream
from pydist.train.network import MeshNetwork
from pydist.train.step import TrainStep

DEVICE = torch.device("cuda", 0)
STEPS = WARMUP + 6


class Noise:
    """Dataset of noise samples, whose mean is the target."""

    sample_shape = (2, 16, 16, 16)
    num_targets = 3
    labeled = False
    dtype = torch.float32
    identity = "noise"

    def __len__(self):
        return 4 * STEPS - 2  # the last batch is short

    def shape_of(self, index):
        return self.sample_shape

    def read_block(self, index, box=None, out=None):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.sample_shape, generator=generator) + index / 100

    def target(self, index):
        return torch.full((3,), index / 100)


class Task:
    def criterion(self, batches):
        return F.mse_loss


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.LeakyReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 8, 3, padding=1),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def sgd(parameters):
    optimizer = SGD(parameters, 1e-2, momentum=0.9, fused=True)
    start_momentum(optimizer)
    return optimizer


OPTIMIZERS = {"adam": lambda p: Adam(p, 1e-3, fused=True), "sgd": sgd}


def train(wanted, make, amp, clip, meddle=None):
    """Returns the loss by step, the trained weights, the log lines, and whether a graph existed.

    `meddle(model)` is called two steps after the capture.
    """
    mesh, said = Mesh(LocalTransport(), seed=3), []
    loader = Loader(Noise(), mesh, 4, device=DEVICE)
    with loader, own_stream(DEVICE):
        model = parallelize(copy.deepcopy(network()).to(DEVICE), mesh)
        optimizer = make(model.parameters())
        scaler = GradScaler("cuda", enabled=amp == "fp16", init_scale=2.0**22)
        schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        state = SimpleNamespace(
            mesh=mesh,
            model=model,
            network=MeshNetwork(model, mesh),
            optimizer=optimizer,
            scaler=scaler,
            loader=loader,
        )
        config = SimpleNamespace(amp=amp, clip_norm=clip)
        step = GraphedStep(TrainStep(state, Task(), config), wanted, said.append)
        losses = []
        for number, batch in enumerate(loader):
            if number == WARMUP + 2 and meddle is not None:
                meddle(model)
            losses.append(float(step(batch)))
            schedule.step()
        torch.cuda.synchronize()
        captured = step.captured
        step.close()
        assert not step.captured
    return losses, model.state_dict(), said, captured


@pytest.fixture(autouse=True)
def same_algorithms(monkeypatch):
    """Selects cuDNN's deterministic algorithms: the two runs differ in nothing else."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_graph_takes_the_steps_that_were_taken_without(optimizer, amp, clip):
    """The run has dropout, batch norm, falling rates, an overflowing scale and a short batch."""
    make = OPTIMIZERS[optimizer]
    expected, weights, _, captured = train("never", make, amp, clip)
    assert not captured
    found, trained, said, captured = train("always", make, amp, clip)
    assert captured, said
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < RECOVERS, reason=f"torch before {RECOVERS} tries nothing"
)
def test_what_can_not_be_captured_is_said_and_training_goes_on():
    class Asks(Adam):
        def step(self, closure=None):
            float(self.param_groups[0]["params"][0].detach().sum())  # waits for the device
            return super().step(closure)

    def make(parameters):
        return Asks(parameters, 1e-3, fused=True)

    expected, *_ = train("never", make, "off", None)
    found, _, said, captured = train("auto", make, "off", None)
    assert not captured
    assert len(said) == 1
    assert said[0].startswith("no CUDA graph: the step can't be captured: ")
    assert "not permitted when stream is capturing" in said[0], "what the step met"
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_parameters_that_have_moved_are_not_those_of_the_graph():
    """The test halves every weight by replacing its memory."""

    def halve(model):
        for parameter in model.parameters():
            parameter.data = parameter.data / 2

    make = OPTIMIZERS["adam"]
    expected, *_ = train("never", make, "off", None, halve)
    found, *_ = train("always", make, "off", None, halve)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
