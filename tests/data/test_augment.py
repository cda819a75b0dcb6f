"""Tests of augmentation by blocks: each split has the sample of the whole volume's change."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage

from pydist.data import Augmented, AugmentOptions
from pydist.data.augment.draws import SampleDraws
from pydist.data.augment.warp import Elastic, Warp
from pydist.data.loader import Loader
from pydist.errors import UsageError
from pydist.partition import Box
from support.equivalence import on_ranks

ALL = AugmentOptions(
    crop=(6, 7, 6), angle=40.0, zoom=(0.7, 1.4), shear=0.2, translation=0.2, elastic=2.0,
    elastic_spacing=5.0, flip=("depth", "height", "width"), rotate=0.7, probability=0.5,
    probabilities={"angle": 0.2, "zoom": 0.2, "shear": 0.1, "translation": 0.1, "elastic": 0.2},
    noise=0.3, blur=(0.2, 1.5), scale=0.25, contrast=0.3, shift=0.5, low_resolution=0.4,
    inverted_gamma=(0.7, 1.5), gamma=(0.7, 1.5),
)  # fmt: skip


class Volumes:
    """Samples in memory whose labels number the voxels; float64."""

    num_targets = 0
    labeled = True
    dtype = torch.float64
    identity = "volumes"

    def __init__(self, *extents: int) -> None:
        self.sample_shape: Any = (2, *extents)
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(4, *self.sample_shape, generator=generator).double()
        self.labels = torch.arange(self.inputs[0, 0].numel()).view(extents)

    def __len__(self) -> int:
        return len(self.inputs)

    def shape_of(self, index: int) -> Any:
        return self.sample_shape

    def read_block(self, index: int, box: Box, out: Any = None) -> Any:
        return self.inputs[index][box.slices]

    def read_labels(self, index: int, box: Box, out: Any = None) -> Any:
        return self.labels[box.slices]


def changed(data: Volumes, epoch: int, **options: Any) -> torch.Tensor:
    """Returns the first sample with changes that always happen."""
    source = Augmented(data, AugmentOptions(probability=1, **options), 5)
    return source.in_epoch(epoch).read_block(0)


def test_blocks_are_those_of_the_whole_augmented_sample():
    source = Augmented(Volumes(9, 8, 7), ALL, 3)
    numbers = np.random.default_rng(0)
    seen = set()
    for epoch in range(30):
        now = source.in_epoch(epoch)
        whole, labels = now.read_block(1), now.read_labels(1)
        seen.add(labels[0, 0, 0].item())
        assert whole.shape == (2, 6, 7, 6)
        for _ in range(6):
            lo, hi = np.sort(numbers.integers(0, [[7], [8], [7]], (3, 2)), 1).T.tolist()
            block = now.read_block(1, Box((0, *lo), (2, *hi)))
            expected = whole[:, lo[0] : hi[0], lo[1] : hi[1], lo[2] : hi[2]]
            torch.testing.assert_close(block, expected, rtol=1e-13, atol=1e-13)
            found = now.read_labels(1, Box(tuple(lo), tuple(hi)))
            assert torch.equal(found, labels[Box(tuple(lo), tuple(hi)).slices])
    assert len(seen) > 20


def test_values_and_labels_move_together():
    data = Volumes(6, 6, 5)
    for epoch in range(10):
        options = AugmentOptions(crop=(4, 4, 3), flip=("depth", "width"), rotate=1)
        source = Augmented(data, options, 1).in_epoch(epoch)
        labels = source.read_labels(2)
        assert torch.equal(source.read_block(2), data.inputs[2].flatten(1)[:, labels])


def test_flips_and_rotations_are_those_of_torch():
    data = Volumes(4, 4, 4)
    x = data.inputs[0]
    flips = [
        torch.flip(x, [d + 1 for d in range(3) if which[d]]) for which in product((0, 1), repeat=3)
    ]
    turns = [torch.rot90(x, k, dims) for k in (1, 2, 3) for dims in ((1, 2), (1, 3), (2, 3))]
    axes = ("depth", "height", "width")
    for options, possible in (({"flip": axes}, flips), ({"rotate": 1.0}, turns)):
        found = [changed(data, epoch, **options) for epoch in range(100)]
        which = [[torch.equal(y, each) for each in possible] for y in found]
        assert all(sum(each) == 1 for each in which)
        assert all(any(column) for column in zip(*which, strict=True))  # each of them is drawn
    flat = Volumes(4, 3, 5)
    possible = [torch.rot90(flat.inputs[0], 2, dims) for dims in ((1, 2), (1, 3), (2, 3))]
    for epoch in range(9):
        y = changed(flat, epoch, rotate=1.0)
        assert any(torch.equal(y, each) for each in possible)


@pytest.mark.parametrize("extents", [(1, 4, 4), (1, 3, 5), (4, 1, 4), (1, 1, 5)])
def test_an_image_is_turned_in_its_plane_only(extents):
    """A turn out of it would mirror the image."""
    data = Volumes(*extents)
    dims = [d + 1 for d in range(3) if extents[d] > 1]
    turns = [torch.rot90(data.inputs[0], k, dims) for k in (1, 2, 3)] if len(dims) == 2 else []
    possible = [y for y in turns if y.shape == data.inputs[0].shape] or [data.inputs[0]]
    found = [changed(data, epoch, rotate=1.0) for epoch in range(30)]
    which = [[torch.equal(y, each) for each in possible] for y in found]
    assert all(any(row) for row in which)
    assert all(any(column) for column in zip(*which, strict=True))


@pytest.mark.parametrize("epoch", range(4))
def test_filters_are_those_of_scipy_and_torch(epoch):
    data = Volumes(11, 8, 6)
    x, draws = data.inputs[0], SampleDraws(5, epoch, 0)
    deviation = draws.uniform("blur", 0.2, 2)
    expected = np.stack(
        [ndimage.gaussian_filter(each.numpy(), deviation, mode="nearest") for each in x]
    )
    np.testing.assert_allclose(changed(data, epoch, blur=(0.2, 2.0)).numpy(), expected, atol=1e-13)
    factor = draws.uniform("resolution", 0.3)
    coarse = [max(1, round(n * factor)) for n in x.shape[1:]]
    low = F.interpolate(x[None], coarse, mode="nearest-exact")
    expected = F.interpolate(low, x.shape[1:], mode="trilinear", align_corners=False)[0]
    found = changed(data, epoch, low_resolution=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Recorded(Volumes):
    """Volumes that record the boxes that are read."""

    def __init__(self, *extents: int) -> None:
        super().__init__(*extents)
        self.boxes: list[Box] = []

    def read_block(self, index: int, box: Box, out: Any = None) -> Any:
        self.boxes.append(box)
        return super().read_block(index, box)


def places(warp: Warp, extents: tuple[int, ...]) -> list[Any]:
    """Returns the places in the sample of all voxels of a result, by SciPy's cubic splines."""
    voxels = np.indices(extents)
    along = np.tensordot(warp.matrix, voxels - np.reshape(warp.center, (3, 1, 1, 1)), 1)
    found = along + np.reshape(warp.place, (3, 1, 1, 1))
    if warp.elastic is not None:
        points, _ = warp.elastic.controls(Box((0, 0, 0), extents))
        at = voxels / warp.elastic.spacing + 1
        found += [ndimage.map_coordinates(each, at, order=3, prefilter=False) for each in points]
    return found


@pytest.mark.parametrize("crop", [None, (6, 5, 7)])
def test_warps_are_those_of_scipy_and_torch(crop):
    data = Volumes(9, 8, 10)
    options = AugmentOptions(
        crop=crop, angle=40.0, zoom=(0.6, 1.5), shear=0.3, translation=0.2, elastic=2.0,
        elastic_spacing=5.0, probability=0.6,
    )  # fmt: skip
    warps = 0
    for epoch in range(12):
        source = Augmented(data, options, 5).in_epoch(epoch)
        image, labels = source.read_block(3), source.read_labels(3)
        (warp,) = source._changes(3)
        if not isinstance(warp, Warp):
            continue
        warps += 1
        at = places(warp, labels.shape)
        x = data.inputs[3]
        for found, each in zip(image, x, strict=True):
            expected = ndimage.map_coordinates(each.numpy(), at, order=1, mode="nearest")
            np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
        expected = ndimage.map_coordinates(data.labels.numpy(), at, order=0, mode="nearest")
        assert np.array_equal(labels.numpy(), expected)
        extents = np.array(x.shape[1:])
        grid = 2 * np.moveaxis(at, 0, -1)[..., ::-1] / (extents[::-1] - 1) - 1
        expected = F.grid_sample(
            x[None], torch.from_numpy(grid.copy())[None], padding_mode="border", align_corners=True
        )[0]
        torch.testing.assert_close(image, expected, rtol=1e-11, atol=1e-11)
    assert warps > 8


def test_a_block_of_a_warp_reads_the_box_that_it_needs():
    data = Recorded(40, 40, 40)
    source = Augmented(data, AugmentOptions(angle=20.0, elastic=3.0, probability=1.0), 1)
    for epoch in range(4):
        block = Box((0, 16, 16, 16), (2, 24, 24, 24))
        source.in_epoch(epoch).read_block(0, block)
        box = data.boxes.pop()
        # 8 voxels, turned by up to 20 degrees in three planes, displaced by up to 3 on each side.
        assert all(8 <= b - a <= 26 for a, b in zip(box.lo[1:], box.hi[1:], strict=True))
    assert not data.boxes


def test_elastic_deformations_move_voxels_smoothly_and_never_fold():
    for key in range(3):
        most = 0.4 * 6.0
        elastic = Elastic(most, 6.0, (key, key + 10, key + 20), (30, 30, 30))
        field = elastic(Box((0, 0, 0), (30, 30, 30)))
        assert 0.5 * most < np.abs(field).max() < most
        place = field + np.indices((30, 30, 30))
        rows = [[np.diff(place[i], axis=j)[:29, :29, :29] for j in range(3)] for i in range(3)]
        assert np.linalg.det(np.moveaxis(rows, (0, 1), (-2, -1))).min() > 0


def test_a_volume_of_one_slice_is_turned_within_it():
    source = Augmented(Volumes(1, 9, 9), AugmentOptions(angle=90.0, probability=1.0), 2)
    for epoch in range(4):
        (warp,) = source.in_epoch(epoch)._changes(0)
        np.testing.assert_array_equal(warp.matrix[0], [1, 0, 0])


class Ranged(Volumes):
    """Volumes whose channels have known ranges."""

    value_range = (np.array([-4.0, -5.0]), np.array([4.0, 6.0]))


def test_contrast_and_gamma_refer_to_the_range_of_the_data_set():
    data = Ranged(6, 6, 6)
    x = data.inputs[0]
    lower, upper = (torch.from_numpy(each).view(2, 1, 1, 1) for each in data.value_range)
    middle, extent = (lower + upper) / 2, upper - lower
    for epoch in range(6):
        draws = SampleDraws(5, epoch, 0)
        stretch = draws.uniform("contrast", 0.5, 1.5)
        expected = (middle + stretch * (x - middle)).clip(lower, upper)
        torch.testing.assert_close(changed(data, epoch, contrast=0.5), expected)
        found = changed(data, epoch, gamma=(0.7, 1.5))
        share = (x - lower) / extent
        exponent = (((found - lower) / extent).log() / share.log()).median()
        assert 0.7 <= exponent <= 1.5
        torch.testing.assert_close(found, lower + extent * share**exponent)
        found = changed(data, epoch, inverted_gamma=(0.7, 1.5))
        share = (upper - x) / extent
        exponent = (((upper - found) / extent).log() / share.log()).median()
        assert 0.7 <= exponent <= 1.5
        torch.testing.assert_close(found, upper - extent * share**exponent)


@pytest.mark.parametrize("change", ["gamma", "inverted_gamma"])
def test_gamma_keeps_a_channel_whose_range_is_empty(change):
    class Sparse(Ranged):
        value_range = (np.array([-4.0, 0.5]), np.array([4.0, 0.5]))

    data = Sparse(4, 4, 4)
    data.inputs[:, 1] = 0.5
    found = changed(data, 0, **{change: (0.7, 1.5)})
    assert torch.equal(found[1], data.inputs[0, 1])
    assert not torch.equal(found[0], data.inputs[0, 0])
    assert bool(changed(data, 0, noise=0.1, **{change: (0.7, 1.5)}).isfinite().all())


def test_the_preset_changes_samples_as_often_as_nnunet():
    options = AugmentOptions.preset("nnunet", crop=(8, 8, 8))
    source = Augmented(Ranged(9, 9, 9), options)
    kinds: Counter[str] = Counter()
    for epoch in range(1000):
        changes = list(source.in_epoch(epoch)._changes(0))
        kinds.update(type(each).__name__ for each in changes)
    # One of two changes of probability 0.2; blur and low resolution; four changes of values.
    expected = {"Warp": 360, "Turn": 875, "Noise": 100, "WeightedSum": 450, "Values": 700}
    for kind, count in expected.items():
        assert abs(kinds[kind] - count) < 4 * count**0.5
    assert options.probabilities["gamma"] == 0.3
    own = AugmentOptions.preset("nnunet", noise=0.5, probabilities={"blur": 0.0})
    assert own.noise == 0.5
    assert own.probabilities["blur"] == 0.0
    assert own.probabilities["noise"] == 0.1
    with pytest.raises(UsageError, match="preset = 'nnu': possible are nnunet"):
        AugmentOptions.preset("nnu")


def test_values_change_within_their_bounds():
    data = Volumes(16, 16, 16)
    x, found = data.inputs[0], []
    for epoch in range(20):
        factor = changed(data, epoch, scale=0.2) / x
        assert float(factor.max() - factor.min()) < 1e-12
        assert 0.8 <= float(factor.mean()) <= 1.2
        added = changed(data, epoch, shift=0.5) - x
        assert float(added.max() - added.min()) < 1e-12
        assert abs(float(added.mean())) <= 0.5
        curved = changed(data, epoch, gamma=(0.5, 2.0))
        exponent = (curved.abs().log() / x.abs().log()).median()
        assert 0.5 <= exponent <= 2
        torch.testing.assert_close(curved, x.sign() * x.abs() ** exponent)
        noise = changed(data, epoch, noise=0.3) - x
        deviation = float(noise.std())
        assert 0 < deviation < 0.31
        assert abs(float(noise.mean())) < 5 * deviation / noise.numel() ** 0.5
        scores = torch.sort((noise / deviation).flatten()).values
        normal = torch.distributions.Normal(0, 1).icdf((torch.arange(8192) + 0.5) / 8192)
        assert float((scores - normal)[40:-40].abs().max()) < 0.25  # of a normal distribution
        found += [float(factor.mean()), float(added.mean()), float(exponent), deviation]
    assert len(set(found)) == 80


def test_batches_of_a_loader_do_not_depend_on_the_split():
    def body(mesh: Any) -> list[torch.Tensor]:
        loader = Loader(Augmented(Volumes(9, 8, 7), ALL, 3), mesh, 2, seed=1)
        found = []
        with loader:
            for _ in range(2):
                for batch in loader:
                    assert batch.inputs.shape[2:] == (6, 7, 6)
                    found += [batch.inputs.full_tensor(), batch.targets.full_tensor()]
        return found

    (expected,) = on_ranks((1, 1, 1), body)
    assert not torch.equal(expected[0], expected[4])
    for spatial in ((3, 1, 1), (1, 2, 2)):
        for found in on_ranks(spatial, body):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


class Counts(Volumes):
    """Volumes whose arrays have another type than the samples, and labels of floats."""

    def __init__(self, kind: Any) -> None:
        super().__init__(9, 8, 7)
        self.inputs = self.inputs.mul(20).add(100).clip(0, 255).to(kind)
        self.labels = self.labels.to(torch.float32)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_arrays_of_any_type_are_changed_in_the_type_of_the_samples(kind):
    given, converted = Counts(kind), Counts(kind)
    converted.inputs, converted.labels = converted.inputs.double(), converted.labels.long()
    for epoch in range(20):
        found, expected = (Augmented(each, ALL, 3).in_epoch(epoch) for each in (given, converted))
        assert torch.equal(found.read_block(0), expected.read_block(0))
        assert torch.equal(found.read_labels(0), expected.read_labels(0))


def test_arrays_of_another_shape_are_refused():
    class Whole(Volumes):
        def read_block(self, index: int, box: Box, out: Any = None) -> Any:
            return self.inputs[index]

    with pytest.raises(UsageError, match=r"shape \(2, 8, 8, 8\) for a block or target of \(2, 4"):
        changed(Whole(8, 8, 8), 0, crop=(4, 4, 4))


def test_a_changed_sample_that_is_changed_again_differs_in_each_epoch():
    data = Volumes(9, 8, 7)
    crop = Augmented(data, AugmentOptions(crop=(4, 4, 4)), 1)
    turned = Augmented(crop, AugmentOptions(rotate=1.0), 2)
    for epoch in range(6):
        labels = turned.in_epoch(epoch).read_labels(0)
        assert torch.equal(labels.unique(), crop.in_epoch(epoch).read_labels(0).unique())
        again = turned.in_epoch(epoch).read_block(0)
        assert torch.equal(again, data.inputs[0].flatten(1)[:, labels])


def test_lists_are_taken_as_tuples():
    lists = AugmentOptions(crop=[4, 4, 4], zoom=[0.7, 1.4], blur=[0.5, 1.0], flip=["depth"])
    tuples = AugmentOptions(crop=(4, 4, 4), zoom=(0.7, 1.4), blur=(0.5, 1.0), flip=("depth",))
    assert lists == tuples
    lists.check()
    assert AugmentOptions(gamma=[1.0, 1.0]).changes is False


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"crop": (4, 9, 4)}, r"crop = \[4, 9, 4\]: a sample has 8 × 8 × 8 voxels"),
        ({"crop": (4, 4)}, r"crop = \[4, 4\]: possible are three counts >= 1"),
        ({"crop": (4, 4, 4, 4)}, r"crop = \[4, 4, 4, 4\]: possible are three counts >= 1"),
        ({"crop": (4, 4, 0)}, r"crop = \[4, 4, 0\]: possible are three counts >= 1"),
        ({"crop": (4, 4.0, 4)}, r"crop = \[4, 4.0, 4\]: possible are three counts >= 1"),
        ({"crop": 4}, "crop = 4: possible are three counts >= 1"),
        ({"flip": ("deep",)}, "flip = .*: possible are some of depth, height, width"),
        ({"rotate": 2.0}, "rotate = 2.0: possible are 0 to 1"),
        ({"gamma": (2.0, 1.0)}, r"gamma = \[2.0, 1.0\]: .*\[least, largest\] from 0.1 to 10"),
        ({"zoom": 1.2}, r"zoom = 1.2: possible are \[least, largest\] from 0.1 to 10"),
        ({"blur": [0.5, 1.0, 2.0]}, r"blur = \[0.5, 1.0, 2.0\]: possible are \[least, largest\]"),
        ({"angle": [10.0, 20.0]}, r"angle = \[10.0, 20.0\]: possible are 0 to 180"),
        ({"elastic": 7.0}, "elastic = 7.0: possible are 0 to 0.4 of elastic_spacing, 6.4"),
        ({"angle": -3.0}, "angle = -3.0: possible are 0 to 180"),
        ({"probabilities": {"noize": 0.1}}, "probabilities = .*: possible are 0 to 1 for some of"),
        ({"probabilities": {"noise": 2.0}}, "probabilities = .*: possible are 0 to 1 for some of"),
        ({"low_resolution": 0.0}, "low_resolution = 0.0: possible are more than 0"),
    ],
)
def test_impossible_options_are_named(options, complaint):
    with pytest.raises(UsageError, match=complaint):
        Augmented(Volumes(8, 8, 8), AugmentOptions(**options))
