"""Tests without a GPU of the conditions for capturing a training step in a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD, Adam

from pydist import _native as native
from pydist import distribute_tensor
from pydist.comm import LocalTransport, run_local
from pydist.errors import NotSupported, UsageError
from pydist.mesh import Mesh
from pydist.ops.pointwise.keyed import ReplayedKeys, draws_of
from pydist.train import captured, cuda_graph
from pydist.train.config import TrainConfig
from pydist.train.device import choose_device, cuda_obstacle, memory_format
from support.training.runs import alone, change, events, job


class Shapes:
    """Data set that has only shapes."""

    def __init__(self, *extents):
        self._extents = extents

    def __len__(self):
        return len(self._extents)

    def shape_of(self, index):
        return (1, *(self._extents[index],) * 3)


def world_of(name: str) -> SimpleNamespace:
    """Returns a substitute for a transport: its name, its device, and whether the host waits."""
    device = None if name == "mpi" else torch.device("cuda")
    return SimpleNamespace(name=name, size=2, device=device, host_waits=name == "cuda-mpi")


def step_on(device="cuda", amp="off", dataset=None, optimizer=None, recorder=None, world=None):
    mesh = Mesh(LocalTransport())
    mesh.session.timers.recorder = recorder
    if world is not None:
        mesh.world = world_of(world)
    optimizer = optimizer or Adam([torch.zeros(2, requires_grad=True)], fused=True)
    loader = SimpleNamespace(dataset=dataset or Shapes(8, 8))
    network = SimpleNamespace(obstacle=None)
    state = SimpleNamespace(optimizer=optimizer, loader=loader, network=network)
    config = TrainConfig(amp=amp)
    return SimpleNamespace(mesh=mesh, state=state, config=config, device=torch.device(device))


SHARED = SimpleNamespace(param_groups=[{"fused": True}])
"""Substitute for a partitioned optimizer, with which the scaler must query the device."""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "cpu"}, "the step runs on the CPU"),
        ({"world": "mpi"}, "transport 'mpi' carries host memory"),
        ({"world": "cuda-mpi"}, "the host waits in transport 'cuda-mpi'"),
        ({"recorder": object()}, "the step is being profiled"),
        ({"dataset": Shapes(8, 16, 8)}, "samples have 2 different shapes"),
        ({"optimizer": SGD([torch.zeros(1)], 0.1)}, "without fused=True"),
        ({"amp": "fp16", "optimizer": SHARED}, "fp16 with a partitioned optimizer"),
    ],
)
def test_what_is_in_the_way_is_named(given, reason):
    assert reason in cuda_graph.obstacle(step_on(**given))


@pytest.mark.parametrize("given", [{}, {"amp": "fp16"}, {"amp": "bf16"}, {"world": "ipc"}])
def test_nothing_is_in_the_way_of_a_plain_step_on_a_device(given):
    assert cuda_graph.obstacle(step_on(**given)) is None


def test_on_a_cpu_nobody_is_told_unless_a_graph_was_demanded(config):
    config = change(config, train={"steps": 1})
    alone(config)
    assert not notices(config)
    with pytest.raises(UsageError, match=r'cuda_graph is "always": the step runs on the CPU'):
        run_local(job, 2, change(config, train={"cuda_graph": "always"}), 1, (2, 1, 1))


def notices(config) -> list[str]:
    return [event["text"] for event in events(config, "notice")]


def test_steps_of_other_sizes_start_the_count_anew(monkeypatch):
    monkeypatch.setattr(cuda_graph, "obstacle", lambda step: None)
    sizes = []
    monkeypatch.setattr(
        cuda_graph.GraphedStep, "_capture", lambda self, batch: sizes.append(batch.global_size)
    )
    taken = []

    def plain(batch, scale):
        taken.append(scale)

    plain.mesh = SimpleNamespace(size=1)
    step = cuda_graph.GraphedStep(plain, "always", print)
    for size in [4] * cuda_graph.WARMUP + [3] + [4] * (cuda_graph.WARMUP + 1):
        step(SimpleNamespace(global_size=size, loss_scale=size / 8))
    assert sizes == [4], "after so many steps of one size, and not before"
    assert len(taken) == 2 * cuda_graph.WARMUP + 2


@pytest.mark.parametrize("version", ["2.10.0", "2.12.1+cu130", "2.13.0+cu130", "2.14.0"])
def test_an_old_torch_gets_a_graph_only_on_demand(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert cuda_graph.risk("always", 2) is None
    assert "several ranks" in (cuda_graph.risk("auto", 2) or "")
    reason = cuda_graph.risk("auto", 1)
    if version < cuda_graph.RECOVERS:
        assert reason.startswith(f"torch {version} leaks memory if a capture fails, 2.13 is")
    else:
        assert reason is None


@pytest.mark.parametrize("optimizer", [Adam, SGD])
def test_learning_rates_are_numbers_again_after_a_capture(optimizer):
    parameters = [torch.ones(3, requires_grad=True) for _ in range(2)]
    made = optimizer([{"params": p, "lr": r} for p, r in zip(parameters, (0.5, 0.25), strict=True)])
    before = [dict(group) for group in made.param_groups]
    rates = [torch.tensor(0.5), torch.tensor(0.25)]
    with captured.capturable(made, rates):
        assert [group["lr"] for group in made.param_groups] == rates
        assert all(group.get("capturable", True) for group in made.param_groups)
    assert made.param_groups == before


def test_a_replay_draws_what_the_step_would_have_drawn():
    """A captured dropout uses the keys of the forward pass that it replaces."""
    mesh = Mesh(LocalTransport(), seed=5)
    x = torch.ones(2, 3, 4, 5, 6)

    def drawn() -> list[torch.Tensor]:
        mesh.session.forwards += 1
        found = distribute_tensor(x, mesh)
        return [torch.nn.functional.dropout(found, 0.5).to_local() for _ in range(2)]

    mesh.session.forwards = 41
    expected = drawn()
    mesh.session.forwards = 7
    keys = ReplayedKeys(mesh, torch.device("cpu"))
    draws_of(mesh).replayed = keys
    found = drawn()
    draws_of(mesh).replayed = None
    assert torch.equal(found[0], found[1]), "drawn with the keys that are not there yet"
    mesh.session.forwards = 42
    keys.renew()
    assert len(keys._places) == 2
    for layer, number in keys._places:
        uniform = torch.empty(x.shape)
        native.keyed_uniform(uniform, keys.place_of(layer, number), [0] * 5, list(x.shape))
        assert torch.equal((uniform >= 0.5) / 0.5, expected[number])


def test_keys_lie_in_memory_that_was_there_before_the_capture(monkeypatch):
    """Every replay would refill memory that the capture fills, after `renew`."""
    monkeypatch.setattr("pydist.ops.pointwise.keyed._REPLAYED", 3)
    keys = ReplayedKeys(Mesh(LocalTransport(), seed=5), torch.device("cpu"))
    start = keys._table.data_ptr()
    with monkeypatch.context() as within:
        for name in ("zeros", "empty", "tensor"):
            within.setattr(torch, name, lambda *_, **__: pytest.fail("memory made in the capture"))
        places = [keys.place_of("net.drop", number).data_ptr() for number in (0, 1, 2, 0)]
        assert places == [start, start + 8, start + 16, start]
        with pytest.raises(NotSupported, match="draws more than 3 times"):
            keys.place_of("net.drop", 3)


def test_a_key_in_memory_is_that_key():
    for key in (0, 7, 2**63 + 11, 2**64 - 1):
        by_value, by_place = torch.empty(3, 50), torch.empty(3, 50)
        place = torch.tensor([key - 2**64 if key >> 63 else key])
        native.keyed_uniform(by_value, key, [0, 0], [3, 50])
        native.keyed_uniform(by_place, place, [0, 0], [3, 50])
        assert torch.equal(by_value, by_place)
    with pytest.raises(ValueError, match="a tensor of one int64"):
        native.keyed_uniform(by_value, torch.zeros(2), [0, 0], [3, 50])


def test_the_device_is_the_cpu_where_there_is_no_other(monkeypatch):
    world = LocalTransport()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", world) == choose_device("cpu", world) == torch.device("cpu")
    with pytest.raises(UsageError, match=r'train.device is "cuda": torch .* finds no CUDA device'):
        choose_device("cuda", world)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr("pydist.train.device.native", SimpleNamespace(has_cuda=True))
    assert choose_device("auto", world) == torch.device("cuda", 1)
    assert cuda_obstacle(world_of("mpi")) == "transport 'mpi' carries host memory"
    assert choose_device("auto", world_of("mpi")) == torch.device("cpu")
    assert choose_device("auto", world_of("nccl")) == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "amp", "wanted", "last"),
    [
        ("cuda", "bf16", "auto", True),
        ("cuda", "off", "auto", False),
        ("cuda", "off", "always", True),
        ("cuda", "fp16", "never", False),
        ("cpu", "bf16", "always", False),
    ],
)
def test_channels_come_last_for_tensor_cores(device, amp, wanted, last):
    config = TrainConfig(amp=amp, channels_last=wanted)
    expected = torch.channels_last_3d if last else torch.contiguous_format
    assert memory_format(config, torch.device(device)) == expected
