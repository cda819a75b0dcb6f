"""Checks the exchange of halos by a transport whose copies may be late."""

from __future__ import annotations

import torch

from pydist.comm import Transport
from pydist.exchange.exchanger import Exchanger
from pydist.partition import Box


def check_halos(t: Transport) -> None:
    """Compares halos that come, and that go home; the exchanger reuses its buffers for both."""
    size = t.size
    owned = [Box((0, 0, 40 * r, 0), (1, 2, 40 * r + 40, 50)) for r in range(size)]
    needed = [
        [Box((0, 0, max(0, 40 * r - 3), 0), (1, 2, min(40 * size, 40 * r + 43), 50))]
        for r in range(size)
    ]
    whole = torch.randn(1, 2, 40 * size, 50, generator=torch.Generator().manual_seed(0))
    exchanger, own = Exchanger(t, owned, needed), slice(40 * t.rank, 40 * t.rank + 40)
    lo, hi = needed[t.rank][0].lo[2], needed[t.rank][0].hi[2]
    for round_ in range(5):
        local = (whole + round_)[:, :, own].contiguous()
        slots = exchanger.empty_slots(local)
        exchanger.gather(local, slots)
        assert torch.equal(slots[0], (whole + round_)[:, :, lo:hi])
        back = torch.zeros_like(local)
        exchanger.add_back(slots, back)
        times = torch.ones(40)
        times[:3] += t.rank > 0
        times[-3:] += t.rank < size - 1
        assert torch.equal(back, local * times[:, None])
