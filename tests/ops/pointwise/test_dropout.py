"""Dropout, whose mask is a function of the voxel: splits and recomputation don't change it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import distribute_tensor, parallelize
from pydist.errors import NotSupported, UsageError
from pydist.ops.pointwise.keyed import draws_of
from support.equivalence import group_slice, layout_at, on_ranks, randn, shard

SHAPE = (4, 3, 6, 4, 4)
GRIDS = [
    (1, (1, 1, 1)),
    (1, (2, 1, 1)),
    (1, (2, 2, 2)),
    (2, (2, 1, 1)),
    (4, (1, 1, 1)),
    (2, (1, 3, 1)),
]


class Net(nn.Module):
    """Two dropout layers that map ones to their scaled masks."""

    def __init__(self, kind: type[nn.Module] = nn.Dropout, p: float = 0.4) -> None:
        super().__init__()
        self.first, self.second = kind(p), kind(p)

    def forward(self, x):
        return self.first(x), self.second(x)


def masks(data, spatial, *, kind=nn.Dropout, steps=1, seed=0, p=0.4, shape=SHAPE):
    """Returns the global masks of both layers at every step, joined over all sample groups."""

    def body(mesh):
        model = parallelize(Net(kind, p), mesh)
        x = torch.ones(shape, dtype=torch.float64)[group_slice(mesh, shape[0])]
        found = [[y.full_tensor() for y in model(x)] for _ in range(steps)]
        stacked = torch.stack([torch.stack(layers) for layers in found])
        return mesh.data_index, stacked

    by_group = dict(on_ranks(spatial, body, data, seed=seed))
    return torch.cat([by_group[i] for i in sorted(by_group)], 2)


@pytest.fixture(scope="module")
def on_one_rank():
    return masks(1, (1, 1, 1), steps=2)


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_the_mask_is_the_same_under_every_split_and_grouping(data, spatial, on_one_rank):
    assert torch.equal(masks(data, spatial, steps=2), on_one_rank)


@pytest.mark.parametrize(("data", "spatial"), GRIDS[1:4])
@pytest.mark.parametrize("kind", [nn.Dropout3d, nn.Dropout2d], ids=["3d", "2d"])
def test_per_channel(kind, data, spatial):
    whole = masks(1, (1, 1, 1), kind=kind)
    assert torch.equal(masks(data, spatial, kind=kind), whole)
    by_channel = whole.flatten(4)
    assert (by_channel == by_channel[..., :1]).all()
    assert 0 < (by_channel == 0).double().mean() < 1


def test_layers_steps_samples_and_seeds_draw_different_masks(on_one_rank):
    (a, b), (c, d) = on_one_rank
    drawn = [a, b, c, d, masks(1, (1, 1, 1), seed=1)[0, 0]]
    for i, x in enumerate(drawn):
        for y in drawn[:i]:
            agreement = float(((x == 0) == (y == 0)).double().mean())
            assert 0.45 < agreement < 0.6  # 0.4^2 + 0.6^2 = 0.52
    assert not torch.equal(a[0], a[1])


def test_expectation_and_scale(on_one_rank):
    values = on_one_rank.unique()
    torch.testing.assert_close(values, torch.tensor([0, 1 / 0.6]).double(), rtol=1e-6, atol=0)
    kept = on_one_rank.bool().double().mean()
    assert abs(float(kept) - 0.6) < 5 * (0.24 / on_one_rank.numel()) ** 0.5


def test_gradient_is_the_mask():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 6], None, None]))
        y = F.dropout(x, 0.3)
        y.sum().backward()
        return torch.equal(x.grad.to_local() * x.to_local(), y.to_local())

    assert all(on_ranks((2, 1, 1), body))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything_dropped(p, inplace):
    def body(mesh):
        x = distribute_tensor(randn(*SHAPE), mesh)
        assert torch.equal(F.dropout(x, p, True, inplace).full_tensor(), randn(*SHAPE) * (1 - p))

    on_ranks((2, 1, 1), body)


def test_in_place_draws_the_same_numbers():
    def body(mesh):
        model = parallelize(nn.Sequential(nn.Dropout(0.4)), mesh)
        other = parallelize(nn.Sequential(nn.Dropout(0.4, inplace=True)), mesh)
        x = randn(*SHAPE)
        first = model(x).full_tensor()
        draws_of(mesh).forget(mesh.session.forwards)
        mesh.session.forwards -= 1
        sharded = distribute_tensor(x.clone(), mesh)
        assert torch.equal(other(sharded).full_tensor(), first)

    on_ranks((2, 1, 1), body)


def test_evaluation_changes_nothing():
    def body(mesh):
        model = parallelize(Net(), mesh).eval()
        y, _ = model(randn(*SHAPE))
        assert torch.equal(y.full_tensor(), randn(*SHAPE))

    on_ranks((2, 1, 1), body)


def test_one_module_called_twice_draws_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x), self.drop(x)

    def body(mesh):
        a, b = parallelize(Twice(), mesh)(torch.ones(SHAPE))
        assert not torch.equal(a.full_tensor(), b.full_tensor())

    on_ranks((2, 1, 1), body)


def _block(p: float = 0.4) -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 3, 3, padding=1), nn.Dropout(p), nn.LeakyReLU()).double()


class Checkpointed(nn.Module):
    def __init__(self, blocks: list[nn.Module], use: bool) -> None:
        super().__init__()
        self.blocks, self.use = nn.ModuleList(blocks), use

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.use else block(x)
        return x


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1), (2, 2, 2), (8, 1, 1)])
def test_checkpointing_draws_the_same_mask_again(spatial):
    """Blocks may be empty: there are 6 voxels on 8 ranks."""
    blocks = [_block(), _block()]

    def gradients(mesh, use):
        model = parallelize(copy.deepcopy(Checkpointed(blocks, use)), mesh)
        out = []
        for step in range(2):
            model.zero_grad()
            model(randn(*SHAPE, seed=step)).square().mean().backward()
            out += [p.grad.clone() for p in model.parameters()]
        return out

    stored = on_ranks(spatial, lambda mesh: gradients(mesh, use=False))
    again = on_ranks(spatial, lambda mesh: gradients(mesh, use=True))
    for a, b in zip(stored[0], again[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_two_draws_of_one_module_under_checkpointing_are_refused():
    """It is unknown which of the draws runs again."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return checkpoint(lambda v: self.drop(self.drop(v)).square(), x, use_reentrant=False)

    def body(mesh):
        y = parallelize(Shared(), mesh)(randn(*SHAPE).requires_grad_())
        with pytest.raises(NotSupported, match="more than once"):
            y.sum().backward()

    on_ranks((1, 1, 1), body)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_other_probabilities_are_refused(p):
    def body(mesh):
        with pytest.raises(UsageError, match=f"dropout probability {p}"):
            F.dropout(distribute_tensor(randn(*SHAPE), mesh), p)

    on_ranks((1, 1, 1), body)


@pytest.mark.parametrize(
    ("function", "shape"), [(F.dropout1d, (3, 8)), (F.dropout3d, (3, 8, 4, 4))]
)
def test_samples_without_a_batch_are_refused(function, shape):
    """Their first dim holds the channels instead of the batch."""

    def body(mesh):
        x = distribute_tensor(torch.ones(shape), mesh, {1: "depth"})
        with pytest.raises(NotSupported, match="batch"):
            function(x, 0.5, True)

    on_ranks((2, 1, 1), body)


class Random(nn.Module):
    """Module that makes one random call other than dropout."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


DRAWS = {
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha dropout in place": lambda x: F.alpha_dropout(x * 1, 0.3, True, True),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "normal": lambda x: torch.normal(x, x.exp()),
    "sample of a distribution": lambda x: torch.distributions.Normal(x, 2.0).sample(),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "bernoulli(p)": lambda x: x.bernoulli(0.25),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_all_draws_are_the_same_under_every_split(draw):
    def results(data, spatial):
        def body(mesh):
            x = randn(*SHAPE)[group_slice(mesh, SHAPE[0])]
            model = parallelize(Random(draw), mesh)
            return mesh.data_index, torch.stack([model(x).full_tensor() for _ in range(2)])

        by_group = dict(on_ranks(spatial, body, data))
        return torch.cat([by_group[i] for i in sorted(by_group)], 1)

    whole = results(1, (1, 1, 1))
    assert not torch.equal(whole[0], whole[1])
    for data, spatial in GRIDS[1:4]:
        assert torch.equal(results(data, spatial), whole)


def test_moments_of_the_draws():
    """Alpha dropout keeps mean and variance; other draws have their distribution's moments."""

    def body(mesh):
        x = distribute_tensor(randn(2, 8, 16, 16, 16), mesh)
        return [
            (float(y.mean()), float(y.var()))
            for y in (
                F.alpha_dropout(x, 0.4, True),
                torch.randn_like(x),
                torch.normal(1.0, torch.full_like(x, 0.5)),
                torch.rand_like(x),
                x.bernoulli(0.25),
            )
        ]

    expected = [(0, 1), (0, 1), (1, 0.25), (0.5, 1 / 12), (0.25, 0.1875)]
    for found, moments in zip(on_ranks((2, 1, 1), body)[0], expected, strict=True):
        assert found == pytest.approx(moments, abs=0.03)


OF_ONE = DRAWS.keys() - {"feature alpha dropout"}  # which needs channels


@pytest.mark.parametrize("draw", [F.dropout, *(DRAWS[name] for name in sorted(OF_ONE))])
def test_draws_for_one_number(draw):
    def body(mesh):
        x = distribute_tensor(randn(*SHAPE), mesh)
        return draw(x[1, 0, 1, 0, 0]).full_tensor()

    found = on_ranks((2, 1, 1), body)
    assert {t.shape for t in found} == {()}
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_uniform_numbers_are_below_one(dtype):
    def body(mesh):
        x = distribute_tensor(randn(2, 8, 16, 16, 16).to(dtype), mesh)
        drawn = torch.rand_like(x).full_tensor()
        wide = torch.rand_like(x, dtype=torch.float64).full_tensor()
        return drawn.dtype, float(drawn.max()), float(drawn.double().mean()), float(wide.max())

    kind, largest, mean, wide = on_ranks((2, 1, 1), body)[0]
    assert kind == dtype
    assert largest == 1 - torch.finfo(dtype).eps / 2
    assert mean == pytest.approx(0.5, abs=0.01)
    assert 0.99 < wide < 1


DRAWS_THAT_TORCH_REFUSES = {
    "rand_like of integers": lambda x: torch.rand_like(x.long()),
    "randn_like of flags": lambda x: torch.randn_like(x, dtype=torch.bool),
    "normal of a negative deviation": lambda x: torch.normal(x, -x.abs()),
    "normal(-1)": lambda x: torch.normal(x, -1.0),
    "bernoulli of integers": lambda x: torch.bernoulli(x.gt(0).long()),
    "bernoulli of complex numbers": lambda x: x.to(torch.complex64).bernoulli(0.5),
    "bernoulli of logits": torch.bernoulli,
    "bernoulli of nan": lambda x: torch.bernoulli(x * torch.nan),
    "bernoulli(1.5)": lambda x: x.bernoulli(1.5),
    "bernoulli(nan)": lambda x: x.bernoulli(torch.nan),
}


@pytest.mark.parametrize("draw", DRAWS_THAT_TORCH_REFUSES.values(), ids=DRAWS_THAT_TORCH_REFUSES)
def test_draws_that_torch_refuses(draw):
    with pytest.raises(RuntimeError):
        draw(randn(*SHAPE))

    def body(mesh):
        with pytest.raises(RuntimeError, match=r"random numbers of|probabilit|std >= 0"):
            draw(distribute_tensor(randn(*SHAPE), mesh))

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like])
def test_parts_of_complex_draws_are_independent(draw):
    x = randn(2, 8, 16, 16, 16).to(torch.complex128)

    def moments(drawn):
        parts = torch.view_as_real(drawn).view(-1, 2).T
        return [*parts.mean(1).tolist(), *torch.cov(parts).flatten().tolist()]

    found = on_ranks((2, 1, 1), lambda mesh: draw(distribute_tensor(x, mesh)).full_tensor())[0]
    assert moments(found) == pytest.approx(moments(draw(x)), abs=0.02)


def test_rrelu_draws_slopes_between_its_bounds():
    def body(mesh):
        x = distribute_tensor(randn(*SHAPE), mesh).requires_grad_()
        F.rrelu(x, 0.2, 0.4, True).sum().backward()
        slopes, values = x.grad.full_tensor(), randn(*SHAPE)
        assert (slopes[values > 0] == 1).all()
        drawn = slopes[values <= 0]
        assert drawn.min() >= 0.2
        assert drawn.max() <= 0.4
        assert drawn.std() > 0.03

    on_ranks((2, 1, 1), body)
