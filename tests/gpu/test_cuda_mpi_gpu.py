"""An MPI that takes device memory: the contract of all transports, on such memory."""

from __future__ import annotations

from device_contract import DeviceContract, two_ranks

from pydist.comm.transports.nccl.place import device_missing

pytestmark = two_ranks(device_missing(), mpi=("openmpi", "mpich"))


class TestCudaMpi(DeviceContract):
    transport = "cuda-mpi"
