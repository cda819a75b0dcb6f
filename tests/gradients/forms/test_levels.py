"""Forms in two levels: the torus and hosts equal the dense form, 16 bits follow the formula."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st
from torch import nn

from pydist import ShardedTensor, parallelize
from pydist.errors import NotSupported, UsageError
from pydist.gradients import Hierarchical, Narrow, Torus, buckets
from pydist.gradients.forms.topology import rows_of
from support.equivalence import assert_same, error, on_ranks, randn, whole_of
from support.networks.small import check_use, gradients_of, loss_of, small
from support.training.forms import (
    SHAPES,
    group_means,
    on_hosts,
    random_gradients,
    reduced,
)
from support.training.interrupted import run

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
GRIDS = [(2, (2, 1, 1)), (4, (1, 1, 1)), (3, (1, 1, 1)), (1, (4, 1, 1)), (2, (3, 1, 1))]
EXACT = [(Torus(), None), (Torus(row=1), None), ("hierarchical", (1,)), ("torus", (1,))]


def dense(given, groups, size, step):
    means = group_means(given, groups, size, step)
    return [torch.stack(each).mean(0) for each in zip(*means, strict=True)]


# -- torus and hosts ------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
@pytest.mark.parametrize("settings", ["torus", "hierarchical"])
@pytest.mark.parametrize("hosts", ["one", "even", "uneven"])
def test_exact_forms_are_the_mean(settings, groups, spatial, hosts):
    size = spatial[0]
    ranks = groups * size
    sizes = {"one": [ranks], "even": [1] * ranks, "uneven": [1, ranks - 1]}[hosts]
    given = random_gradients()
    with on_hosts(sizes):
        found = reduced(settings, given, groups, spatial, steps=2)
    for step in range(2):
        for mine, expected in zip(found[step], dense(given, groups, size, step), strict=True):
            assert error(mine, expected) < 1e-12


@of_hypothesis(max_examples=15)
@drawn(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 3), st.booleans())
def test_any_hosts_and_rows(sizes, pick, hierarchical):
    ranks = sum(sizes)
    possible = [n for n in range(1, ranks + 1) if ranks % n == 0]
    settings = Hierarchical() if hierarchical else Torus(row=possible[pick % len(possible)])
    shapes = ((pick + 1, 3), (1,))  # fewer elements than ranks, too
    given = random_gradients(shapes)
    with on_hosts(sizes):
        found = reduced(settings, given, ranks, steps=1, shapes=shapes)
    for mine, expected in zip(found[0], dense(given, ranks, 1, 0), strict=True):
        assert error(mine, expected) < 1e-12


@pytest.mark.parametrize("settings", ["torus", Torus(row=2), "hierarchical"], ids=str)
@pytest.mark.parametrize("hosts", [[2, 2], [3, 3], [4, 4], [1, 3]], ids=str)
def test_whole_numbers_have_the_bits_of_an_all_reduce(settings, hosts):
    """No order of summation rounds them. Rows are hosts, of 2, 3 and 4 ranks, or of 2 ranks."""
    sizes, ranks = (1, 7, 1000, 10**6 + 1), sum(hosts)

    def given(rank, step):
        return [(torch.arange(n) * (3 * rank + 1)).remainder(101).float() for n in sizes]

    with on_hosts(hosts):
        (found,) = reduced(settings, given, ranks, shapes=[(n,) for n in sizes])
    for mine, *terms in zip(found, *(given(rank, 0) for rank in range(ranks)), strict=True):
        assert torch.equal(mine, sum(terms) / ranks)


@pytest.mark.parametrize("settings", ["torus", "hierarchical", "bf16", "powersgd", "dgc"])
def test_a_bucket_without_elements(settings):
    """The first rank is alone on its host, and the others are not."""
    shapes = ((0, 3), (0,))
    with on_hosts([1, 3]):
        found = reduced(settings, random_gradients(shapes), groups=4, steps=2, shapes=shapes)
    assert [[tuple(g.shape) for g in step] for step in found] == [list(shapes)] * 2


def test_the_grid_of_a_torus():
    two_hosts = [[0, 2], [1, 3]]
    assert rows_of(two_hosts, None) == [[0, 2], [1, 3]]  # a row is a host
    assert rows_of([[0, 1, 2, 3]], None) == [[0, 1], [2, 3]]
    assert rows_of([[0, 1, 2], [3]], None) == [[0, 1], [2, 3]]
    assert rows_of([[0], [1], [2], [3], [4], [5]], None) == [[0, 1], [2, 3], [4, 5]]
    assert rows_of([list(range(7))], None) == [[i] for i in range(7)]
    assert rows_of([[0, 1, 2, 3]], 4) == [[0, 1, 2, 3]]
    with pytest.raises(UsageError, match=r"Torus\(row=3\): 4 ranks .* possible are 1, 2, 4"):
        rows_of([[0, 1, 2, 3]], 3)


@pytest.mark.parametrize("settings", ["torus", "hierarchical", "bf16"])
def test_bytes_of_a_step(settings):
    """A rank of a 2 x 2 grid sends n bytes along each axis, and between hosts only once in two."""

    def body(mesh):
        model = parallelize(nn.Linear(64, 64, bias=False).float(), mesh, gradients=settings)
        model(torch.ones(1, 64)).sum().backward()
        (form,) = model.__dict__["_pydist_entry"].forms
        return form.sent()

    size = 64 * 64 * 4
    with on_hosts([2, 2]):
        found = on_ranks((2, 1, 1), body, data=2)
    if settings == "torus":  # a reduce-scatter and an all-gather of halves; an all-reduce of one
        assert found == [{"within": size, "between": size // 2}] * 4
    elif settings == "bf16":
        assert found == [{"within": size, "between": size // 4}] * 4
    else:
        first, second = {"within": size, "between": size}, {"within": size, "between": 0}
        assert found == [first, second] * 2


# -- 16 bits --------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "spatial"), [(2, (1, 1, 1)), (3, (1, 1, 1)), (2, (2, 1, 1))])
@pytest.mark.parametrize("name", DTYPES)
def test_sixteen_bits_follow_the_formula(name, groups, spatial):
    """Round each group's mean, add in fp32, divide, round: to the bit where the mean is exact."""
    narrow = DTYPES[name]
    given = random_gradients(dtype=torch.float32)
    found = reduced(name, given, groups, spatial, steps=2)
    for step in range(2):
        means = group_means(given, groups, spatial[0], step)
        for mine, each in zip(found[step], zip(*means, strict=True), strict=True):
            sent = [m.float().to(narrow) for m in each]
            expected = sum(s.float() for s in sent) / groups
            expected = expected.to(narrow).float()
            assert mine.dtype == torch.float32
            if spatial[0] == 1:
                torch.testing.assert_close(mine, expected, rtol=0, atol=0)
            assert error(mine, expected) < torch.finfo(narrow).eps


@pytest.mark.parametrize("name", DTYPES)
def test_sixteen_bits_of_one_group_are_dense(name):
    given = random_gradients()
    found = reduced(name, given, 1, (2, 1, 1))
    for mine, other in zip(found[0], reduced("dense", given, 1, (2, 1, 1))[0], strict=True):
        assert torch.equal(mine, other)


def test_sums_do_not_overflow_and_single_values_do():
    """60000 + 60000 fits, as the mean does; 70000 does not fit in fp16, and does in bf16."""
    shapes = ((3, 2),)

    def given(rank, step):
        return [torch.full((3, 2), 60000.0 if step == 0 else 70000.0)]

    found = reduced("fp16", given, 2, steps=2, shapes=shapes)
    assert torch.equal(found[0][0], torch.full((3, 2), 60000.0))
    assert torch.isinf(found[1][0]).all()
    found = reduced("bf16", given, 2, steps=2, shapes=shapes)
    assert error(found[1][0], torch.full((3, 2), 70000.0)) < 2**-8


@pytest.mark.parametrize("settings", ["fp16", "bf16", "torus", "hierarchical"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_reaches_all_ranks(settings, bad):
    def given(rank, step):
        gradients = [randn(*s, seed=rank).float() for s in SHAPES]
        if rank == 1:
            gradients[0][2, 3] = bad
        return gradients

    with on_hosts([2, 2]):
        found = reduced_anywhere(settings, given)
    for rank in found:
        assert not torch.isfinite(rank[0][0][2, 3])
        assert torch.isfinite(rank[0][0]).sum() == rank[0][0].numel() - 1


def reduced_anywhere(settings, given):
    from support.training.forms import reduce_given

    return on_ranks((2, 1, 1), lambda mesh: reduce_given(settings, mesh, given), data=2)


# -- programs -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ["torus", "hierarchical"])
def test_accumulation_and_clipping_as_one_device(settings):
    def use(model, mesh):
        if mesh is None:
            loss_of(model, mesh, 0).backward()
        else:
            with model.no_sync():
                loss_of(model, mesh, 0).backward()
        loss_of(model, mesh, 1).backward()
        loss_of(model, mesh, 2).backward()  # adds to reduced gradients
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return gradients_of(model)

    expected = use(small(), None)
    with on_hosts([1, 3]):
        everyones = on_ranks(
            (2, 1, 1), lambda m: use(parallelize(small(), m, gradients=settings), m), data=2
        )
    for found in everyones:
        for mine, one in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", ["bf16", "torus"])
def test_a_parameter_without_a_gradient_keeps_none(settings):
    def body(mesh):
        model = parallelize(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), mesh,
                            gradients=settings)  # fmt: skip
        model[0](torch.ones(2, 3)).sum().backward()
        return [p.grad is None for p in model.parameters()]

    assert on_ranks((1, 1, 1), body, data=2) == [[False, False, True, True]] * 2


@pytest.mark.parametrize(
    "settings", ["bf16", "fp16", "torus", Torus(row=4), "hierarchical"], ids=str
)
def test_channels_last_weights_and_slices(settings):
    """Rows are in the order of memory; sharded weights are reduced over ranks with one slice.

    A slice is on two of the four ranks, which have no rows of four.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1))
    model = model.to(memory_format=torch.channels_last_3d)
    x = randn(2, 2, 6, 6, 6).float()
    whole = copy.deepcopy(model)
    whole(x).square().mean().backward()

    def body(mesh):
        own = parallelize(copy.deepcopy(model), mesh, sharded_weights=True, gradients=settings)
        rows = slice(mesh.data_index, mesh.data_index + 1)
        own(x[rows]).square().mean().backward()
        return [getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in own.parameters()]

    with on_hosts([1, 3]):
        everyones = on_ranks((1, 1, 1), body, data=2, axes={"channel": 2})
    for found in everyones:
        for mine, p in zip(found, whole.parameters(), strict=True):
            assert error(mine, p.grad) < {"bf16": 2**-7, "fp16": 2**-10}.get(settings, 1e-5)


@pytest.mark.parametrize("settings", ["torus", "hierarchical"])
@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [1, 1, 2]], ids=str)
@pytest.mark.parametrize(
    "program", ["b n r0 b s", "n r2 b s b", "b r2:1 z b s", "r2:0 b s", "b r0 h b s", "r1 r2 b s"]
)
def test_gradients_after_a_backward_that_raised(settings, sizes, program, monkeypatch):
    """Ranks have begun different numbers of buckets, and hosts have different numbers of ranks."""
    monkeypatch.setattr(buckets, "ALONE_BYTES", 1)
    try:
        expected = run(program, None, 2, shared=False)
    except NotSupported:
        expected = None

    def body(mesh):
        try:
            return run(program, mesh, 2, shared=False, form=settings)
        except NotSupported as error:
            return str(error)

    with on_hosts(sizes):
        everyones = on_ranks((2, 1, 1), body, data=2)
    dense = on_ranks((2, 1, 1), lambda mesh: refusal(program, mesh), data=2)
    for found, refused in zip(everyones, dense, strict=True):
        assert isinstance(found, str) == (refused is not None)
        if refused is None:
            assert_same(found, expected, where=program)
        else:
            assert found == refused


def refusal(program, mesh):
    """Returns the error of the dense form, as of programs that only one device can run."""
    try:
        run(program, mesh, 2, shared=False)
    except NotSupported as error:
        return str(error)
    return None


# -- refusals -------------------------------------------------------------------------------


def test_no_such_form():
    def body(mesh):
        with pytest.raises(UsageError, match="gradients='fp8'; possible are dense, fp16, bf16"):
            parallelize(small(), mesh, gradients="fp8")
        with pytest.raises(UsageError, match="possible are fp16, bf16"):
            Narrow("fp8")
        with pytest.raises(UsageError, match=r"Torus\(row=0\): expected a count >= 1"):
            Torus(row=0)

    on_ranks((1, 1, 1), body, data=2)


def test_ranks_with_different_forms():
    def body(mesh):
        with pytest.raises(UsageError, match="gradients differs between the ranks"):
            parallelize(small(), mesh, gradients="fp16" if mesh.rank else "bf16")

    on_ranks((1, 1, 1), body, data=2)


def test_a_model_that_one_form_refuses_has_another():
    def made():
        model = nn.Conv3d(2, 3, 3).double()
        nn.init.constant_(model.weight, 0.1)
        nn.init.zeros_(model.bias)
        model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex128))
        return model

    def gradients(model, x):
        pooled = whole_of(model(x).mean((2, 3, 4)))
        (pooled * model.phase).abs().square().mean().backward()
        return [p.grad for p in model.parameters()]

    def body(mesh):
        model, first = made(), 2 * mesh.data_index
        with pytest.raises(NotSupported, match=r"'phase', of torch\.complex128"):
            parallelize(model, mesh, gradients="fp16")
        return gradients(parallelize(model, mesh), x[first : first + 2])

    x = randn(4, 2, 4, 4, 4)
    expected = gradients(made(), x)
    for found in on_ranks((2, 1, 1), body, data=2):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "dtype", "kind"),
    [
        (Torus(row=3), torch.float64, UsageError),
        ("torus", torch.complex128, NotSupported),
        ("fp16", torch.complex128, NotSupported),
        ("hierarchical", torch.complex128, NotSupported),
    ],
    ids=str,
)
def test_a_form_is_refused_before_weights_are_cut(settings, dtype, kind):
    def body(mesh):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.phase = nn.Parameter(torch.ones(3, dtype=dtype))
        with pytest.raises(kind, match=r"have no rows of 3|'phase', of torch\.complex128"):
            parallelize(model, mesh, gradients=settings, sharded_weights=True)
        parallelize(model, mesh, sharded_weights=True)
        assert isinstance(model[0].weight, ShardedTensor)

    with on_hosts([2, 2]):
        on_ranks((1, 1, 1), body, data=2, axes={"channel": 2})


def test_a_partitioned_optimizer():
    from pydist.optim import sharded

    def body(mesh):
        model = parallelize(small(), mesh, gradients="bf16")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(NotSupported, match=r'gradients="bf16" with pydist\.optim\.sharded'):
            sharded(optimizer, model, "always")

    on_ranks((1, 1, 1), body, data=2)


def test_auto_leaves_the_optimizer_as_it_is(monkeypatch):
    from pydist.optim import partitioned, sharded

    monkeypatch.setattr(partitioned, "WORTHWHILE", 1)

    def body(mesh):
        model = parallelize(small(), mesh, gradients="bf16")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return sharded(optimizer, model) is optimizer

    assert on_ranks((1, 1, 1), body, data=2) == [True, True]


def test_dense_is_as_before():
    check_use(small, lambda model, mesh: (loss_of(model, mesh).backward(), gradients_of(model))[1])
