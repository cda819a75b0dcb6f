"""Lists public measurements of CosmoFlow on GPUs and of FanStore, to see modeled numbers beside.

Samples per second while training on cubes of 128³ voxels with 4 channels. No measurement of the
paper's own networks at scale is public as a number. Sources: the MLPerf HPC submission logs of the
rounds named, and LBANN's integration test of CosmoFlow.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """Measurement that was published.

    Attributes:
        run: what ran where.
        gpus: number of GPUs.
        samples_per_second: of all GPUs.
        network: whose arithmetic differs: Gflop of forward and backward of a sample.
    """

    run: str
    gpus: int
    samples_per_second: float
    network: str


_MLPERF = "MLPerf, 206.6 Gflop"
_OLDER = "MLPerf v0.7, 61.2 Gflop"
PUBLISHED = (
    Published("LBANN on Lassen, V100", 4, 57, "LBANN 2023, 35.3 M parameters"),
    Published("MLPerf v0.7 Cori, V100", 64, 865, _OLDER),
    Published("MLPerf v0.7 ABCI, V100 (AMP)", 512, 14_200, _OLDER),
    Published("MLPerf v1.0 TACC, V100", 128, 1_544, _MLPERF),
    Published("MLPerf v1.0 Selene, A100 (AMP)", 128, 8_570, _MLPERF),
    Published("MLPerf v1.0 Selene, A100 (AMP)", 1024, 64_700, _MLPERF),
    Published("MLPerf v2.0 Selene, A100 (AMP)", 32, 4_198, _MLPERF),
    Published("MLPerf v2.0 Selene, A100 (AMP)", 512, 59_370, _MLPERF),
    Published("MLPerf v3.0 Perlmutter, A100 (AMP)", 512, 43_600, _MLPERF),
    Published("MLPerf v3.0 Eos, H100 (AMP)", 32, 7_160, _MLPERF),
    Published("MLPerf v3.0 Eos, H100 (AMP)", 512, 105_800, _MLPERF),
)


class PublishedFiles(NamedTuple):
    """Rate of reading files that was published.

    Attributes:
        run: what ran where.
        nodes: number of nodes.
        files_per_second: of all nodes.
    """

    run: str
    nodes: int
    files_per_second: float


_CPUS = "FanStore, ResNet-50 on CPU nodes"
_GPUS = "FanStore, ResNet-50 on GPU nodes"
# Read off the bars of the figure in FanStore's repository (commit d03df82).
PUBLISHED_FILES = (
    PublishedFiles(_GPUS, 1, 550),
    PublishedFiles(_GPUS, 4, 1_900),
    PublishedFiles(_GPUS, 8, 4_050),
    PublishedFiles(_GPUS, 16, 7_850),
    PublishedFiles(_CPUS, 64, 1_950),
    PublishedFiles(_CPUS, 128, 3_950),
    PublishedFiles(_CPUS, 256, 7_700),
    PublishedFiles(_CPUS, 512, 15_100),
)
