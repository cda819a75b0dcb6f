"""An MPI that takes device memory: the contract of all transports, on such memory."""

from __future__ import annotations

import pytest
from device_exchanges import DTYPES, halos_on_a_stream_of_the_caller
from transport_contract import CHECKS, Check

from pydist.comm import Transport
from pydist.comm.nccl_place import device_missing
from pydist.errors import NotSupported, UsageError
from pydist.runtime import connect

# Only where there is something to run does a job of two ranks start.
pytestmark = [pytest.mark.skipif(device_missing() != "", reason=device_missing())]
if not device_missing():
    pytestmark = [pytest.mark.ranks(2, mpi=("openmpi", "mpich"), seconds=70)]


@pytest.fixture(scope="module")
def devices() -> Transport:
    try:
        return connect("cuda-mpi")
    except (NotSupported, UsageError) as error:  # the same on all ranks
        pytest.skip(str(error))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_the_device(check: Check, devices: Transport) -> None:
    with devices.device:  # tensors are made there
        check(devices)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_in_host_memory(check: Check, devices: Transport) -> None:
    check(devices)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halos_on_a_stream_of_the_caller(devices: Transport, dtype, channels_last: bool) -> None:
    halos_on_a_stream_of_the_caller(devices, dtype, channels_last)
