"""Tests that two runs of one training, each in its own processes, give the same bits.

Autotuning differs between runs, so the second run pins the kernels that the first one chose.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.launch.backends import available
from support.jobs.children import child_environment

SCRIPT = """
import hashlib, json, sys
import torch
import torch.nn.functional as F
from pydist import Mesh, distribute_tensor, parallelize
from pydist.backend import conv_tuning
from pydist.backend.autotuner import autotuner_of
from pydist.models import CosmoFlow
from pydist.runtime import connect

conv_tuning._MEASURED_FLOPS = 1_000_000

world = connect()
mesh = Mesh(world, 1, (2, 1, 1), seed=3)
torch.manual_seed(0)
model = parallelize(CosmoFlow(32), mesh)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
losses = []
for step in range(3):
    x = torch.randn(1, 4, 32, 32, 32, generator=torch.Generator().manual_seed(step))
    x = distribute_tensor(x, mesh)
    with torch.autocast("cpu", torch.bfloat16, enabled=step == 2):
        loss = F.mse_loss(model(x).float(), torch.ones(1, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss).hex())
bits = hashlib.sha256()
for p in model.parameters():
    bits.update(p.detach().numpy().tobytes())
found = {"losses": losses, "bits": bits.hexdigest(), "measured": autotuner_of(mesh).problems}
choices = autotuner_of(mesh).everyones()
with open(f"{sys.argv[1]}.{mesh.rank}", "w") as file:
    json.dump(found, file)
if mesh.rank == 0:
    with open(f"{sys.argv[1]}.tuning", "w") as file:
        json.dump(choices, file)
"""


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_fresh_processes_give_the_same_bits(tmp_path: Path, mpi: str) -> None:
    if mpi not in [each.name for each in available()]:
        pytest.skip(f"{mpi} is not installed")
    script, cache = tmp_path / "train.py", tmp_path / "cache"
    script.write_text(SCRIPT)

    def train(name: str, **more: str) -> list[dict[str, object]]:
        subprocess.run(
            [sys.executable, "-m", "pydist.launch", "2", mpi, str(script), str(tmp_path / name)],
            timeout=120,
            check=True,
            cwd=tmp_path,
            env=child_environment(PYDIST_CACHE=str(cache), PYDIST_TUNE="1", **more),
        )
        return [json.loads((tmp_path / f"{name}.{rank}").read_text()) for rank in range(2)]

    first = train("first")
    kept = {path: path.read_bytes() for path in cache.iterdir()}
    assert all(each.pop("measured") for each in first)
    assert len(kept) > 1
    second = train("second", PYDIST_TUNING=str(tmp_path / "first.tuning"))
    assert [each.pop("measured") for each in second] == [0, 0]
    assert second == first
    assert first[0] == first[1]  # replicas of the parameters
    assert {path: path.read_bytes() for path in cache.iterdir()} == kept
