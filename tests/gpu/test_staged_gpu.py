"""The transport `staged`: its contract on devices, and training on a device and a CPU together."""

from __future__ import annotations

import pytest
import torch

from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import missing
from support.training.unequal import check, on_devices
from support.transports.collectives import buffers_outlive_work_that_nobody_waits_for
from support.transports.device_contract import EVERY_CHECK, Check, DeviceContract, two_ranks

ON_BOTH = ["cuda:0", "cpu"]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("devices", "data", "slices"),
    [(ON_BOTH, 2, False), (["cuda:0", "cuda:0", "cpu", "cpu"], 2, True)],
)
def test_training_on_a_device_and_a_cpu(devices, data, slices):
    check(devices, data, slices=slices)


def test_messages_between_a_device_and_a_cpu():
    def body(world: Transport) -> None:
        device = world.device or torch.device("cpu")
        mine, other = torch.full((3,), 1.0 + world.rank, device=device), 1 - world.rank
        total = mine.clone()
        world.all_reduce(total)
        assert total.tolist() == [3.0] * 3
        assert world.all_gather(mine).tolist() == [[1.0] * 3, [2.0] * 3]
        received = torch.empty(3, device=device)
        channel = world.channel([(other, mine)], [(other, received)], 5)
        for _ in range(2):
            channel.start()
            channel.wait()
            assert received.tolist() == [1.0 + other] * 3
            mine.add_(0)
        channel.close()
        assert total.device.type == received.device.type == device.type

    on_devices(ON_BOTH, body)


@two_ranks(missing())
class TestStaged(DeviceContract):
    transport = "staged"

    @EVERY_CHECK
    def test_contract_on_the_device(self, check: Check, devices: Transport) -> None:
        if check is buffers_outlive_work_that_nobody_waits_for:
            pytest.skip("collectives of this transport complete when they start")
        super().test_contract_on_the_device(check, devices)
