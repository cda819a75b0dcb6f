"""Tests of the profiler: its times, their assignment to layers, and the cleanup."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, parallelize
from pydist.comm import LocalTransport
from pydist.errors import DiskError, UsageError
from pydist.models import CosmoFlow
from pydist.profile import Profiler
from pydist.profile.summary import COLUMNS, Summary
from support.equivalence import on_ranks, randn

FORWARD, BACKWARD = 0.002, 0.004


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return grad.clone()


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x)


def profiled(model: nn.Module, x: Tensor, steps: int = 2, warmup: int = 1) -> Summary:
    """Returns a profile of plain calls of a model on one rank."""
    with Profiler(Mesh(LocalTransport()), model, warmup) as profiler:
        for _ in range(warmup + steps):
            model(x).sum().backward()
            profiler.step()
    summary = profiler.summary()
    assert summary is not None
    return summary


def leaf(*shape: int) -> Tensor:
    return torch.zeros(*shape, requires_grad=True)


def slept(summary: Summary, layer: str) -> tuple[bool, bool]:
    """Returns whether a layer's (forward, backward) time includes the sleep of one call."""
    row = summary.layers[layer]
    return row["forward"] >= FORWARD, row["backward"] >= BACKWARD


class _InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Slow()(x).mul_(2)


class _Residual(nn.Module):
    """Container that computes between the calls of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Slow.apply(self.first(x))) + x


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Slow(), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        pytest.param(lambda: nn.Sequential(nn.Linear(3, 3), Slow()), "1", id="after a layer"),
        pytest.param(lambda: nn.Sequential(Slow(), nn.Linear(3, 3)), "0", id="at the entry"),
        pytest.param(lambda: nn.Sequential(_InPlace(), nn.ReLU(True)), "0", id="then in place"),
        pytest.param(lambda: nn.Sequential(_Residual()), "0", id="between the children"),
        pytest.param(_Checkpointed, "inner.0", id="checkpointed"),
    ],
)
def test_computation_is_given_to_its_layer(make: Callable[[], nn.Module], layer: str):
    summary = profiled(make(), leaf(2, 3))
    assert slept(summary, layer) == (True, True)
    others = {path for path in summary.layers if path != layer}
    assert (
        sum(summary.layers[path]["backward"] for path in others) < summary.layers[layer]["backward"]
    )


def test_recomputation_counts_as_backward():
    summary = profiled(_Checkpointed(), leaf(2, 3))
    assert summary.layers["inner.0"]["backward"] >= FORWARD + BACKWARD


def test_what_no_layer_did_is_outside_of_all():
    model = nn.Linear(3, 3)
    with Profiler(Mesh(LocalTransport()), model, warmup=0) as profiler:
        _Slow.apply(model(leaf(2, 3))).sum().backward()
        profiler.step()
    summary = profiler.summary()
    assert summary.layers[""]["other"] >= FORWARD + BACKWARD
    assert summary.layers["Linear"]["backward"] < BACKWARD


def test_optimizer_and_own_spans_are_counted():
    model = nn.Linear(3, 3)
    mesh = Mesh(LocalTransport())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(FORWARD))
    with Profiler(mesh, model, warmup=0) as profiler:
        for _ in range(2):
            with mesh.session.timers.measure("data"):
                time.sleep(FORWARD)
            model(leaf(2, 3)).sum().backward()
            optimizer.step()
            profiler.step()
    total = profiler.summary().total
    assert total["optimizer"] > 0
    assert total["data"] >= FORWARD


def train(mesh: Mesh, profiler: Profiler | None = None, steps: int = 3) -> list[Tensor]:
    """Trains a small CosmoFlow for some steps; returns its parameters."""
    torch.manual_seed(0)
    mesh.world.barrier()
    model = parallelize(copy.deepcopy(MODEL), mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def loop(mark: Callable[[], None]) -> None:
        for _ in range(steps):
            F.mse_loss(model(X), TARGET).backward()
            optimizer.step()
            optimizer.zero_grad()
            mark()

    if profiler is None:
        loop(lambda: None)
    else:
        profiler.model = model
        with profiler:
            loop(profiler.step)
    return [p.detach() for p in model.parameters()]


torch.manual_seed(0)
MODEL = CosmoFlow(32, batch_norm=True, dropout=0.0)
X, TARGET = randn(1, 4, 32, 32, 32).float(), randn(1, 4, seed=1).float()


@pytest.fixture(scope="module")
def cosmoflow(tmp_path_factory):
    """Profiles CosmoFlow on 2 ranks; returns each rank's results and the traces."""
    path = tmp_path_factory.mktemp("trace")

    def body(mesh: Mesh):
        profiler = Profiler(mesh, nn.Identity(), warmup=1)
        parameters = train(mesh, profiler)
        profiler.write_trace(path / f"{mesh.rank}.json")
        assert mesh.session.timers.recorder is None
        return profiler.summary(), profiler.table(), parameters, profiler.ranks

    return on_ranks((2, 1, 1), body), path


def test_every_part_of_cosmoflow_is_found_where_it_belongs(cosmoflow):
    (summary, *_), _ = cosmoflow[0]
    assert (summary.steps, summary.ranks) == (2, 2)
    conv, norm = summary.layers["features.conv1"], summary.layers["features.bn1"]
    for column in ("forward", "backward", "posted", "exposed"):
        assert conv[column] > 0, column
    assert norm["statistics"] > 0
    assert conv["statistics"] == norm["exposed"] == 0
    assert summary.layers[""]["gradients"] > 0
    assert summary.layers[""]["optimizer"] > 0
    assert 0 <= summary.hidden <= 1
    assert list(summary.layers)[:3] == ["CosmoFlow", "features", "features.conv1"]
    assert list(summary.layers)[-1] == ""


def test_columns_add_up_to_the_step(cosmoflow):
    (summary, *_), _ = cosmoflow[0]
    assert sum(summary.total.values()) == pytest.approx(summary.step, rel=1e-9)
    for column in COLUMNS:
        over_layers = sum(row[column] for row in summary.layers.values())
        assert over_layers == pytest.approx(summary.total[column], abs=1e-12)
        assert summary.least[column] <= summary.total[column] * (1 + 1e-9)
        assert summary.total[column] <= summary.most[column] * (1 + 1e-9)


def test_the_table_shows_layers_parts_and_extremes(cosmoflow):
    (_, table, *_), (_, elsewhere, *_) = cosmoflow[0]
    assert "mean of 2 steps on 2 ranks (depth 2, local)" in table
    for word in ("features.conv1", "outside layers", "exposed", "boundary", "most of ranks", "%"):
        assert word in table
    assert "halos were in flight for" in table
    assert elsewhere == ""


def test_results_are_on_rank_0(cosmoflow):
    _, (summary, _, _, ranks) = cosmoflow[0]
    assert summary is None
    assert ranks == []
    assert (cosmoflow[1] / "0.json").exists()
    assert not (cosmoflow[1] / "1.json").exists()


def test_profiling_changes_no_bit(cosmoflow):
    found = cosmoflow[0][0][2]
    for measured, plain in zip(found, on_ranks((2, 1, 1), train)[0], strict=True):
        assert torch.equal(measured, plain)


def test_the_trace_has_a_row_a_rank(cosmoflow):
    trace = json.loads((cosmoflow[1] / "0.json").read_text())
    events = trace["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    for rank in (0, 1):
        spans = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert {("features.conv1", "pack"), ("features.bn1", "statistics")} <= {
            (e["name"], e["cat"]) for e in spans
        }
        assert [e["name"] for e in spans if e["cat"] == "step"] == ["step 1", "step 2"]
        assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
        _assert_nested(sorted((e["ts"], -e["dur"]) for e in spans))
    # Ranks meet in each batch norm, so steps of two ranks on one clock overlap.
    first = [e for e in events if e["name"] == "step 1"]
    assert max(e["ts"] for e in first) < min(e["ts"] + e["dur"] for e in first)


def _assert_nested(spans: list[tuple[float, float]]) -> None:
    """Asserts that spans of a row nest or follow each other, up to the format's rounding."""
    open_: list[float] = []
    for start, minus_length in spans:
        while open_ and open_[-1] <= start + 2e-3:
            open_.pop()
        stop = start - minus_length
        assert not open_ or stop <= open_[-1] + 2e-3
        open_.append(stop)


def test_nothing_stays_behind(monkeypatch):
    mesh, model = Mesh(LocalTransport()), nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ZeroDivisionError), Profiler(mesh, model):
        raise ZeroDivisionError
    with Profiler(mesh, model, warmup=0) as profiler:
        profiler.step()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert mesh.session.timers.recorder is None
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert "optimizer" not in mesh.session.timers.snapshot()


def test_a_call_that_raises_leaves_the_layers_right():
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    mesh, model = Mesh(LocalTransport()), nn.Sequential(Slow(), nn.Sequential(Raising()))
    with Profiler(mesh, model, warmup=0) as profiler:
        with pytest.raises(ZeroDivisionError):
            model(leaf(2, 3))
        assert mesh.session.timers.layer == ""
        model[0](leaf(2, 3)).sum().backward()
        profiler.step()
    assert slept(profiler.summary(), "0") == (True, True)


def test_wrong_use_is_named():
    mesh, model = Mesh(LocalTransport()), nn.Linear(3, 3)
    with pytest.raises(UsageError, match="warmup=-1"):
        Profiler(mesh, model, warmup=-1)
    with Profiler(mesh, model, warmup=1) as profiler:
        with pytest.raises(UsageError, match="being profiled already"):
            Profiler(mesh, model).__enter__()
        with pytest.raises(UsageError, match="has ended"):
            profiler.table()
        profiler.step()
    with pytest.raises(UsageError, match="nothing was measured"):
        profiler.table()


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    with Profiler(Mesh(LocalTransport()), nn.Linear(3, 3), warmup=0) as profiler:
        profiler.step()
    with pytest.raises(DiskError, match=r"can't write .*trace\.json"):
        profiler.write_trace(tmp_path / "missing" / "trace.json")
