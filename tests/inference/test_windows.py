"""Tests of sliding windows: MONAI's result, the same bits on any ranks, and no rank with it all."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pydist.comm import run_local
from pydist.errors import CheckpointError
from pydist.inference.distributed import BoxedVolume
from pydist.inference.results import Results
from pydist.inference.scoring import Scorer
from pydist.inference.source import ArrayImage, ImageFacts, distribute
from pydist.inference.windows import Windows, regions
from pydist.mesh import Mesh
from pydist.parallel import parallelize
from pydist.partition import Box

EXTENTS, WINDOW, CLASSES = (20, 12, 9), (8, 8, 8), 3


class Doubling:
    """Normalizer that doubles values, as a stand-in for one of a data set."""

    dtype = np.dtype("float64")

    def __call__(self, block, first_channel, mean, out) -> bool:
        np.multiply(block, 2.0, out=out)
        return True


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ELU(), nn.Conv3d(4, CLASSES, 1)
    return nn.Sequential(*layers).double().eval()


NETWORKS = {seed: network(seed) for seed in (1, 2)}  # not made by ranks, whose threads share seeds


def image() -> torch.Tensor:
    return torch.rand(2, *EXTENTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def volume(group, whole: torch.Tensor, boxes) -> BoxedVolume:
    box = boxes[group.rank]
    own = whole[(slice(None), *box.slices)]
    return BoxedVolume(group, boxes, own.contiguous())


def gathered(part: BoxedVolume, extents=EXTENTS) -> torch.Tensor | None:
    return part.read([Box((0,) * len(extents), extents), *[None] * (part.group.size - 1)])


def scores(mesh: Mesh, seeds=(1,), overlap=0.4) -> BoxedVolume:
    models = [parallelize(copy.deepcopy(NETWORKS[seed]), mesh) for seed in seeds]
    scorer = Scorer(mesh, models, [Doubling()] * len(seeds), CLASSES, torch.device("cpu"))
    given = volume(mesh.world, image(), regions(EXTENTS, mesh.size))
    return scorer.scores(given, 0.0, Windows(EXTENTS, WINDOW, overlap))


def body(world, data, spatial, **options):
    mesh = Mesh(world, data, spatial)
    found = scores(mesh, **options)
    assert found.local.shape[1:] == found.box.shape
    assert found.local.numel() <= CLASSES * math.prod(EXTENTS) // world.size * 1.5
    return gathered(found)


sides = st.tuples(st.integers(1, 24), st.integers(1, 24)).map(lambda n: (max(n), min(n)))


@settings(deadline=None)
@given(st.lists(sides, min_size=1, max_size=3), st.floats(0, 0.95))
def test_the_weights_of_each_voxel_sum_to_one(pairs, overlap):
    windows = Windows([n for n, _ in pairs], [w for _, w in pairs], overlap)
    if len(windows) > 60:
        return
    total = torch.zeros(windows.extents, dtype=torch.float64)
    whole = Box((0,) * len(pairs), windows.window)
    for number in range(len(windows)):
        weights = windows.weighted(torch.ones(1, *windows.window).double(), number, whole)
        assert (weights > 0).all()
        box = whole.shift(windows.start(number))
        total[box.slices] += weights[0]
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, 12))
def test_regions_cover_a_volume_once(extents, parts):
    count = np.zeros(extents, int)
    boxes = regions(extents, parts)
    for box in boxes:
        count[box.slices] += 1
    assert len(boxes) == parts
    assert (count == 1).all()


def test_it_is_what_monai_computes_and_the_same_bits_on_any_ranks():
    inferers = pytest.importorskip("monai.inferers")
    places = [torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in WINDOW]
    sides = [torch.exp(-0.5 * (p / (0.125 * len(p))) ** 2) for p in places]
    with torch.no_grad():
        expected = inferers.sliding_window_inference(
            2 * image()[None],
            WINDOW,
            1,
            NETWORKS[1],
            overlap=0.4,
            roi_weight_map=torch.einsum("i,j,k->ijk", *sides),
        )[0]
    alone = run_local(lambda world: body(world, 1, (1, 1, 1)), 1)[0]
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-12)
    for data, spatial in ((2, (1, 1, 1)), (5, (1, 1, 1)), (2, (1, 2, 1)), (1, (3, 1, 1))):
        job = lambda world, d=data, s=spatial: body(world, d, s)  # noqa: E731
        found = run_local(job, data * math.prod(spatial), timeout=120)[0]
        if spatial == (1, 1, 1):
            assert torch.equal(found, alone)
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def test_scores_of_several_networks_are_averaged():
    run = lambda *seeds: run_local(lambda w: body(w, 2, (1, 1, 1), seeds=seeds), 2)[0]  # noqa: E731
    torch.testing.assert_close(run(1, 2), (run(1) + run(2)) / 2, rtol=0, atol=1e-12)


def test_a_network_with_other_outputs_is_named():
    def wrong(world):
        mesh = Mesh(world, 2)
        model = parallelize(nn.Conv3d(2, 5, 1).double(), mesh)
        scorer = Scorer(mesh, [model], [Doubling()], CLASSES, torch.device("cpu"))
        given = volume(world, image(), regions(EXTENTS, 2))
        with pytest.raises(CheckpointError, match=r"network 1 of 1 computes \(1, 5, 8, 8, 8\)"):
            scorer.scores(given, 0.0, Windows(EXTENTS, WINDOW, 0.0))

    run_local(wrong, 2)


@pytest.mark.parametrize("ranks", [1, 4])
def test_results_are_on_the_grid_of_the_image(ranks):
    """Scores are padded at the far ends, and resampled; the oracle is torch's interpolation."""
    padded, inner, extents = (8, 12, 8), (7, 9, 8), (15, 6, 8)
    whole = torch.randn(CLASSES, *padded, generator=torch.Generator().manual_seed(0))
    part = whole[(slice(None), *map(slice, inner))]
    expected = F.interpolate(part[None], size=extents, mode="trilinear")[0]

    def job(world):
        given = volume(world, whole, regions(padded, world.size))
        for grid, scores in ((extents, expected), (inner, part)):
            results = Results(given, inner, grid)
            labels = gathered(results.labels(), grid)
            found = [gathered(each, grid) for each in results.probabilities()]
            if world.rank == 0:
                probabilities = torch.cat(found)
                torch.testing.assert_close(probabilities, scores.softmax(0), rtol=0, atol=3e-6)
                torch.testing.assert_close(probabilities.sum(0), torch.ones(grid))
                top = scores.topk(2, 0).values
                clear = top[0] - top[1] > 1e-4
                assert torch.equal(labels[0][clear].long(), scores.argmax(0)[clear])

    run_local(job, ranks)


@pytest.mark.parametrize("kind", [torch.uint16, torch.uint32, torch.uint64, torch.float16])
def test_volumes_of_each_stored_type_are_read(kind):
    whole = torch.arange(2 * math.prod(EXTENTS)).view(2, *EXTENTS).to(kind)

    def body(world):
        return gathered(volume(world, whole, regions(EXTENTS, world.size)))

    found = run_local(body, 3)[0]
    assert found.dtype == kind
    np.testing.assert_array_equal(found.numpy(), whole.numpy())


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_mean_is_that_of_the_image_without_what_windows_add(monkeypatch, ranks):
    """Windows larger than the image repeat its last voxels, as here in slabs of three planes."""
    monkeypatch.setattr("pydist.inference.source._SLAB", 3 * 12 * 12)
    padded, values = (16, 12, 12), np.random.default_rng(0).integers(0, 99, (2, 5, 6, 12))
    values[:, -1] += 900

    def job(world):
        source = ArrayImage(values, "x") if world.rank == 0 else None
        facts = ImageFacts(source, world)
        for extents, expected in (((5, 6, 12), values), ((8, 8, 12), at_least(values, (8, 8)))):
            _, mean = distribute(source, facts, world, regions(padded, ranks), extents, "int16")
            assert mean == pytest.approx(expected.mean(), rel=1e-12)

    run_local(job, ranks)


def at_least(values: np.ndarray, extents: tuple[int, int]) -> np.ndarray:
    """Returns an image with its last voxels repeated."""
    more = [(0, n - m) for n, m in zip(extents, values.shape[1:3], strict=True)]
    return np.pad(values, [(0, 0), *more, (0, 0)], mode="edge")


def test_values_are_added_in_the_order_of_the_ranks_that_give_them():
    numbers = (1e16, 1.0, -1e16, 1.0)
    expected = sum(numbers)
    for order in itertools.permutations(range(4), 2):

        def job(world, order=order):
            boxes = [Box((0,), (0,))] * 4
            boxes[order[0]], boxes[order[1]] = Box((0,), (2,)), Box((2,), (5,))
            given = BoxedVolume.empty(world, boxes, 1, torch.float64)
            values = torch.full((1, 3), numbers[world.rank], dtype=torch.float64)
            given.add([Box((1,), (4,))] * 4, values)
            return gathered(given, (5,))

        assert run_local(job, 4)[0].tolist() == [[0, expected, expected, expected, 0]]
