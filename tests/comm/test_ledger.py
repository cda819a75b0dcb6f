"""Tests of ranks whose calls differ: the error comes at the call and names both calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pydist import Mesh, distribute_tensor, owner, parallelize
from pydist.comm import Transport, run_local
from pydist.comm.interface import board, ledger
from pydist.comm.interface.ledger import STAMP_BYTES
from pydist.errors import UsageError
from pydist.exchange.exchanger import Exchanger
from pydist.optim import sharded
from pydist.partition import Box

DIFFERENT = "the ranks make different calls"
_DRAWING = threading.Lock()
"""Lock around drawing: all threads, here ranks, share one random sequence of torch."""


def network(*, kernel: int = 3, padding: int = 1, swapped: bool = False) -> nn.Sequential:
    with _DRAWING:
        torch.manual_seed(0)
        middle: list[nn.Module] = [nn.InstanceNorm3d(4), nn.Conv3d(4, 4, 3, padding=1)]
        first = nn.Conv3d(2, 4, kernel, padding=padding)
        last = nn.Conv3d(4, 2, 1)
    if swapped:
        middle.reverse()
    return nn.Sequential(first, *middle, nn.AvgPool3d(3, 2, 1), last)


def samples(mesh: Mesh, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return distribute_tensor(torch.randn(1, 2, 8, 6, 6, generator=generator).to(dtype), mesh)


def forward(model: nn.Module, mesh: Mesh) -> Tensor:
    """Runs a model without parallelize, which could not broadcast parameters of unequal shapes."""
    for path, module in model.named_modules():
        module.__dict__["_pydist_path"] = path
    return model(samples(mesh))


def of_another_kernel(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    forward(network(kernel=3 + 2 * (t.rank == 1), padding=1 + (t.rank == 1)), mesh)


def of_another_padding(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    forward(network(padding=1 - (t.rank == 1)), mesh)


def of_another_order(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    forward(network(swapped=t.rank == 1), mesh)


def of_another_dtype(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    x, wide = samples(mesh), samples(mesh, torch.float64)
    nn.functional.max_pool3d(wide if t.rank == 1 else x, 3, 1, 1)


def with_another_call(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    model = parallelize(network(), mesh)
    for step in range(4):
        y = model(samples(mesh))
        if step == 2 and t.rank == 1:
            y.max()  # e.g. to print it on one rank
        y.sum().backward()


def with_a_call_that_was_made_before(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    model = parallelize(network(), mesh)
    for step in range(4):
        y = model[:3](samples(mesh))
        if step == 2 and t.rank == 1:
            y = model[2](y)
        model[3:](y).sum().backward()


def with_evaluation_on_one_rank(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    model = parallelize(network(), mesh)
    for step in range(4):
        model.train(step != 2 or t.rank == 0)
        model(samples(mesh)).sum().backward()


def with_a_weight_frozen_on_one_rank(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    model = parallelize(network(), mesh)
    for step in range(3):
        model[2].weight.requires_grad_(step == 0 or t.rank == 0)
        model(samples(mesh)).sum().backward()


def with_the_state_of_a_shared_step_on_one_rank(t: Transport) -> None:
    mesh = Mesh(t, spatial=(t.size, 1, 1))
    model = parallelize(network(), mesh)
    optimizer = sharded(torch.optim.Adam(model.parameters()), model, "always")
    for _ in range(3):
        model(samples(mesh)).sum().backward()
        optimizer.step()
        if t.rank == 0:
            optimizer.state_dict()


def with_another_collective(t: Transport) -> None:
    for _ in range(3):
        t.all_reduce(torch.ones(4))
    t.all_reduce(torch.ones(4), "max" if t.rank == 1 else "sum")


DIFFERENCES: dict[str, tuple[Callable[[Transport], None], str]] = {
    "kernel": (of_another_kernel, r"shape \(4, 2, 5, 5, 5\)"),
    "padding": (of_another_padding, r"conv3d\(1, 1, 1, 1, 1, 1.*\) in module 0 on rank 0"),
    "order": (of_another_order, "InstanceNorm3d"),
    "dtype": (of_another_dtype, "float64"),
    "another call": (with_another_call, "all_reduce"),
    "a known call": (with_a_call_that_was_made_before, "Conv3d"),
    "evaluation": (with_evaluation_on_one_rank, "forward"),
    "frozen": (with_a_weight_frozen_on_one_rank, "comparison of a frozen parameter"),
    "state": (
        with_the_state_of_a_shared_step_on_one_rank,
        r"state_dict\(\) of a partitioned optimizer on rank 0",
    ),
    "collective": (with_another_collective, "all_reduce of 4 elements of float32, max on rank 1"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_both_calls_are_named(name: str) -> None:
    body, named = DIFFERENCES[name]
    with pytest.raises(UsageError, match=f"{DIFFERENT}.*{named}") as caught:
        run_local(body, 2, timeout=30)
    assert " on rank 0" in str(caught.value)
    assert " on rank 1" in str(caught.value)


@pytest.mark.parametrize("spatial", [1, 2])
def test_training_and_evaluation_are_named_over_sample_groups(spatial: int) -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, data=2, spatial=(spatial, 1, 1))
        model = parallelize(network(), mesh)
        for step in range(3):
            model.train(step != 2 or mesh.data_index == 0)
            model(samples(mesh)).sum().backward()

    with pytest.raises(UsageError, match=DIFFERENT) as caught:
        run_local(body, 2 * spatial, timeout=30)
    said = str(caught.value).split(" and batch sizes")
    (training,) = [each for each in said if "of a forward in training" in each]
    (evaluation,) = [each for each in said if "of a forward in evaluation mode" in each]
    assert any(training.endswith(f" on rank {rank}") for rank in range(spatial))
    assert any(evaluation.endswith(f" on rank {rank}") for rank in range(spatial, 2 * spatial))


def test_groups_name_ranks_of_the_job() -> None:
    def body(t: Transport) -> None:
        group = t.split(t.rank // 2, t.rank)
        if t.rank >= 2:
            group.all_reduce(torch.ones(t.rank))

    with pytest.raises(UsageError, match=r"float32, sum on rank [23] and .* on rank [23]"):
        run_local(body, 4, timeout=30)


def test_plans_of_one_shape_are_told_apart() -> None:
    def body(t: Transport) -> None:
        owned = [Box([4 * rank, 0], [4 * rank + 4, 2]) for rank in range(t.size)]
        needed = [[box] for box in owned]
        needed[7] = [owned[t.rank // 4]]  # more blocks than an error shows
        x = torch.ones(4, 2)
        exchanger = Exchanger(t, owned, needed)
        exchanger.gather(x, exchanger.empty_slots(x))

    with pytest.raises(UsageError, match=r"takes .*blocks that are not shown\) on rank"):
        run_local(body, 8, timeout=30)


def test_any_neighbor_of_three_ranks_notices() -> None:
    def body(t: Transport) -> None:
        t.barrier()
        t.all_reduce(torch.ones(2 + (t.rank == 2)))

    with pytest.raises(UsageError, match=f"{DIFFERENT}.*all_reduce of 3 elements"):
        run_local(body, 3, timeout=30)


@pytest.fixture
def no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the board, as if the ranks were on different machines."""
    monkeypatch.setattr(board, "_make", lambda: ("", None))


@pytest.mark.parametrize("name", ["kernel", "padding", "dtype"])
@pytest.mark.usefixtures("no_board")
def test_between_machines_what_is_called_first_is_compared_by_messages(name: str) -> None:
    with pytest.raises(UsageError, match=DIFFERENT):  # which rank notices depends on timing
        run_local(DIFFERENCES[name][0], 2, timeout=30)


@pytest.mark.usefixtures("no_board")
def test_between_machines_a_message_of_another_exchange_is_noticed() -> None:
    with pytest.raises(UsageError, match=f"{DIFFERENT}.*Conv3d"):
        run_local(with_a_call_that_was_made_before, 2, timeout=30)


def test_gradients_of_another_count_are_noticed_before_backward_returns() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, data=t.size)
        model = parallelize(nn.Sequential(nn.Linear(3, 2)), mesh)
        world = mesh.world
        for step in range(3):
            loss = model(torch.ones(2, 3)).sum()
            if step == 2 and t.rank == 1:
                world.all_reduce_async(torch.ones(1))
            loss.backward()

    with pytest.raises(UsageError, match=f"{DIFFERENT}.*all_reduce_async"):
        run_local(body, 2, timeout=30)


@pytest.mark.usefixtures("no_board")
def test_known_calls_that_fit_each_other_are_noticed_before_gradients_are_used() -> None:
    """Devices on several machines have no board, and their messages no stamps."""
    used: list[tuple[int, int]] = []

    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(t.size, 1, 1))
        model = parallelize(network(), mesh)
        hooked = model[4].weight
        hooked.register_post_accumulate_grad_hook(lambda _: used.append((t.rank, step)))
        for step in range(5):
            y = model(samples(mesh))
            kind = "a" if step % 2 == 0 or (step == 3 and t.rank == 0) else "b"
            t.ledger.note(t, (kind,), waits=True)  # two calls with equal messages
            y.sum().backward()

    with pytest.raises(UsageError, match=DIFFERENT):
        run_local(body, 2, timeout=30)
    assert sorted(used) == [(rank, step) for rank in range(2) for step in range(3)]


def test_a_healthy_step_sends_stamps_and_no_other_message(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    compare = ledger.Ledger._compare
    monkeypatch.setattr(
        ledger.Ledger, "_compare", lambda self, group: compared.append(1) or compare(self, group)
    )

    def body(t: Transport) -> list[int]:
        mesh = Mesh(t, spatial=(t.size, 1, 1))
        model = parallelize(network(), mesh)
        counts = []
        for _ in range(4):
            before = t.ledger.count
            model(samples(mesh)).sum().backward()
            counts.append(t.ledger.count - before)
        return counts

    (first, *others), second = run_local(body, 2, timeout=30)
    assert second == [first, *others]
    assert others[1] == others[2] > 5
    assert not compared  # ranks of one machine read boards


def test_stamps_fit_into_messages_of_every_dtype() -> None:
    assert all(STAMP_BYTES % dtype.itemsize == 0 for dtype in (torch.float64, torch.bfloat16))

    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(2, 2, 1))
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
            x = torch.arange(2 * 7 * 5 * 3).to(dtype).view(1, 2, 7, 5, 3)
            pooled = nn.functional.max_pool3d(distribute_tensor(x, mesh), 3, 1, 1).full_tensor()
            assert torch.equal(pooled, nn.functional.max_pool3d(x, 3, 1, 1))

    run_local(body, 4, timeout=30)


def test_boards_leave_no_files() -> None:
    def body(t: Transport) -> None:
        t.split(t.rank % 2, 0).barrier()

    run_local(body, 4, timeout=30)
    assert not list(Path("/dev/shm").glob(f"pydist-{owner.tag()}-board-*"))
