"""Tests without a GPU of the capture of a training step, and of failed captures."""

from __future__ import annotations

import copy
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.optim import Adam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pydist import distribute_tensor
from pydist.comm import LocalTransport, Work, run_local
from pydist.data.loader import Batch
from pydist.errors import NotSupported, PydistError, RankFailed, RankLost
from pydist.gradients.registration import reducer_of
from pydist.mesh import Mesh
from pydist.train import captured, cuda_graph, loop
from pydist.train.config import TrainConfig
from pydist.train.network import MeshNetwork
from pydist.train.step import TrainStep
from support.training.runs import alone, change, events, job, last_state


class Computed:
    """Replacement of a CUDA graph that computes the captured operations immediately.

    So all their effects exist. `reset` counts in `gone`.
    """

    gone = 0

    def reset(self):
        Computed.gone += 1


CAPTURING: set[int] = set()


@contextmanager
def compute(*_, **__):
    """Simulates a capture; like torch's, its end raises after an error within it."""
    CAPTURING.add(threading.get_ident())
    try:
        yield
    except Exception as error:
        raise RuntimeError("operation failed due to a previous error during capture") from error
    finally:
        CAPTURING.discard(threading.get_ident())


@pytest.fixture
def computed_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Computed)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph", compute)
    monkeypatch.setattr(cuda_graph, "obstacle", lambda step: None)
    monkeypatch.setattr(cuda_graph, "risk", lambda wanted, ranks: None)
    monkeypatch.setattr(cuda_graph, "WARMUP", 1)


REFUSAL = "operation not permitted when stream is capturing"


@pytest.fixture
def refused_capture(computed_capture):
    """Makes the optimizer's step fail in a capture, after forward and backward."""

    def refuse(*_):
        if threading.get_ident() in CAPTURING:
            raise RuntimeError(REFUSAL)

    handle = register_optimizer_step_pre_hook(refuse)
    yield
    handle.remove()


def test_a_capture_that_fails_leaves_the_run_as_it_was(
    config, tmp_path, monkeypatch, refused_capture
):
    """The network has dropout, and the capture comes after some steps."""
    config = change(config, train={"steps": 4, "validate_every": 0, "clip_norm": 1.0})
    plain = change(config, output={"folder": tmp_path / "plain"}, train={"cuda_graph": "never"})
    alone(plain)
    tried = []
    monkeypatch.setattr(cuda_graph.GraphedStep, "_give_up_if", watched(tried))
    alone(config)
    assert tried == [f"the step can't be captured: {REFUSAL}"], "once, by what came first"
    found, expected = (last_state(each)["model"] for each in (config, plain))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_on_several_ranks_a_capture_that_fails_ends_the_job(config, refused_capture):
    """The ranks may be at different exchanges without knowing."""
    config = change(config, train={"steps": 4, "validate_every": 0})
    said = f'can\'t be captured: {REFUSAL}; train.cuda_graph = "never" avoids it'
    with pytest.raises(PydistError, match=re.escape(said)):
        run_local(job, 2, config, 1, (2, 1, 1))


@pytest.mark.parametrize("form", ["dense", "bf16"])
def test_the_log_has_the_bytes_of_replayed_steps(config, monkeypatch, computed_capture, form):
    """Nothing is computed in the replays here, which follow a capture in the second step."""
    monkeypatch.setattr(Computed, "replay", lambda self: None, raising=False)
    train = {"batch": 2, "cuda_graph": "always", "validate_every": 0, "gradients": form}
    config = change(config, train=train, optimizer={"sharded": "never"})
    run_local(job, 2, config, 2)
    sent = [event["gradient_bytes"] for event in events(config, "step")]
    assert len(sent) == 6
    assert sent == [sent[0]] * 6
    assert sum(sent[0].values()) > 0


@pytest.mark.parametrize("error", [RankFailed("rank 1: it"), RankLost("rank 1: it")])
def test_the_loss_of_a_rank_is_not_taken_for_a_capture_that_fails(monkeypatch, error):
    with pytest.raises(type(error), match="rank 1: it"):
        captured_with(monkeypatch, error)


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, PydistError, NotSupported])
def test_one_rank_goes_on_without_a_graph_whatever_is_in_its_way(monkeypatch, error):
    assert captured_with(monkeypatch, error("cuEventRecord failed")) == [
        "no CUDA graph: the step can't be captured: cuEventRecord failed"
    ]


def captured_with(monkeypatch, error: Exception) -> list[str]:
    """Returns the notices of a run whose capture raises and that continues without a graph."""

    def refuse(*_):
        raise error

    monkeypatch.setattr(cuda_graph, "obstacle", lambda step: None)
    monkeypatch.setattr(cuda_graph, "risk", lambda wanted, ranks: None)
    monkeypatch.setattr(cuda_graph, "CapturedStep", refuse)
    said, taken = [], []
    step = counted(taken)
    graphed = cuda_graph.GraphedStep(step, "auto", said.append)
    for _ in range(cuda_graph.WARMUP + 2):
        graphed(SimpleNamespace(global_size=4, loss_scale=1))
    assert len(taken) == cuda_graph.WARMUP + 2
    return said


def counted(taken: list, device="cuda"):
    """Returns a step that only records its calls."""

    def step(batch, scale):
        taken.append(scale)

    step.mesh, step.device = Mesh(LocalTransport()), torch.device(device)
    return step


def test_what_is_in_the_way_on_one_rank_keeps_all_from_trying(monkeypatch):
    def body(world):
        said, taken = [], []
        step = counted(taken)
        step.mesh = Mesh(world)
        graphed = cuda_graph.GraphedStep(step, "auto", said.append)
        rank = threading.current_thread()
        if world.rank == 1:
            in_the_way.add(rank)
        for _ in range(cuda_graph.WARMUP + 2):
            graphed(SimpleNamespace(global_size=4, loss_scale=1))
        assert len(taken) == cuda_graph.WARMUP + 2
        return said

    in_the_way = set()
    monkeypatch.setattr(
        cuda_graph,
        "obstacle",
        lambda step: "profiled" if threading.current_thread() in in_the_way else None,
    )
    monkeypatch.setattr(cuda_graph, "risk", lambda wanted, ranks: None)
    # Rank 1 has the obstacle from the first step on, but checks only before a capture.
    assert run_local(body, 2) == [
        ["no CUDA graph: the step can't be captured on another rank"],
        ["no CUDA graph: profiled"],
    ]


def small_step(world=None):
    """Returns a step on a linear layer and a norm, and its batch."""
    mesh = Mesh(world or LocalTransport())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = Adam(model.parameters(), 0.1, fused=True)
    state = SimpleNamespace(
        mesh=mesh,
        model=model,
        network=MeshNetwork(model, mesh),
        optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        loader=SimpleNamespace(device=torch.device("cpu")),
    )
    task = SimpleNamespace(criterion=lambda batches: torch.nn.functional.mse_loss)
    step = TrainStep(state, task, TrainConfig())
    inputs = distribute_tensor(torch.rand(4, 3, 1, 1, 1), mesh)
    state.model.forward = lambda x: torch.nn.Sequential.forward(model, x.to_local().flatten(1))
    batch = Batch(inputs, torch.rand(4, 2), torch.ones(4), (0, 1, 2, 3), 4, 0, 4, 1.0, 0, 0, 4)
    return step, batch


def test_the_ranks_that_a_graph_exchanges_with_know_of_it(computed_capture):
    """NCCL closes no group while a graph with its operations exists."""
    step, batch = small_step()
    known = []
    step.mesh.world.captured_in = known.append
    made = captured.CapturedStep(step, batch)
    assert known == [made._graph]


def test_what_a_dead_capture_has_begun_is_forgotten_and_not_waited_for(computed_capture):
    """Here a bucket is in flight and an end-of-backward callback is queued."""

    class Dead(Work):
        def wait(self):
            pytest.fail("its event belongs to a dead capture")

    def body(world):
        step, batch = small_step(world)
        reducer = reducer_of(step.mesh)
        (lane,) = reducer.members.add_lanes(step.state.model.named_parameters())
        (bucket,) = lane.buckets

        def begin(*_):
            bucket._work, reducer._queued, lane._next = Dead(), True, 1
            raise RuntimeError(REFUSAL)

        step.state.optimizer.register_step_pre_hook(begin)
        with pytest.raises(RuntimeError, match=REFUSAL):
            captured.CapturedStep(step, batch)
        assert (bucket._work, reducer._queued, lane._next) == (None, False, 0)

    run_local(body, 2)


def changed_storage(state):
    weight = state.model[0].weight
    weight.data = weight.data.clone()


@pytest.mark.parametrize(
    "change_it",
    [
        changed_storage,
        lambda state: state.model[0].bias.requires_grad_(False),
        lambda state: setattr(state.model[1], "running_mean", torch.zeros(2)),
        lambda state: state.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict())),
        lambda state: reducer_of(state.mesh).members.add_lanes(state.model.named_parameters()),
    ],
)
def test_a_graph_is_outdated_when_what_it_computes_with_has_moved(computed_capture, change_it):
    step, batch = small_step()
    step(batch, 1.0)
    made = captured.CapturedStep(step, batch)
    step(batch, 1.0)
    assert not made.is_outdated()
    change_it(step.state)
    assert made.is_outdated()


def test_an_outdated_graph_is_let_go_and_the_count_starts_anew(computed_capture, monkeypatch):
    step, batch = small_step()
    replayed, before = [], Computed.gone
    monkeypatch.setattr(captured.CapturedStep, "replay", lambda self, _: replayed.append(self))
    graphed = cuda_graph.GraphedStep(step, "auto", print)
    for _ in range(cuda_graph.WARMUP + 2):
        graphed(batch)
    assert len(replayed) == 2
    changed_storage(step.state)
    graphed(batch)
    assert (len(replayed), Computed.gone - before, graphed.captured) == (2, 1, False)
    graphed(batch)
    assert (len(replayed), graphed.captured) == (3, True)
    assert replayed[1] is not replayed[2]
    graphed.close()
    assert (Computed.gone - before, graphed.captured) == (2, False)


def test_ranks_let_go_of_their_graphs_together(computed_capture, monkeypatch):
    monkeypatch.setattr(captured.CapturedStep, "replay", lambda self, _: None)

    def body(world):
        step, batch = small_step(world)
        graphed = cuda_graph.GraphedStep(step, "always", print)
        for _ in range(cuda_graph.WARMUP + 2):
            graphed(batch)
        assert graphed.captured
        if world.rank == 1:
            changed_storage(step.state)
        graphed(batch)
        return graphed.captured

    assert run_local(body, 2) == [False, False]


def test_a_batch_that_lies_otherwise_is_refused_in_one_line(computed_capture):
    step, batch = small_step()
    made = captured.CapturedStep(step, batch)
    with pytest.raises(PydistError, match=r"4 samples .* from sample 4, .* captured .* from 0"):
        made.replay(replace(batch, first_sample=4))


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_lets_go_of_its_graph_however_it_ends(config, monkeypatch, fails):
    """At the end of a group NCCL waits for graphs that hold its operations."""
    closed = []

    def close(self):
        closed.append(self)

    monkeypatch.setattr(cuda_graph.GraphedStep, "close", close)
    config = change(config, train={"steps": 1, "validate_every": 0})
    if not fails:
        alone(config)
    else:
        monkeypatch.setattr(loop.Trainer, "_save", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            alone(config)
    assert len(closed) == 1


def watched(reasons):
    give_up = cuda_graph.GraphedStep._give_up_if

    def watch(self, reason):
        if reason is not None:
            reasons.append(reason)
        give_up(self, reason)

    return watch
