"""Predictions of two ranks on CUDA devices, against the same networks on CPUs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pydantic", reason="a run's configuration needs pydantic")

from pydist.comm import LocalTransport, Transport
from pydist.comm.transports.nccl.device_assignment import missing
from pydist.data import UniverseOptions, generate_universes
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.inference import Predictor, Sliding
from pydist.inference.resident import Resident
from pydist.mesh import Mesh
from pydist.train.config import (
    Config,
    CosmoFlowConfig,
    DataConfig,
    OutputConfig,
    TrainConfig,
    UNet3dConfig,
)
from pydist.train.run import train
from support.transports.device_contract import two_ranks

pytestmark = two_ranks(missing(), seconds=140)


@pytest.fixture(scope="class")
def runs(devices: Transport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains "ct" and "universes" for a step, on a CPU; returns the folder of the runs."""
    own = str(tmp_path_factory.mktemp("runs")).encode()
    folder = Path(devices.broadcast_bytes(own if devices.rank == 0 else None).decode())
    if devices.rank == 0:
        generate_ct(folder / "ct-data", CTOptions(count=3, shape=(16, 24, 16)))
        generate_universes(folder / "universes-data", UniverseOptions(5, 32, 32))
        models = {
            "ct": UNet3dConfig(features=4, levels=2),
            "universes": CosmoFlowConfig(variant="mlperf", width=32),
        }
        for name, model in models.items():
            normalize = "ct" if name == "ct" else "log1p"
            config = Config(
                model=model,
                data=DataConfig(folder / f"{name}-data", normalize),
                train=TrainConfig(epochs=1, batch=1, steps=1, device="cpu"),
                output=OutputConfig(folder / name, plot=False),
            )
            train(config, Mesh(LocalTransport(), seed=0))
    devices.barrier()
    return folder


@pytest.mark.usefixtures("exact")
class TestPrediction:
    @pytest.mark.parametrize("sliding", [None, Sliding(16)], ids=["whole", "windows"])
    def test_probabilities_of_a_volume_are_those_of_cpus(
        self, devices: Transport, runs: Path, sliding: Sliding | None
    ) -> None:
        mesh = Mesh(devices, 1, (2, 1, 1))
        image = np.random.default_rng(0).normal(0, 300, (1, 16, 32, 16)).astype(np.float32)
        given = image if devices.rank == 0 else None
        found, expected = (
            Predictor(runs / "ct", mesh, sliding, device).probabilities(given)
            for device in ("cuda", "cpu")
        )
        if devices.rank != 0:
            assert found is None
        else:
            assert found is not None
            assert expected is not None
            np.testing.assert_allclose(found, expected, atol=1e-4)

    @pytest.mark.parametrize("groups", [1, 2])
    def test_values_of_samples_are_those_of_cpus(
        self, devices: Transport, runs: Path, groups: int
    ) -> None:
        mesh = Mesh(devices, groups, (2 // groups, 1, 1))
        random = np.random.default_rng(1)
        samples = [random.poisson(1.0, (4, 32, 32, 32)).astype(np.int16) for _ in range(3)]
        results = []
        for device in ("cuda", "cpu"):
            resident = Resident(runs / "universes", mesh, device=device)
            assert resident.device.type == device
            if devices.rank != 0:
                resident.follow()
                continue
            results.append(resident.predict([resident.prepared(each) for each in samples]))
            resident.end()
        for found, expected in zip(*results or ([], []), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
