"""Test of the profile of a user's loop on real MPI."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from pydist import Mesh, parallelize
from pydist.profile import Profiler

pytestmark = pytest.mark.ranks(2)


def test_two_processes_make_one_table_and_one_trace(world, tmp_path):
    path = tmp_path / "trace.json"
    mesh = Mesh(world, 1, (2, 1, 1))
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Flatten())
    parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(1, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    with Profiler(mesh, model, warmup=1) as profiler:
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.write_trace(path)
    assert path.exists() == (world.rank == 0)
    if world.rank != 0:
        assert profiler.table() == ""
        return
    summary = profiler.summary()
    assert (summary.ranks, summary.steps) == (2, 3)
    assert summary.layers["0"]["posted"] > 0
    assert summary.layers["1"]["statistics"] > 0
    assert summary.total["optimizer"] > 0
    assert sum(summary.total.values()) == pytest.approx(summary.step, rel=1e-9)
    assert "3 steps on 2 ranks (depth 2, " in profiler.table()
    events = json.loads(path.read_text())["traceEvents"]
    steps = [e for e in events if e.get("cat") == "step"]
    assert [(e["pid"], e["name"]) for e in steps] == [
        (rank, f"step {n}") for rank in (0, 1) for n in (1, 2, 3)
    ]
    # On one clock the ranks' second steps overlap, since each batch norm synchronizes them.
    zero, one = ((e["ts"], e["ts"] + e["dur"]) for e in steps if e["name"] == "step 2")
    assert max(zero[0], one[0]) < min(zero[1], one[1])
