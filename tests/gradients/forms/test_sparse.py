"""Deep Gradient Compression against the formulas of its paper, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings as of_hypothesis
from hypothesis import strategies as st
from torch import nn

from pydist import parallelize
from pydist.errors import UsageError
from pydist.gradients import DGC
from pydist.gradients.forms.sparse import largest
from pydist.optim import gradient_state
from support.equivalence import error, on_ranks, randn
from support.training.forms import (
    SHAPES,
    Parameters,
    dgc_of_the_paper,
    group_means,
    momentum_of,
    random_gradients,
    reduced,
    reduced_with_state,
)

GRIDS = [(2, (1, 1, 1)), (3, (1, 1, 1)), (2, (2, 1, 1))]
OPTIONS = [
    {}, {"masking": False}, {"nesterov": True}, {"momentum": 0.0},
    {"nesterov": True, "masking": False},
]  # fmt: skip


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formulas_of_the_paper(options, groups, spatial):
    """With a sample of all elements the threshold is that of the largest ones."""
    given, steps = random_gradients(), 5

    form = DGC(density=0.1, sample=1.0, **options)
    found, state = reduced_with_state(form, given, groups, spatial, steps)
    for i, shape in enumerate(SHAPES):
        gradients = [
            [g[i] for g in group_means(given, groups, spatial[0], step)] for step in range(steps)
        ]
        if len(shape) == 1:  # averaged, then with momentum: as torch's SGD has it
            expected = momentum_of([torch.stack(g).mean(0) for g in gradients], **options)
            for step in range(steps):
                assert error(found[step][i], expected[step]) < 1e-12
            continue
        expected, u, v = dgc_of_the_paper(gradients, 0.1, **options)
        for step in range(steps):
            assert error(found[step][i], expected[step]) < 1e-12
        entry = state["parameters"][f"'all.{i}'"]
        assert error(entry["rest"], torch.stack(v)) < 1e-12
        if options.get("momentum", 0.9):
            assert error(entry["velocity"], torch.stack(u)) < 1e-12


@pytest.mark.parametrize("nesterov", [False, True])
def test_full_density_without_masking_is_momentum_sgd(nesterov):
    given, steps = random_gradients(), 4
    form = DGC(density=1.0, masking=False, nesterov=nesterov)
    found = reduced(form, given, 3, steps=steps)
    for i in range(len(SHAPES)):
        means = [
            torch.stack([g[i] for g in group_means(given, 3, 1, s)]).mean(0) for s in range(steps)
        ]
        for step, expected in enumerate(momentum_of(means, nesterov=nesterov)):
            assert error(found[step][i], expected) < 1e-13


def test_full_density_with_masking_is_plain_sgd():
    given = random_gradients()
    found, dense = reduced(DGC(density=1.0), given, 2, steps=3), reduced("dense", given, 2, steps=3)
    for a, b in zip(found, dense, strict=True):
        for x, y, shape in zip(a, b, SHAPES, strict=True):
            if len(shape) > 1:
                assert error(x, y) < 1e-15


@of_hypothesis(max_examples=15)
@drawn(st.floats(0.001, 1.0), st.integers(2, 3), st.integers(1, 40), st.integers(1, 40),
       st.sampled_from([{"momentum": 0.0}, {"momentum": 0.9}, {"nesterov": True}]))  # fmt: skip
def test_nothing_is_lost(density, groups, rows, columns, options):
    """Without masking the gradients so far and the mean rest are the steps of momentum SGD."""
    shapes, steps = ((rows, columns), (columns,)), 3
    given = random_gradients(shapes)

    def body(mesh):
        form = DGC(density=density, masking=False, **options)
        model = parallelize(Parameters(shapes), mesh, gradients=form)
        total = torch.zeros(rows, columns).double()
        for step in range(steps):
            model.backward(given(mesh.rank, step))
            total += model.take()[0]
        return total, gradient_state(model)

    total, state = on_ranks((1, 1, 1), body, groups)[0]
    of_groups = [group_means(given, groups, 1, step) for step in range(steps)]
    means = [torch.stack([g[0] for g in each]).mean(0) for each in of_groups]
    expected = sum(momentum_of(means, **options))
    found = total + state["parameters"]["'all.0'"]["rest"].mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@of_hypothesis(max_examples=200)
@drawn(st.integers(1, 3000), st.floats(0.0005, 1), st.floats(0.001, 1), st.integers(0, 50),
       st.sampled_from(["normal", "equal", "zero", "few"]))  # fmt: skip
def test_the_sampled_threshold(elements, share, fraction, turn, kind):
    """Enough of the largest elements, no more than wanted, and none twice."""
    sizes = {
        "normal": randn(elements, seed=elements).abs(),
        "equal": torch.ones(elements).double(),
        "zero": torch.zeros(elements).double(),
        "few": torch.where(torch.arange(elements) % 97 == 0, 1.0, 0.0).double(),
    }[kind]
    count = math.ceil(share * elements)
    found = largest(sizes, count, fraction, turn)
    assert len(set(found.tolist())) == found.numel() <= count
    assert found.numel() > 0
    assert torch.equal(found, found.sort().values)
    if found.numel() == count:
        left = sizes.clone()
        left[found] = 0
    if fraction == 1 or count == elements:
        best = sizes.sort(descending=True).values[:count]
        assert torch.equal(sizes[found].sort(descending=True).values, best[: found.numel()])
    if kind == "normal" and elements > 1000 and count > 20:
        assert found.numel() >= 0.3 * count
        assert sizes[found].min() >= 0.3 * sizes.sort().values[-count]


def test_density_of_the_warm_up():
    """A matrix of 1000 elements: a quarter of them, then a hundredth of the first."""
    shapes = ((10, 100),)
    given = random_gradients(shapes)
    form = DGC(density=0.01, warmup=4, densities=(0.25, 0.05))
    found = reduced(form, given, 2, steps=6, shapes=shapes)
    sent = [int((g[0] != 0).sum()) for g in found]
    for count, density in zip(sent, [0.25, 0.25, 0.05, 0.05, 0.01, 0.01], strict=True):
        assert 0.5 * density * 1000 < count <= 2 * density * 1000  # of two groups


def test_fewer_bytes():
    shapes, given = ((100, 100),), random_gradients(((100, 100),), torch.float32)

    def body(mesh):
        model = parallelize(Parameters(shapes, torch.float32), mesh, gradients=DGC(density=0.01))
        model.backward(given(mesh.rank, 0))
        (form,) = model.__dict__["_pydist_entry"].forms
        return form.sent()["between"]

    assert on_ranks((1, 1, 1), body, data=3) == [2 * 100 * (4 + 4)] * 3  # to two groups


def test_bytes_of_two_groups_after_the_warm_up():
    """A thousandth of the elements, positions included, and all of those with one dim."""
    shapes = ((512, 500), (300,))

    def sent(mesh, settings):
        model = parallelize(Parameters(shapes, torch.float32), mesh, gradients=settings)
        (form,) = model.__dict__["_pydist_entry"].forms
        counts = [0]
        for step in range(3):
            model.backward(random_gradients(shapes, torch.float32)(mesh.rank, step))
            counts.append(sum(form.sent().values()))
        return counts[-1] - counts[-2]

    form = DGC(0.001, warmup=2, densities=(0.25,))
    for found, whole in on_ranks((1, 1, 1), lambda m: (sent(m, form), sent(m, "dense")), data=2):
        of_vectors = 4 * 300
        assert whole == 4 * 512 * 500 + of_vectors
        assert found == 8 * 256 + of_vectors
        assert found - of_vectors <= (whole - of_vectors) / 250


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0.0}, r"DGC\(density=0.0\): expected more than 0, at most 1"),
        ({"density": 2}, r"DGC\(density=2\): expected more than 0"),
        ({"momentum": 1.0}, r"DGC\(momentum=1.0\): expected 0 or more, below 1"),
        ({"momentum": 0.0, "nesterov": True}, r"DGC\(nesterov=True\) needs momentum > 0"),
        ({"warmup": 1.5}, r"DGC\(warmup=1.5\): expected a count >= 0"),
        ({"densities": (0.5, 2.0)}, r"DGC\(densities=2.0\): expected more than 0"),
        ({"sample": 0}, r"DGC\(sample=0\): expected more than 0"),
        ({"clip_norm": 0.0}, r"DGC\(clip_norm=0.0\): expected more than 0"),
        ({"clip_norm": "1"}, r"DGC\(clip_norm='1'\): expected more than 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UsageError, match=message):
        DGC(**settings)


def test_one_group_has_no_momentum_of_the_form():
    def body(mesh):
        with pytest.raises(UsageError, match='gradients="dgc" with one sample group'):
            parallelize(nn.Linear(2, 2), mesh, gradients="dgc")
        with pytest.raises(UsageError, match=r"DGC\(clip_norm=1.0\) with one sample group"):
            parallelize(nn.Linear(2, 2), mesh, gradients=DGC(momentum=0.0, clip_norm=1.0))
        parallelize(nn.Linear(2, 2), mesh, gradients=DGC(momentum=0.0))

    on_ranks((2, 1, 1), body)
    on_ranks((1, 1, 1), body)


def test_training_approaches_the_dense_loss():
    """A regression on two groups: a tenth of the elements, momentum in the form alone.

    Masking takes momentum away where elements are sent often: up to plain SGD at full density.
    """
    x, hidden = randn(64, 24, seed=1), randn(24, 16, seed=2)
    y = torch.tanh(x @ hidden)

    def body(mesh):
        losses = []
        forms = DGC(0.1, masking=False, warmup=20), DGC(0.02), DGC(0.02, nesterov=True)
        for settings in ("dense", *forms):
            net = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 16)).double()
            with torch.no_grad():
                for i, p in enumerate(net.parameters()):
                    p.copy_(randn(*p.shape, seed=i) * 0.2)
            model = parallelize(net, mesh, gradients=settings)
            momentum = 0.9 if settings == "dense" else 0.0
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
            rows = slice(32 * mesh.data_index, 32 * (mesh.data_index + 1))
            for _ in range(400):
                optimizer.zero_grad()
                (model(x[rows]) - y[rows]).square().mean().backward()
                optimizer.step()
            losses.append(float((model(x) - y).square().mean().detach()))
        return losses

    dense, *compressed = on_ranks((1, 1, 1), body, data=2)[0]
    first = float(y.square().mean())
    assert dense < 0.1 * first
    for loss, bound in zip(compressed, [0.02, 0.05, 0.05], strict=True):
        assert loss < dense + bound * first
