"""Tests of ranks as threads: the contract, failing ranks, and ranks that wait in a circle."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

import pytest
import torch

from pydist.comm import LocalTransport, Transport, run_local
from pydist.errors import RankFailed, RankLost, UsageError
from support.latency import Latency, delayed
from support.transports.checks import Check
from support.transports.contract import CHECKS


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, size: int) -> None:
    run_local(check, size)


def _channel(t: Transport) -> None:
    peer = 1 - t.rank
    channel = t.channel([(peer, torch.ones(3))], [(peer, torch.zeros(3))], tag=7)
    channel.start()
    channel.wait()


def _send_around(t: Transport) -> None:
    t.send(torch.ones(1), 1 - t.rank)
    t.recv(torch.zeros(1), 1 - t.rank)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_with_latency(check: Check) -> None:
    with delayed(Latency(1e-4)):
        run_local(check, 3)


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(lambda t: t.all_reduce(torch.zeros(1)), id="all_reduce"),
        pytest.param(lambda t: t.barrier(), id="barrier"),
        pytest.param(_channel, id="channel"),
        pytest.param(_send_around, id="send"),
        pytest.param(lambda t: t.split(0, t.rank).barrier(), id="subgroup"),
    ],
)
def test_nothing_arrives_before_the_latency_is_over(exchange) -> None:
    def body(t: Transport) -> tuple[float, float]:
        began = time.perf_counter()
        exchange(t)
        return began, time.perf_counter()

    with delayed(Latency(0.05)):
        times = run_local(body, 2)
    (began, over), (other_began, other_over) = times
    assert over - other_began >= 0.05
    assert other_over - began >= 0.05


def test_latency_elapses_while_a_rank_works(monkeypatch) -> None:
    """Latency counts from the send: a rank that is busy for longer does not wait."""
    slept: dict[int, list[float]] = {}
    sleep = time.sleep

    def noted_sleep(seconds: float) -> None:
        slept.setdefault(threading.get_ident(), []).append(seconds)
        sleep(seconds)

    def body(t: Transport) -> list[float]:
        channel = t.channel([(1 - t.rank, torch.ones(1))], [(1 - t.rank, torch.zeros(1))], tag=0)
        work = t.all_reduce_async(torch.ones(1))
        channel.start()
        t.barrier()  # all messages were sent one latency ago
        mine = slept[threading.get_ident()]
        mine.clear()
        channel.wait()
        work.wait()
        return mine

    monkeypatch.setattr(time, "sleep", noted_sleep)
    with delayed(Latency(0.02)):
        assert run_local(body, 2) == [[0.0, 0.0]] * 2


def test_results_come_in_rank_order_and_arguments_are_passed_on() -> None:
    def body(t: Transport, factor: int, *, offset: int) -> int:
        time.sleep(0.01 * (t.size - t.rank))
        return t.rank * factor + offset

    assert run_local(body, 4, 10, offset=1) == [1, 11, 21, 31]


def test_64_ranks() -> None:
    def body(t: Transport) -> float:
        total = torch.tensor([float(t.rank)])
        for _ in range(20):
            t.all_reduce(total, "max")
        return total.item()

    assert run_local(body, 64) == [63.0] * 64


@pytest.mark.parametrize(
    "blocked",
    [
        lambda t: t.barrier(),
        lambda t: t.recv(torch.zeros(1), 1),
        lambda t: t.all_reduce_async(torch.zeros(1)).wait(),
        lambda t: t.channel([], [(1, torch.zeros(1))], tag=0).wait(),
        lambda t: t.split(0, 0),
    ],
)
def test_a_rank_that_raises_releases_the_others(blocked) -> None:
    seen: list[RankFailed] = []

    def body(t: Transport) -> None:
        if t.rank == 1:
            time.sleep(0.05)
            raise ZeroDivisionError("by rank 1")
        try:
            blocked(t)
        except RankFailed as error:
            seen.append(error)
            raise

    with pytest.raises(ZeroDivisionError, match="by rank 1") as caught:
        run_local(body, 3)
    assert len(seen) == 2
    assert all("rank 1 failed: ZeroDivisionError: by rank 1" in str(error) for error in seen)
    if hasattr(caught.value, "__notes__"):
        assert caught.value.__notes__ == ["raised on rank 1"]


def test_calls_after_a_failure_raise_too() -> None:
    released = threading.Event()

    def body(t: Transport) -> None:
        if t.rank == 1:
            raise ValueError("first")
        released.wait(0.2)
        t.send(torch.zeros(1), 1)

    with pytest.raises(ValueError, match="first"):
        run_local(body, 2)


def test_abort_is_a_failure_of_all_ranks() -> None:
    def body(t: Transport) -> None:
        if t.rank == 0:
            t.abort("enough", 71)
        t.barrier()

    with pytest.raises(RankFailed, match="enough"):
        run_local(body, 3)


def test_a_circle_of_waits_is_reported_at_once() -> None:
    def body(t: Transport) -> None:
        t.recv(torch.zeros(1), (t.rank + 1) % t.size, tag=4)

    start = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1: receives 4 bytes from rank 2, tag 4"):
        run_local(body, 3, timeout=30)
    assert time.monotonic() - start < 5


def test_waiting_for_a_rank_that_has_ended_is_reported() -> None:
    def body(t: Transport) -> None:
        if t.rank != 1:
            t.all_reduce(torch.zeros(5, dtype=torch.bfloat16))

    with pytest.raises(RankLost, match=r"rank 1: has ended") as caught:
        run_local(body, 3, timeout=30)
    assert "all_reduce of 5 elements of bfloat16, sum" in str(caught.value)


def test_a_single_rank_can_not_wait_for_itself() -> None:
    with pytest.raises(RankLost, match="deadlock"):
        LocalTransport().recv(torch.zeros(1), 0)


def test_a_rank_that_stays_busy_is_named() -> None:
    free = threading.Event()

    def body(t: Transport) -> None:
        if t.rank == 2:
            free.wait(20)
        else:
            t.barrier()

    try:
        with pytest.raises(RankLost, match=r"after 0.2 s .* rank 0 .*, rank 1 .*, rank 2 "):
            run_local(body, 3, timeout=0.2)
    finally:
        free.set()


def test_different_collectives_are_named() -> None:
    def body(t: Transport) -> None:
        t.all_reduce(torch.zeros(3 + t.rank))

    with pytest.raises(UsageError) as caught:
        run_local(body, 2)
    for rank in (0, 1):  # whichever came first
        named = f"all_reduce of {3 + rank} elements of float32, sum on rank {rank}"
        assert named in str(caught.value)


def test_different_byte_counts_are_named() -> None:
    def body(t: Transport) -> None:
        if t.rank == 0:
            t.send(torch.zeros(2), 1)
        else:
            t.recv(torch.zeros(3), 0)

    with pytest.raises(UsageError, match="rank 1 expects 12 bytes from rank 0, tag 0, and got 8"):
        run_local(body, 2)


def test_modes_of_the_caller_hold_in_the_ranks() -> None:
    def body(_: Transport) -> tuple[bool, bool, torch.dtype | None]:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtype

    assert run_local(body, 2) == [(True, False, None)] * 2
    with torch.no_grad():
        assert run_local(body, 2) == [(False, False, None)] * 2
    with torch.inference_mode():
        assert run_local(body, 2) == [(False, True, None)] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_local(body, 2) == [(True, False, torch.bfloat16)] * 2


def test_backward_runs_on_the_threads_of_the_ranks() -> None:
    def body(t: Transport) -> list[float]:
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(lambda grad: t.all_reduce(grad) or grad)
        (weight * t.rank).sum().backward()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert run_local(body, 4) == [[6.0, 6.0]] * 4


def test_buffers_of_a_collective_outlive_a_rank_that_does_not_wait_for_it() -> None:
    buffers: list[weakref.ref[torch.Tensor]] = []

    def body(t: Transport) -> torch.Tensor | None:
        out = torch.zeros(2)
        if t.rank == 0:
            buffers.append(weakref.ref(out.untyped_storage()))
            t.all_gather_async(torch.ones(1), out)
            return None
        for thread in threading.enumerate():
            if thread.name == "rank 0":
                thread.join()
        assert buffers[0]() is not None, "this rank writes into freed memory"
        t.all_gather_async(torch.ones(1), out).wait()
        return out

    assert run_local(body, 2)[1].tolist() == [1, 1]


@pytest.mark.parametrize(
    "reason", ["socket: Too many open files", "Too many communicators (0/2048)"]
)
def test_a_group_that_is_one_too_many(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def refused(_: LocalTransport, members: Sequence[int]) -> Transport:
        del members
        raise RuntimeError(reason)

    monkeypatch.setattr(LocalTransport, "_subgroup", refused)
    with pytest.raises(
        UsageError, match=r"no further group .*\(too many [a-z ]*\): each mesh keeps"
    ):
        LocalTransport().split(0, 0)
    reason = "another one"
    with pytest.raises(RuntimeError, match=r"^another one$"):
        LocalTransport().split(0, 0)
