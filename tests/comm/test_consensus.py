"""Tests of consensus: all ranks act on what one rank finds."""

from __future__ import annotations

import pytest

from pydist.comm import run_local
from pydist.comm.consensus import any_rank, require_same, together
from pydist.data.dataset import BadSample
from pydist.errors import CheckpointError, DataError, UsageError


def meet(world, errors: dict[int, Exception]) -> None:
    """Raises the error of this rank, if any, within `together`."""
    with together(world):
        if world.rank in errors:
            raise errors[world.rank]


def test_an_error_of_one_rank_is_raised_by_all_with_its_class_and_words():
    def body(world):
        with pytest.raises(DataError, match="the file is gone") as caught:
            meet(world, {2: DataError("the file is gone")})
        return caught.value.exit_code, caught.value.on_all_ranks

    assert run_local(body, 3) == [(65, True)] * 3
    assert not DataError("of one rank").on_all_ranks


def test_an_error_of_a_further_class_keeps_its_family_and_exit_code():
    def body(world):
        with pytest.raises(DataError, match="sample 3 is NaN") as caught:
            meet(world, {1: BadSample("sample 3 is NaN")})
        return caught.value.exit_code, isinstance(caught.value, BadSample)

    assert run_local(body, 2) == [(65, False), (65, True)]


def test_of_several_errors_the_lowest_ranks_is_raised():
    def body(world):
        with pytest.raises(CheckpointError, match="from rank 1"):
            meet(world, {1: CheckpointError("from rank 1"), 2: DataError("from rank 2")})

    run_local(body, 3)


def test_without_an_error_the_block_is_passed():
    run_local(lambda world: meet(world, {}), 3)


@pytest.mark.parametrize("asking", [None, 0, 2])
def test_any_rank(asking):
    assert (
        run_local(lambda world: any_rank(world, world.rank == asking), 3)
        == [asking is not None] * 3
    )


def test_ranks_that_differ_are_named_with_both_values():
    def body(world):
        with pytest.raises(UsageError, match=r"seed differs .* 1 on rank 0, 7 on rank 2"):
            require_same(world, {"mesh": "a", "seed": "7" if world.rank == 2 else "1"})
        require_same(world, {"mesh": "a"})

    run_local(body, 3)


def test_what_one_rank_lacks_and_another_order_are_named():
    def body(world):
        mine = {"a": 1} if world.rank == 1 else {"a": 1, "b": 2}
        with pytest.raises(UsageError, match=r"b differs .* 2 on rank 0, absent on rank 1"):
            require_same(world, mine)

    run_local(body, 2)
