"""NCCL: the contract of all transports, on tensors of the ranks' devices."""

from __future__ import annotations

import pytest
import torch

from pydist.comm import Transport
from pydist.errors import PydistError, UsageError
from support.transports.device_contract import StreamContract, no_two_ranks, two_ranks

pytestmark = two_ranks(no_two_ranks())


class TestNccl(StreamContract):
    transport = "nccl"

    def test_a_group_closes_when_the_graph_with_its_operations_is_gone(
        self, devices: Transport
    ) -> None:
        """NCCL waits for the graph without limit; the group's tensors are still freed in order."""
        group = devices.split(0, devices.rank)
        tensor = torch.ones(1 << 10, device=devices.device)
        group.all_reduce(tensor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            group.all_reduce(tensor)
        graph.replay()
        assert torch.equal(tensor, torch.full_like(tensor, 4.0))
        torch.cuda.synchronize()
        graph.reset()
        kept = torch.ones(1 << 10, device=devices.device)
        kept.record_stream(torch.cuda.ExternalStream(group._on_device._group.stream))
        group.close()
        del group, kept  # the allocator records an event on the stream
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def test_tensors_elsewhere_are_refused(self, devices: Transport) -> None:
        with pytest.raises(PydistError, match="tensor on meta"):
            devices.all_reduce(torch.empty(2, device="meta"))
        with pytest.raises(UsageError, match="host memory and on a CUDA device"):
            devices.channel([(0, torch.zeros(1))], [(0, torch.zeros(1, device=devices.device))], 7)
