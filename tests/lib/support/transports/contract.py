"""Checks the contract of every transport: a list of functions that all its ranks call."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pydist.comm import Transport
from pydist.comm.interface.reduction import ReduceOp
from pydist.errors import UsageError

Check = Callable[[Transport], None]
CHECKS: list[Check] = []

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def numbers(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns small integers that differ by rank and position, exact in every dtype."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    values = (torch.arange(count) * 3 + rank * 5 + 1) % 7
    return (values % 2 if dtype == torch.bool else values).to(dtype).reshape(shape)


def normal(generator: torch.Generator, count: int) -> Tensor:
    """Draws random numbers that are equal on every device."""
    values = torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(torch.get_default_device())


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def same_on_all_ranks(t: Transport, tensor: Tensor) -> None:
    rows = t.all_gather_bytes(
        tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    )
    assert all(row == rows[0] for row in rows)


@check
def send_and_recv_every_dtype_and_shape(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for dtype in DTYPES:
        for shape in ((), (0,), (5,), (2, 0, 3), (2, 3, 4)):
            t.send(numbers(t.rank, dtype, *shape), after)
            received = torch.empty(shape, dtype=dtype)
            t.recv(received, before)
            equal(received, numbers(before, dtype, *shape))


@check
def sends_are_buffered(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    big = torch.full((1 << 20,), float(t.rank))
    for _ in range(2):
        t.send(big, after, tag=3)  # every rank sends before any receives
        big += t.size
    received = torch.empty_like(big)
    for round_ in range(2):
        t.recv(received, before, tag=3)
        equal(received, torch.full_like(received, before + round_ * t.size))


@check
def sends_take_any_strides(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    parts = [lambda x: x[:, 1:2], lambda x: x.permute(2, 0, 1), lambda x: x[:, :, ::2]]
    for part in parts:
        values = numbers(t.rank, torch.float32, 2, 3, 4)
        t.send(part(values), after)
        values.zero_()
        expected = part(numbers(before, torch.float32, 2, 3, 4))
        received = torch.empty(expected.shape)
        t.recv(received, before)
        equal(received, expected)


@check
def lent_tensors_arrive_after_the_sender_has_forgotten_them(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    parts = [lambda x: x, lambda x: x.permute(2, 0, 1), lambda x: x[:, :, ::2], lambda x: x[:0]]
    for part in parts:
        lent = numbers(t.rank, torch.float32, 64, 64, 64)
        t.send(part(lent), after, lender=lent)
        del lent
        received = torch.empty(part(torch.empty(64, 64, 64)).shape)
        t.recv(received, before)
        equal(received, part(numbers(before, torch.float32, 64, 64, 64)))


@check
def messages_keep_their_order_and_tags_apart(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for number in range(3):
        for tag in (0, 32767):
            t.send(torch.tensor([t.rank, tag, number]), after, tag)
    for tag in (32767, 0):  # not in the order of sending
        for number in range(3):
            received = torch.empty(3, dtype=torch.int64)
            t.recv(received, before, tag)
            assert received.tolist() == [before, tag, number]


@check
def a_rank_can_send_to_itself(t: Transport) -> None:
    for number in range(2):
        t.send(torch.tensor([t.rank, number]), t.rank, tag=9)
    for number in range(2):
        received = torch.empty(2, dtype=torch.int64)
        t.recv(received, t.rank, tag=9)
        assert received.tolist() == [t.rank, number]


@check
def a_channel_repeats_with_new_contents(t: Transport) -> None:
    peers = range(t.size)  # including this rank
    sends = [(peer, torch.empty(2 + peer, 2)) for peer in peers]
    sends += [(peer, torch.empty(1)) for peer in peers]  # a second message to the same peer
    recvs = [(peer, torch.empty(2 + t.rank, 2)) for peer in peers]
    recvs += [(peer, torch.empty(1)) for peer in peers]
    channel = t.channel(sends, recvs, tag=7)
    for round_ in range(3):
        for index, (peer, buffer) in enumerate(sends):
            buffer.fill_(1000 * round_ + 100 * (index >= t.size) + 10 * t.rank + peer)
        channel.start()
        channel.wait()
        for index, (peer, buffer) in enumerate(recvs):
            expected = 1000 * round_ + 100 * (index >= t.size) + 10 * peer + t.rank
            equal(buffer, torch.full_like(buffer, expected))
    channel.close()
    channel.close()


@check
def channels_overlap_and_carry_empty_messages(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    received = [torch.empty(3), torch.empty(3)]
    empty = torch.empty(0)
    channels = [
        t.channel(
            [(after, torch.full((3,), float(t.rank + 10 * tag))), (after, empty)],
            [(before, received[tag]), (before, empty)],
            tag,
        )
        for tag in (0, 1)
    ]
    for channel in channels:
        channel.start()
    t.barrier()
    for channel in reversed(channels):
        channel.wait()
    for tag in (0, 1):
        assert received[tag].tolist() == [before + 10 * tag] * 3
    t.channel([], [], tag=5).start()


@check
def broadcast_from_every_root(t: Transport) -> None:
    for root in range(t.size):
        for dtype in DTYPES:
            tensor = numbers(t.rank, dtype, 3, 4)
            t.broadcast(tensor, root)
            equal(tensor, numbers(root, dtype, 3, 4))
        t.broadcast(torch.empty(0), root)


@check
def gather_to_every_root(t: Transport) -> None:
    for root in range(t.size):
        rows = t.gather(numbers(t.rank, torch.bfloat16, 2, 3), root)
        if t.rank == root:
            assert rows is not None
            for rank, row in enumerate(rows):
                equal(row, numbers(rank, torch.bfloat16, 2, 3))
        else:
            assert rows is None


@check
def scatter_from_every_root(t: Transport) -> None:
    for root in range(t.size):
        parts = [numbers(rank + root, torch.float64, 5) for rank in range(t.size)]
        out = torch.empty(5, dtype=torch.float64)
        t.scatter(parts if t.rank == root else None, out, root)
        equal(out, numbers(t.rank + root, torch.float64, 5))


@check
def all_gather_every_dtype(t: Transport) -> None:
    for dtype in DTYPES:
        for shape in ((), (0,), (3, 2)):
            rows = t.all_gather(numbers(t.rank, dtype, *shape))
            expected = [numbers(rank, dtype, *shape) for rank in range(t.size)]
            equal(rows, torch.stack(expected))


@check
def all_to_all_of_uneven_and_empty_parts(t: Transport) -> None:
    def part(source: int, dest: int) -> Tensor:
        return numbers(source + 2 * dest, torch.int32, (source + 2 * dest) % 4)

    inputs = [part(t.rank, dest) for dest in range(t.size)]
    outputs = [torch.empty_like(part(source, t.rank)) for source in range(t.size)]
    t.all_to_all(inputs, outputs)
    for source, output in enumerate(outputs):
        equal(output, part(source, t.rank))


@check
def reduce_scatter_sums_slices(t: Transport) -> None:
    for dtype in (*FLOATS, *INTS):
        result = t.reduce_scatter(numbers(t.rank, dtype, t.size, 3))
        slices = [numbers(rank, dtype, t.size, 3)[t.rank] for rank in range(t.size)]
        equal(result, torch.stack(slices).to(torch.float64).sum(0).to(dtype))


def uneven(t: Transport) -> list[int]:
    """Returns slice lengths that differ; one of them is 0."""
    return [(3 * rank + 2) % 5 if rank != 1 else 0 for rank in range(t.size)]


@check
def started_reduce_scatters_of_uneven_slices(t: Transport) -> None:
    counts = uneven(t)
    for dtype in (*FLOATS, *INTS, torch.bool):
        source = numbers(t.rank, dtype, sum(counts))
        kept = source.clone()
        out = torch.empty(counts[t.rank], dtype=dtype)
        work = t.reduce_scatter_async(source, out, counts)
        work.wait()
        work.wait()
        rows = torch.stack([numbers(rank, dtype, sum(counts)) for rank in range(t.size)])
        equal(out, rows.to(torch.float64).sum(0).to(dtype).split(counts)[t.rank])
        equal(source, kept)


@check
def reduce_scatters_in_many_pieces_with_a_mean(t: Transport) -> None:
    """Several are in flight; the first slice is longer than any message of a transport."""
    counts = [700_001, *([1001] * (t.size - 1))]
    works, results = [], []
    for dtype in FLOATS:
        rows = [
            numbers(rank, dtype, 1009).repeat(sum(counts) // 1009 + 1) for rank in range(t.size)
        ]
        rows = [row[: sum(counts)] for row in rows]
        out = torch.empty(counts[t.rank], dtype=dtype)
        works.append(t.reduce_scatter_async(rows[t.rank], out, counts, divisor=t.size))
        slices = [row.split(counts)[t.rank] for row in rows]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        results.append((rows, out, (sum(each.to(wide) for each in slices) / t.size).to(dtype)))
    t.progress()
    for work in works if t.rank % 2 else reversed(works):
        work.wait()
        t.progress()
    for _, out, mean in results:
        equal(out, mean)


@check
def reduce_scatters_may_be_asked_whether_they_are_done(t: Transport) -> None:
    """Some transports can't report it; one that can finishes without `wait`."""
    counts = [400_000, *([10] * (t.size - 1))]
    rows = [numbers(rank, torch.float32, sum(counts)) for rank in range(t.size)]
    out = torch.empty(counts[t.rank])
    work = t.reduce_scatter_async(rows[t.rank], out, counts)
    if t.size > 1 and t.name == "mpi":
        while not work.done():
            t.progress()
    t.barrier()
    work.wait()
    equal(out, sum(row.split(counts)[t.rank] for row in rows))


@check
def started_all_gathers_of_uneven_slices(t: Transport) -> None:
    counts = uneven(t)
    for dtype in DTYPES:
        expected = torch.cat([numbers(rank, dtype, count) for rank, count in enumerate(counts)])
        mine = numbers(t.rank, dtype, counts[t.rank])
        apart = torch.zeros(sum(counts), dtype=dtype)
        t.all_gather_async(mine, apart, counts).wait()
        equal(apart, expected)
        in_place = torch.zeros(sum(counts), dtype=dtype)
        slot = in_place.split(counts)[t.rank]
        slot.copy_(mine)
        t.all_gather_async(slot, in_place, counts).wait()
        equal(in_place, expected)
    equal_slices = torch.empty(t.size, 2)
    t.all_gather_async(torch.full((2,), float(t.rank)), equal_slices).wait()
    assert equal_slices.tolist() == [[float(rank)] * 2 for rank in range(t.size)]


@check
def buffers_outlive_work_that_nobody_waits_for(t: Transport) -> None:
    """Checks that bytes still arrive after a rank drops its work, as when a forward pass raises."""
    memory = np.zeros(t.size)
    alive = weakref.ref(memory)
    if t.rank > 0:
        t.recv(torch.zeros(1), 0)  # not before rank 0 has dropped its own
    work = t.all_gather_async(torch.ones(1, dtype=torch.float64), torch.from_numpy(memory))
    if t.rank == 0:
        del memory, work
        gc.collect()
        assert t.size == 1 or alive() is not None
        for peer in range(1, t.size):
            t.send(torch.ones(1), peer)
    else:
        work.wait()
        assert memory.tolist() == [1.0] * t.size


@check
def all_kinds_of_collectives_may_be_under_way_together(t: Transport) -> None:
    """Checks works that start in one order and are awaited in another, with `progress` between."""
    works, results = [], []
    for i in range(3):
        numbers_of = [numbers(rank + i, torch.float32, t.size, 5000) for rank in range(t.size)]
        total = torch.stack(numbers_of).sum(0)
        reduced = numbers_of[t.rank].clone()
        works.append(t.all_reduce_async(reduced))
        results.append((reduced, total))
        mine = torch.empty(5000)
        works.append(t.reduce_scatter_async(numbers_of[t.rank], mine))
        results.append((mine, total[t.rank]))
        gathered = torch.empty(t.size, 5000)
        works.append(t.all_gather_async(total[t.rank].clone(), gathered))
        results.append((gathered, total))
    t.progress()
    order = list(range(len(works)))
    for index in order if t.rank % 2 else reversed(order):
        works[index].wait()
        t.progress()
    for found, expected in results:
        equal(found, expected)
    t.progress()


@check
def slices_that_are_put_together_have_the_bits_of_the_sum_that_all_get(t: Transport) -> None:
    """Only groups of two ranks guarantee it: larger ones may add in another order."""
    generator = torch.Generator().manual_seed(t.rank)
    pair = t.split(t.rank // 2, t.rank)
    for dtype in FLOATS:
        mine = normal(generator, pair.size * 1003).to(dtype)
        own = torch.empty(1003, dtype=dtype)
        pair.reduce_scatter_async(mine, own).wait()
        together = pair.all_gather(own).flatten()
        pair.all_reduce(mine)
        equal(together, mine)
    pair.close()
    t.barrier()


@check
def all_reduce_every_dtype_and_op(t: Transport) -> None:
    for dtype in (*FLOATS, *INTS):
        rows = torch.stack([numbers(rank, dtype, 2, 5) for rank in range(t.size)])
        results: dict[ReduceOp, Tensor] = {
            "sum": rows.to(torch.float64).sum(0).to(dtype),
            "max": rows.amax(0),
            "min": rows.amin(0),
        }
        for op, expected in results.items():
            tensor = numbers(t.rank, dtype, 2, 5)
            t.all_reduce(tensor, op)
            equal(tensor, expected)
    t.all_reduce(torch.empty(0))


@check
def all_reduce_of_bool_is_any_and_all(t: Transport) -> None:
    mine = torch.tensor([True, False, t.rank == 0])
    results: dict[ReduceOp, list[bool]] = {
        "sum": [True, False, True],
        "max": [True, False, True],
        "min": [True, False, t.size == 1],
    }
    for op, expected in results.items():
        tensor = mine.clone()
        t.all_reduce(tensor, op)
        assert tensor.tolist() == expected


@check
def extrema_propagate_nan_to_all_ranks(t: Transport) -> None:
    for root in range(t.size):
        for op in ("max", "min"):
            for dtype in FLOATS:
                tensor = torch.tensor([float(t.rank), 1.0], dtype=dtype)
                if t.rank == root:
                    tensor[1] = float("nan")
                t.all_reduce(tensor, op)
                assert tensor[0] == (t.size - 1 if op == "max" else 0)
                assert tensor[1].isnan()


@check
def sums_have_the_same_bits_on_all_ranks(t: Transport) -> None:
    generator = torch.Generator().manual_seed(t.rank)
    for dtype in FLOATS:
        for count in (1, 3, 1000, 70_001):
            mine = normal(generator, count).to(dtype)
            blocking, started = mine.clone(), mine.clone()
            t.all_reduce(blocking)
            same_on_all_ranks(t, blocking)
            t.all_reduce_async(started).wait()
            same_on_all_ranks(t, started)
            exact = t.all_gather(mine).to(torch.float64).sum(0)
            bound = 8 * torch.finfo(dtype).eps * t.all_gather(mine).abs().double().sum(0)
            assert ((blocking.double() - exact).abs() <= bound).all()


@check
def sums_of_integers_wrap(t: Transport) -> None:
    """Values that cancel modulo 2**64 sum to 0, which comparisons of hashes rely on."""
    share = (1 << 62) + 12_345
    last = -share * (t.size - 1)
    for started in (False, True):
        mine = share if t.rank else (last + (1 << 63)) % (1 << 64) - (1 << 63)
        tensor = torch.tensor([mine, t.rank])
        if started:
            t.all_reduce_async(tensor).wait()
        else:
            t.all_reduce(tensor)
        assert tensor.tolist() == [0, t.size * (t.size - 1) // 2]


@check
def half_types_round_once(t: Transport) -> None:
    for dtype, step in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        tensor = torch.tensor([1.0 if t.rank == 0 else step], dtype=dtype)
        t.all_reduce(tensor)
        # Added one by one in `dtype`, each step would round to even, that is, to no change.
        expected = torch.tensor([1 + (t.size - 1) * step]).to(dtype)
        equal(tensor, expected)


@check
def asynchronous_reductions_may_be_waited_for_in_any_order(t: Transport) -> None:
    tensors = [numbers(t.rank + i, dtype, 100) for i, dtype in enumerate(FLOATS * 2)]
    expected = [
        torch.stack([numbers(rank + i, dtype, 100).double() for rank in range(t.size)]).sum(0)
        for i, dtype in enumerate(FLOATS * 2)
    ]
    works = [t.all_reduce_async(tensor) for tensor in tensors]
    t.barrier()  # other collectives may come between
    order = list(range(len(works)))
    for index in order if t.rank % 2 else reversed(order):
        works[index].wait()
        works[index].wait()
    for tensor, total in zip(tensors, expected, strict=True):
        equal(tensor, total.to(tensor.dtype))


@check
def barrier_waits_for_the_last_rank(t: Transport) -> None:
    arrival = torch.zeros(1, dtype=torch.float64)
    if t.rank == t.size - 1:
        time.sleep(0.05)
        arrival[0] = time.monotonic()  # all processes of a machine share the clock
    t.barrier()
    left = time.monotonic()
    t.broadcast(arrival, t.size - 1)
    assert left >= arrival.item()


@check
def split_makes_independent_groups(t: Transport) -> None:
    part = t.split(color=t.rank % 2, key=-t.rank)
    members = [rank for rank in reversed(range(t.size)) if rank % 2 == t.rank % 2]
    assert part.size == len(members)
    assert members[part.rank] == t.rank
    rows = part.all_gather(torch.tensor(t.rank))
    assert rows.tolist() == members
    # Groups run at different speeds; their messages do not match those of the parent.
    for _ in range(1 + t.rank % 2):
        total = torch.tensor([float(t.rank)])
        part.all_reduce(total)
        assert total.item() == sum(members)
    t.send(torch.tensor([1]), (t.rank + 1) % t.size, tag=4)
    part.send(torch.tensor([2]), (part.rank + 1) % part.size, tag=4)
    received = torch.empty(1, dtype=torch.int64)
    part.recv(received, (part.rank - 1) % part.size, tag=4)
    assert received.item() == 2
    t.recv(received, (t.rank - 1) % t.size, tag=4)
    assert received.item() == 1
    alone = part.split(color=part.rank, key=0)
    assert (alone.rank, alone.size) == (0, 1)
    part.close()
    part.close()
    t.barrier()


@check
def byte_strings_of_any_length(t: Transport) -> None:
    for root in range(t.size):
        for data in (b"", b"a", bytes(range(256)) * 5):
            assert t.broadcast_bytes(data if t.rank == root else None, root) == data
    rows = t.all_gather_bytes(b"\0x" * t.rank)
    assert rows == [b"\0x" * rank for rank in range(t.size)]


@check
def gradients_do_not_notice(t: Transport) -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        t.broadcast(weight)
        t.all_reduce(weight)
    rows = t.all_gather(weight)
    assert not rows.requires_grad
    assert rows.tolist() == [[float(t.size)] * 3] * t.size


@check
def wrong_arguments_are_named(t: Transport) -> None:
    cases: list[tuple[str, Callable[[], object]]] = [
        ("not contiguous", lambda: t.all_reduce(torch.zeros(3, 4).t())),
        ("not contiguous", lambda: t.recv(torch.zeros(4, 2)[:, 0], 0)),
        (f"rank {t.size} is outside", lambda: t.broadcast(torch.zeros(1), t.size)),
        ("rank -1 is outside", lambda: t.recv(torch.zeros(1), -1)),
        ("tag 32768 is outside", lambda: t.send(torch.zeros(1), 0, tag=1 << 15)),
        ("op 'mean' is none of", lambda: t.all_reduce(torch.zeros(1), "mean")),  # type: ignore[arg-type]
        (
            "the max of torch.complex64",
            lambda: t.all_reduce(torch.zeros(1, dtype=torch.complex64), "max"),
        ),
        ("complex64 can't be sent", lambda: t.all_gather(torch.zeros(1, dtype=torch.complex64))),
        ("must begin with the number of ranks", lambda: t.reduce_scatter(torch.zeros(t.size + 1))),
        ("inputs for", lambda: t.all_to_all([], [])),
        ("do not fit counts", lambda: t.all_gather_async(torch.zeros(2), torch.zeros(t.size))),
        (
            "do not fit counts",
            lambda: t.reduce_scatter_async(torch.zeros(3), torch.zeros(1), [1] * (t.size + 1)),
        ),
        (
            "is not contiguous",
            lambda: t.channel([(0, torch.zeros(2, 2).t())], [], tag=0),
        ),
    ]
    for message, call in cases:
        with pytest.raises(UsageError, match=message):
            call()
    t.barrier()  # refused before any message was sent: the ranks are still in step
