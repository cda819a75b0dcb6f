"""Copies into the device memory of other ranks: the contract of all transports."""

from __future__ import annotations

import torch

from pydist.comm import Transport
from pydist.comm.transports.ipc.channel import IpcChannel
from pydist.comm.transports.ipc.transport import IpcTransport
from pydist.comm.transports.nccl.device_assignment import missing
from support.transports.device_contract import StreamContract, two_ranks

pytestmark = two_ranks(missing())


class TestIpc(StreamContract):
    transport = "ipc"

    def test_the_ranks_reach_each_other(self, devices: IpcTransport) -> None:
        peer = 1 - devices.rank
        sent, received = (torch.zeros(4, device=devices.device) for _ in range(2))
        channel = devices.channel([(peer, sent)], [(peer, received)], 1)
        assert isinstance(channel, IpcChannel)

    def test_nothing_is_written_before_its_receiver_is_done(self, devices: Transport) -> None:
        """One rank only sends, and runs far ahead of the other, which only receives."""
        buffer = torch.zeros(1 << 20, device=devices.device)
        pairs = [(1 - devices.rank, buffer)]
        sends, recvs = (pairs, []) if devices.rank == 0 else ([], pairs)
        channel = devices.channel(sends, recvs, 8)
        copies = []
        for round_ in range(8):
            if devices.rank == 0:
                buffer.fill_(round_)
            channel.start()
            channel.wait()
            if devices.rank == 1:
                torch.cuda._sleep(20_000_000)  # cycles
                copies.append(buffer.clone())
        for round_, copy in enumerate(copies):
            assert torch.equal(copy, torch.full_like(copy, float(round_)))
        devices.barrier()
