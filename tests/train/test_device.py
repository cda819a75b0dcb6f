"""Tests of device and transport: one decision of all ranks, logged at the start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pydist import runtime
from pydist.comm import LocalTransport, run_local
from pydist.comm.transports.nccl import device_assignment
from pydist.comm.transports.nccl.device_assignment import FoundDevices
from pydist.train import device, log
from support.training.runs import alone, events

FIRST, SECOND = (
    FoundDevices("", "n07", 2, "GPU-a", 22705),
    FoundDevices("", "n07", 2, "GPU-b", 22705),
)
NONE = FoundDevices("torch 2.13 sees no GPU", "n08", 0)
HIDDEN = FoundDevices("pydist was built without CUDA kernels", "n08", 4)


def first_of_two() -> LocalTransport:
    """Returns a transport that acts as the first of two ranks."""
    world = LocalTransport()
    world.size = 2
    return world


def decided(monkeypatch: pytest.MonkeyPatch, found: list[FoundDevices]) -> tuple[str, str]:
    """Returns the transport that "auto" chooses, and why it uses no devices."""
    worlds = {"host": first_of_two(), "nccl": LocalTransport()}
    real = runtime.connect
    monkeypatch.setattr(runtime, "_worlds", {})
    monkeypatch.setattr(runtime, "_declined", [])
    monkeypatch.setattr(runtime, "connect", lambda name: worlds.get(name) or real(name))
    monkeypatch.setattr(device_assignment, "find_devices", lambda host, local_rank: found)
    monkeypatch.setenv(device_assignment.SHARE_VARIABLE, "1")
    world = runtime._join_auto(None)
    return next(name for name, each in worlds.items() if each is world), runtime.why_no_devices()


@pytest.mark.parametrize(
    ("found", "transport", "reason"),
    [
        ([FIRST, SECOND], "nccl", ""),
        ([NONE, NONE], "host", ""),
        ([FIRST, NONE], "host", "rank 1 on n08: torch 2.13 sees no GPU"),
        ([NONE, SECOND], "host", "rank 0 on n08: torch 2.13 sees no GPU"),
        ([HIDDEN, HIDDEN], "host", "rank 0 on n08: pydist was built without CUDA kernels"),
        (
            [FIRST, replace(FIRST, version=23000)],
            "host",
            "the version of NCCL differs between the ranks",
        ),
        ([replace(FIRST, version=23000)] * 2, "host", "2 ranks on n07 for 1 GPU (ranks 0, 1 would"),
    ],
)
def test_auto_takes_devices_where_every_rank_has_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch, found: list[FoundDevices], transport: str, reason: str
) -> None:
    """Permission to share a device (set in the environment here) does not make "auto" do so."""
    taken, why = decided(monkeypatch, found)
    assert taken == transport
    assert why.startswith(reason)
    assert bool(why) == bool(reason)


def test_alone_no_transport_is_needed_for_a_device() -> None:
    assert runtime.connect("auto") is runtime.connect("host")
    assert runtime.why_no_devices() == ""


def test_why_a_device_is_not_used_is_the_same_on_all_ranks(monkeypatch) -> None:
    """Only one rank has a device, and each rank has another obstacle."""
    monkeypatch.setattr(device, "present", lambda: ranks.pop(0))

    def body(world) -> tuple[str, str]:
        return device.why_unused("auto", world), device.why_unused("cpu", world)

    ranks = [0, 0, 0, 0]
    assert run_local(body, 2) == [("", "")] * 2
    ranks = [0, 3, 0, 3]
    found = run_local(body, 2)
    assert found[0] == found[1]
    assert found[0][0]
    assert found[0][1] == 'train.device is "cpu"'
    ranks = [1]
    told = device.facts_of_run(torch.device("cpu"), "cpu", "off", LocalTransport(), "--device")
    assert told["unused_device"] == '--device is "cpu"'


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to use")
def test_a_run_begins_with_device_transport_and_precision(config, monkeypatch) -> None:
    monkeypatch.setattr(device, "present", lambda: 1)
    once = replace(config, train=replace(config.train, steps=1, validate_every=0))
    alone(once)
    start = next(log.read(config.output.folder / "log.jsonl"))
    assert start["event"] == "start"
    told = [start[name] for name in ("device", "transport", "precision", "unused_device")]
    assert told[:3] == ["cpu", "local", "fp32"]
    assert told[3].startswith(f"torch {torch.__version__} finds no CUDA device")


@pytest.mark.parametrize(("amp", "known"), [("off", False), ("bf16", True), ("bf16", False)])
def test_a_run_says_that_mixed_precision_slows_it_down(config, monkeypatch, amp, known) -> None:
    monkeypatch.setattr(device, "onednn_has", lambda dtype: known)
    train = replace(config.train, steps=1, validate_every=0, device="cpu", amp=amp)
    alone(replace(config, train=train))
    notices = [event["text"] for event in events(config, "notice")]
    slow = 'no instructions for convolutions in bf16: amp = "off" is faster'
    assert any(slow in text for text in notices) == (amp == "bf16" and not known)
