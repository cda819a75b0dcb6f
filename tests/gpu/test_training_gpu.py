"""Full training runs of two ranks on CUDA devices, against the same run on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="a run's configuration needs pydantic")

import torch

from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import missing
from pydist.data import UniverseOptions, generate_universes
from pydist.mesh import Mesh
from pydist.train.config import (
    AdamConfig,
    Config,
    CosmoFlowConfig,
    DataConfig,
    OutputConfig,
    TrainConfig,
)
from pydist.train.run import train
from support.training.runs import change
from support.transports.device_contract import no_two_ranks, two_ranks

pytestmark = two_ranks(missing(), seconds=140)


@pytest.fixture(scope="class")
def config(devices: Transport, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Returns a run with steps before and after a capture, at a rate that limits rounding."""
    own = str(tmp_path_factory.mktemp("run")).encode()
    folder = Path(devices.broadcast_bytes(own if devices.rank == 0 else None).decode())
    if devices.rank == 0:
        options = UniverseOptions(count=15, width=32, box_width=32, validation=1 / 3, seed=5)
        generate_universes(folder / "data", options)
    devices.barrier()
    return Config(
        model=CosmoFlowConfig(variant="mlperf", width=32),
        data=DataConfig(path=folder / "data", normalize="log1p"),
        train=TrainConfig(epochs=2, batch=2),
        optimizer=AdamConfig(lr=1e-4),
        output=OutputConfig(folder=folder / "run", plot=False),
    )


@pytest.fixture(autouse=True)
def same_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects cuDNN's deterministic algorithms, without TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def run(devices: Transport, config: Config, **settings: str) -> tuple[float, float]:
    """Returns the final training and validation losses."""
    folder = config.output.folder.parent / "-".join(settings.values())
    config = change(config, train=settings, output={"folder": folder})
    result = train(config, Mesh(devices, 1, (2, 1, 1), seed=config.train.seed))
    assert result.validation is not None
    return result.loss, result.validation.loss


@pytest.fixture(scope="class")
def on_cpus(devices: Transport, config: Config) -> tuple[float, float]:
    return run(devices, config, device="cpu")


captured = pytest.mark.skipif(no_two_ranks() != "", reason=no_two_ranks())


class TestARun:
    @pytest.mark.parametrize("graph", ["never", pytest.param("always", marks=captured)])
    def test_it_comes_to_what_it_comes_to_on_cpus(
        self, devices: Transport, config: Config, on_cpus: tuple[float, float], graph: str
    ) -> None:
        found = run(devices, config, device="cuda", cuda_graph=graph)
        assert found == pytest.approx(on_cpus, rel=1e-3)

    @captured
    def test_a_graph_takes_its_steps(self, devices: Transport, config: Config) -> None:
        expected = run(devices, config, device="cuda", cuda_graph="never", amp="bf16")
        found = run(devices, config, device="cuda", cuda_graph="always", amp="bf16")
        assert found == pytest.approx(expected, rel=0.02)
