"""Tests of augmentation by blocks: each split has the sample of the whole volume's change."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage

from pydist.data import Augmented, AugmentOptions
from pydist.data.augment.draws import SampleDraws
from pydist.data.loader import Loader
from pydist.errors import UsageError
from pydist.partition import Box
from support.equivalence import on_ranks

ALL = AugmentOptions(
    crop=(6, 7, 6), flip=("depth", "height", "width"), rotate=0.7, probability=0.5, noise=0.3,
    blur=1.5, scale=0.25, shift=0.5, low_resolution=0.4, gamma=1.5,
)  # fmt: skip


class Volumes:
    """Samples in memory whose labels number the voxels; float64."""

    num_targets = 0
    labelled = True
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
        return self.inputs[index][_slices(box)]

    def read_labels(self, index: int, box: Box, out: Any = None) -> Any:
        return self.labels[_slices(box)]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))


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
            assert torch.equal(found, labels[_slices(Box(tuple(lo), tuple(hi)))])
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


@pytest.mark.parametrize("epoch", range(4))
def test_filters_are_those_of_scipy_and_torch(epoch):
    data = Volumes(11, 8, 6)
    x, draws = data.inputs[0], SampleDraws(5, epoch, 0)
    deviation = draws.uniform("blur", 0.2, 2)
    expected = np.stack(
        [ndimage.gaussian_filter(each.numpy(), deviation, mode="nearest") for each in x]
    )
    np.testing.assert_allclose(changed(data, epoch, blur=2.0).numpy(), expected, atol=1e-13)
    factor = draws.uniform("resolution", 0.3)
    coarse = [max(1, round(n * factor)) for n in x.shape[1:]]
    low = F.interpolate(x[None], coarse, mode="nearest-exact")
    expected = F.interpolate(low, x.shape[1:], mode="trilinear", align_corners=False)[0]
    found = changed(data, epoch, low_resolution=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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
        curved = changed(data, epoch, gamma=2.0)
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


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"crop": (4, 9, 4)}, r"crop = \[4, 9, 4\]: a sample has 8 × 8 × 8 voxels"),
        ({"flip": ("deep",)}, "flip = .*: possible are some of depth, height, width"),
        ({"rotate": 2.0}, "rotate = 2.0: possible are 0 to 1"),
        ({"gamma": 0.5}, "gamma = 0.5: possible are 1 to 10"),
        ({"low_resolution": 0.0}, "low_resolution = 0.0: possible are more than 0"),
    ],
)
def test_impossible_options_are_named(options, complaint):
    with pytest.raises(UsageError, match=complaint):
        Augmented(Volumes(8, 8, 8), AugmentOptions(**options))


def test_a_store_and_augmentation_are_refused():
    def body(mesh: Any) -> None:
        with pytest.raises(UsageError, match=r'store = "memory".*"off" is possible'):
            Loader(Augmented(Volumes(8, 8, 8), ALL), mesh, 2, store="memory")

    on_ranks((1, 1, 1), body)
