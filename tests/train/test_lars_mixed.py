"""Tests of LARS with mixed precision: layouts have the same steps and the same loss scale."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from pydist.comm import run_local
from pydist.train.config import Config, StageConfig
from pydist.train.device import AMP_DTYPES
from pydist.train.tasks import regression
from support.training.runs import alone, change, curve, events, in_stages, job, last_state


@pytest.fixture
def scaled(config, monkeypatch) -> Config:
    """Returns a run of four steps whose first loss scale overflows.

    Passes are in bfloat16, as CPUs convolve float16 slowly: so only huge gradients overflow.
    """

    def steep(y, target):  # the same value with a larger gradient
        return F.mse_loss(y, target) + (y - y.detach()).mean() * 2.0**10

    functions = SimpleNamespace(mse_loss=steep)
    monkeypatch.setattr(regression, "F", functions)
    monkeypatch.setitem(AMP_DTYPES, "fp16", torch.bfloat16)
    monkeypatch.setattr(
        "pydist.train.run.GradScaler",
        lambda device, enabled: torch.amp.GradScaler(
            device, init_scale=2.0**126, backoff_factor=2.0**-100, enabled=enabled
        ),
    )
    table = {"name": "lars", "lr": 0.5, "weight_decay": 5e-4, "log_every": 1}
    return change(
        config, model={"dropout": 0.0}, optimizer=table, train={"amp": "fp16"},
        checkpoint={"every": 1},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "sharded"),
    [({"spatial": (2, 1, 1)}, "always"), ({"channel": 2}, "never"),
     ({"channel": 2, "sharded_weights": True}, "auto"),
     ({"stages": (StageConfig((2, 1, 1)), StageConfig())}, "auto")],
    ids=["partitioned", "channels", "slices", "stages"],
)  # fmt: skip
def test_layouts_skip_the_same_steps(scaled, tmp_path, mesh, sharded):
    alone(scaled)
    split = change(
        scaled, mesh=mesh, optimizer={"sharded": sharded}, output={"folder": tmp_path / "split"}
    )
    if "stages" in mesh:
        in_stages(split)
    else:
        run_local(job, 2, split, 1, split.mesh.spatial)
    assert last_state(split)["scaler"] == last_state(scaled)["scaler"]
    assert curve(split) == pytest.approx(curve(scaled), rel=2e-2)

    def entries(config: Config) -> list[int]:
        return [event["step"] for event in events(config, "layers")]

    assert entries(split) == entries(scaled)  # of steps that were not skipped
    assert 0 < len(entries(scaled)) < 4
    assert curve(scaled)[0] != curve(scaled)[-1]
