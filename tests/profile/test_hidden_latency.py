"""Tests that enough computation hides a latency completely in every step.

Clocks of a busy machine can't show that. So the main convolution here ends only when the messages
posted by both ranks have been in flight for the full latency. A rank that still has to wait posted
too late or waits too early.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pydist import Mesh, layout_for_sample, parallelize, run_local
from pydist.backend.conv_kernels import ConvKernels
from support.equivalence import shard
from support.latency import Latency, delayed

LATENCY = 0.02
STEPS = 3
RANKS = 2


class Ledger(Latency):
    """Latency that records the sleep of each receiver."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.slept: list[float] = []
        self.posts: Counter[str] = Counter()
        self.last = 0.0
        self.changed = threading.Condition()

    def send(self, group, source, dest, tag):
        super().send(group, source, dest, tag)
        with self.changed:
            self.posts[threading.current_thread().name] += 1
            self.last = time.perf_counter()
            self.changed.notify_all()

    def receive(self, group, dest, tag, sources):
        sent = [self._sent[group, source, dest, tag][0] for source in sources]
        if sent:
            self.slept.append(max(0.0, max(sent) + self.seconds - time.perf_counter()))
        super().receive(group, dest, tag, sources)

    def compute(self) -> None:
        """Blocks until the messages posted by all ranks so far would have arrived."""
        own = self.posts[threading.current_thread().name]
        with self.changed:
            done = self.changed.wait_for(
                lambda: all(self.posts[f"rank {rank}"] >= own for rank in range(RANKS)), timeout=30
            )
        assert done, "a rank computes before the others have posted"
        time.sleep(max(0.0, self.last + self.seconds - time.perf_counter()))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with delayed(made := Ledger(LATENCY)):
        yield made


def train(channels_last: bool) -> None:
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.randn(1, 4, 8, 6, 6, generator=torch.Generator().manual_seed(0))

    def body(transport) -> None:
        mesh = Mesh(transport, 1, (RANKS, 1, 1))
        model = nn.Sequential(
            nn.Conv3d(4, 8, 3, padding=1), nn.LeakyReLU(inplace=True), nn.Conv3d(8, 8, 3, padding=1)
        )
        net = parallelize(model.to(memory_format=memory_format), mesh)
        for _ in range(STEPS):
            net(shard(x, layout_for_sample(mesh, x.shape))).square().sum().backward()

    run_local(body, RANKS, timeout=100)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_long_enough_convolution_hides_all_of_it(ledger, monkeypatch, channels_last):
    for name in ("run_forward", "run_dgrad"):
        compute = getattr(ConvKernels, name)

        def longer(self, *args, compute=compute):
            result = compute(self, *args)
            ledger.compute()
            return result

        monkeypatch.setattr(ConvKernels, name, longer)
    train(channels_last)
    # Two halos forward and two backward, per rank and step.
    assert ledger.slept == [0.0] * (4 * RANKS * STEPS)


def test_short_ones_do_not(ledger):
    train(False)
    assert any(ledger.slept)
