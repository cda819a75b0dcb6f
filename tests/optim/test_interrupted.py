"""Tests of gradients after a caught error in backward: equal to torch's, or refused by name."""

from __future__ import annotations

import pytest

import pydist.gradients.buckets
from pydist.errors import NotSupported
from support.equivalence import assert_same, on_ranks
from support.training.interrupted import SIZES, run

PROGRAMS = [
    "b r0 b s", "b r2 Z b s", "b n r0 b s", "n r2 b s b", "r0 n b s", "b r2 z b s", "r0 Z s b",
    "b R2 b s", "b n R0 z n b s", "b s r2 g b s", "b r4 s b", "b n r2 r0 b h s", "r0 z s b s",
    "r0 Z b r2 b s",
]  # fmt: skip
SOME = PROGRAMS[:5]

either = pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared"])


@either
@pytest.mark.parametrize("grid", [(1, (2, 1, 1)), (3, (1, 1, 1)), (2, (2, 1, 1))], ids=str)
@pytest.mark.usefixtures("sizes")
def test_as_in_torch(grid, shared):
    """Exchanges begun before the error are neither lost nor counted twice, cleared or not."""
    data, spatial = grid
    programs = PROGRAMS if data == 1 else SOME
    expected = {each: run(each, None, data, shared=False) for each in programs}

    def body(mesh):
        for each in programs:
            found = run(each, mesh, data, shared=shared)
            assert_same(found, expected[each], where=each)

    on_ranks(spatial, body, data)


REFUSED = {
    "b r2 s": r"backward\(\).* that raised",
    "r0 s": r"backward\(\).* that raised",
    "r0 h b": r"that raised",
    "b r2:1 b": r"added to on some ranks only by a backward\(\) that raised.*zero_grad",
}


@either
@pytest.mark.parametrize("program", REFUSED)
def test_what_is_refused(program, shared, monkeypatch):
    """Covers steps with rank-local gradients, changes in flight, and ranks that raise elsewhere."""
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", 1)

    def body(mesh):
        with pytest.raises(NotSupported, match=REFUSED[program]):
            run(program, mesh, 2, shared=shared)

    on_ranks((1, 1, 1), body, 2)


@either
def test_gradients_that_are_cleared_on_all_ranks_may_differ(shared):
    program = "b r2:1 z b s"
    expected = run("b r2 z b s", None, 2, shared=False)

    def body(mesh):
        assert_same(run(program, mesh, 2, shared=shared), expected)

    on_ranks((1, 1, 1), body, 2)
    assert SIZES[2][0] != SIZES[2][1]
