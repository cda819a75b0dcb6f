"""CUDA-aware MPI: the contract of all transports, on device memory."""

from __future__ import annotations

from pydist.comm.transports.nccl.device_assignment import device_missing
from support.transports.device_contract import DeviceContract, two_ranks

pytestmark = two_ranks(device_missing(), mpi=("openmpi", "mpich"))


class TestCudaMpi(DeviceContract):
    transport = "cuda-mpi"
