"""Checks collectives: every root, dtype and slice, order of sums, work that is under way."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import torch
from torch import Tensor

from pydist.comm import Transport
from pydist.comm.interface.reduction import ReduceOp
from support.transports.checks import (
    DTYPES,
    FLOATS,
    INTS,
    Checks,
    equal,
    normal,
    numbers,
    same_on_all_ranks,
)

CHECKS = Checks()


@CHECKS.add
def broadcast_from_every_root(t: Transport) -> None:
    for root in range(t.size):
        for dtype in DTYPES:
            tensor = numbers(t.rank, dtype, 3, 4)
            t.broadcast(tensor, root)
            equal(tensor, numbers(root, dtype, 3, 4))
        t.broadcast(torch.empty(0), root)


@CHECKS.add
def all_gather_every_dtype(t: Transport) -> None:
    for dtype in DTYPES:
        for shape in ((), (0,), (3, 2)):
            rows = t.all_gather(numbers(t.rank, dtype, *shape))
            expected = [numbers(rank, dtype, *shape) for rank in range(t.size)]
            equal(rows, torch.stack(expected))


@CHECKS.add
def all_to_all_of_uneven_and_empty_parts(t: Transport) -> None:
    def part(source: int, dest: int) -> Tensor:
        return numbers(source + 2 * dest, torch.int32, (source + 2 * dest) % 4)

    inputs = [part(t.rank, dest) for dest in range(t.size)]
    outputs = [torch.empty_like(part(source, t.rank)) for source in range(t.size)]
    t.all_to_all(inputs, outputs)
    for source, output in enumerate(outputs):
        equal(output, part(source, t.rank))


def uneven(t: Transport) -> list[int]:
    """Returns slice lengths that differ; one of them is 0."""
    return [(3 * rank + 2) % 5 if rank != 1 else 0 for rank in range(t.size)]


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
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


@CHECKS.add
def half_types_round_once(t: Transport) -> None:
    for dtype, step in ((torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)):
        tensor = torch.tensor([1.0 if t.rank == 0 else step], dtype=dtype)
        t.all_reduce(tensor)
        # Added one by one in `dtype`, each step would round to even, that is, to no change.
        expected = torch.tensor([1 + (t.size - 1) * step]).to(dtype)
        equal(tensor, expected)


@CHECKS.add
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
