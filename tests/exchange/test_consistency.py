"""Tests of the one message after backward: its comparisons, and that all ranks get the error."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from pydist import Mesh, distribute_tensor, parallelize
from pydist.comm import Transport, run_local
from pydist.comm.interface import board
from pydist.errors import UsageError
from pydist.exchange.consistency import consistency_of


class Shift(nn.Module):
    """Layer that adds a plain tensor."""

    shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.full((4, 1, 1, 1), self.shift)


def train(mesh: Mesh, change) -> str:
    """Trains a network for four steps, with `change(model, step)` before each.

    Returns:
        The step and the error that ends training.
    """
    model = parallelize(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), Shift()), mesh)
    x = distribute_tensor(torch.ones(mesh.data_size, 1, 6, 4, 4), mesh)
    for step in range(1, 5):
        change(model, step)
        try:
            model(x).square().mean().backward()
        except UsageError as error:
            return f"step {step}: {error}"
    return ""


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (3, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 2)])
def test_a_proof_is_zero_where_the_ranks_of_each_group_agree_and_nowhere_else(shape) -> None:
    def body(t: Transport) -> tuple[dict[tuple[str, ...], int], dict[tuple[str, ...], list]]:
        mesh = Mesh(t, data=shape[0], spatial=shape[1:])
        weights = consistency_of(mesh)._weights
        return weights, {axes: mesh.grid.groups(axes) for axes in weights}

    size = shape[0] * shape[1] * shape[2] * shape[3]
    weights, groups = zip(*run_local(body, size), strict=True)
    values = torch.randint(-(2**62), 2**62, (2,), generator=torch.Generator().manual_seed(0))
    low, high = values.tolist()
    for axes, ranks in groups[0].items():
        for said in itertools.product((low, high), repeat=size):
            proof = sum(weights[rank][axes] * said[rank] for rank in range(size)) % 2**64
            agree = all(len({said[rank] for rank in group}) == 1 for group in ranks)
            assert (proof == 0) == agree, (axes, said)


def test_ranks_of_other_groups_learn_that_an_operand_differs_in_one() -> None:
    def body(t: Transport) -> str:
        mesh = Mesh(t, data=2, spatial=(2, 1, 1))

        def change(model: nn.Sequential, step: int) -> None:
            model[1].shift = float(mesh.data_index + (t.rank == 3 and step == 3))

        return train(mesh, change)

    first, *others = run_local(body, 4, timeout=30)
    assert others == [first] * 3
    assert first.startswith("step 3: a plain tensor of shape (4, 1, 1, 1)")
    assert "differs between the ranks 2 and 3" in first


def test_ranks_of_other_groups_learn_that_a_call_differs_in_one(monkeypatch) -> None:
    monkeypatch.setattr(board, "_make", lambda: ("", None))  # as between machines

    def body(t: Transport) -> str:
        mesh = Mesh(t, data=2, spatial=(2, 1, 1))

        def change(model: nn.Sequential, step: int) -> None:
            if t.rank == 1 and step == 3:
                mesh.data.ledger.note(mesh.data, ("a call of one rank",), waits=False)

        return train(mesh, change)

    first, *others = run_local(body, 4, timeout=30)
    assert others == [first] * 3
    assert first.startswith("step 3: the ranks make different calls")
    assert "nothing on rank 1" not in first
    assert "a call of one rank on rank" in first


def test_a_backward_ends_with_one_message_between_all_ranks() -> None:
    def body(t: Transport) -> str:
        mesh = Mesh(t, data=t.size)
        model = parallelize(nn.Linear(3, 2), mesh)
        for _ in range(3):
            loss = model(torch.ones(2, 3)).sum()
            before = t.ledger.count
            loss.backward()
            made = t.ledger.count - before
        return t.ledger.last_calls(made)

    # The proof, flags of news and of the lane, and two elements each for weight and bias.
    expected = "all_reduce of 7 elements of int64, sum in backward"
    assert run_local(body, 3, timeout=30) == [expected] * 3
