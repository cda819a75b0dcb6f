"""Tests of labels: read with the box of their volume, delivered as sharded integers."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch

from pydist.comm import run_local
from pydist.data import BadSample, Loader, ShardDataset
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import DataError, UsageError
from pydist.mesh import Mesh
from pydist.partition import Box
from pydist.tensor import ShardedTensor
from support.data.reading import Meter

SHAPE = (16, 8, 24)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    root = tmp_path_factory.mktemp("volumes")
    generate_ct(root, CTOptions(count=4, shape=SHAPE, validation=0))
    return root


@pytest.mark.parametrize(
    ("data", "spatial"), [(1, (2, 1, 1)), (2, (1, 1, 2)), (1, (1, 3, 1)), (1, (2, 2, 2))]
)
def test_a_batch_is_cut_alike_in_volume_and_label(volumes, data, spatial):
    whole = ShardDataset(volumes, normalize="ct")

    def job(transport):
        mesh = Mesh(transport, data, spatial)
        with Loader(ShardDataset(volumes, normalize="ct"), mesh, 2) as loader:
            for batch in loader:
                assert isinstance(batch.targets, ShardedTensor)
                assert batch.targets.shape == (len(batch.indices), *SHAPE)
                assert batch.targets.dtype == torch.int64
                assert batch.targets.layout.box.lo[1:] == batch.inputs.layout.box.lo[2:]
                assert batch.targets.layout.box.hi[1:] == batch.inputs.layout.box.hi[2:]
                for n, index in enumerate(batch.indices):
                    image, label = whole[index]
                    assert torch.equal(batch.inputs.full_tensor()[n], image)
                    assert torch.equal(batch.targets.full_tensor()[n], label)

    run_local(job, data * spatial[0] * spatial[1] * spatial[2], timeout=60)


def test_no_byte_beyond_a_depth_block_is_read(volumes):
    meter = Meter()
    dataset = ShardDataset(volumes, normalize="none", driver=meter)
    dataset.read_labels(0, Box([0, 0, 0], [0, 0, 0]))
    dataset.read_labels(0, Box([0, 0, 0], [1, 1, 1]))
    box = Box([4, 0, 0], [8, 8, 24])
    assert meter.of(lambda: dataset.read_labels(0, box)) == 4 * 8 * 24


def test_what_labels_can_not_be(volumes, universes, tmp_path):
    data = ShardDataset(volumes)
    with pytest.raises(UsageError, match="is not in a sample"):
        data.read_labels(0, Box([0, 0, 0], [17, 8, 24]))
    with pytest.raises(UsageError, match=r"contiguous .* torch\.int64 is needed"):
        data.read_labels(0, out=torch.empty(SHAPE))
    with pytest.raises(DataError, match="has no labels"):
        ShardDataset(universes).read_labels(0)
    generate_ct(tmp_path, CTOptions(count=1, shape=(8, 8, 8), validation=0))
    path = tmp_path / "ct_0000.hdf5"
    with h5py.File(path, "r+") as file:
        file["segmentation"][1, 2, 3] = 7
    with pytest.raises(BadSample, match=r"label 7 at voxel \(1, 2, 3\); there are 3 classes"):
        ShardDataset(tmp_path).read_labels(0)
    for wrong, message in (
        (np.zeros((8, 8, 7), np.uint8), r"shape \(8, 8, 7\); \(8, 8, 8\) was expected"),
        (np.zeros((8, 9, 8), np.uint8), r"shape \(8, 9, 8\); \(8, 8, 8\) was expected"),
        (np.zeros((8, 8, 8), np.float32), "labels are integers"),
    ):
        with h5py.File(path, "r+") as file:
            del file["segmentation"]
            file["segmentation"] = wrong
        with pytest.raises(DataError, match=message):
            ShardDataset(tmp_path).read_labels(0)


def test_batches_of_several_shapes_need_a_group_a_sample(tmp_path):
    import dataclasses

    from pydist.data import Manifest

    for i, n in enumerate((8, 16)):
        generate_ct(tmp_path / str(i), CTOptions(count=1, shape=(n, 8, 8), validation=0))
    one, other = (Manifest.load(tmp_path / str(i)) for i in range(2))
    files = tuple(
        dataclasses.replace(m.files[0], path=f"{i}/{m.files[0].path}")
        for i, m in enumerate((one, other))
    )
    both = dataclasses.replace(other, files=files)

    def job(transport):
        data = ShardDataset(tmp_path, normalize="none", manifest=both)
        mesh = Mesh(transport, 1, (2, 1, 1))
        with Loader(data, mesh, 1) as loader:
            shapes = sorted(tuple(batch.targets.shape) for batch in loader)
        with (
            Loader(data, mesh, 2) as loader,
            pytest.raises(UsageError, match="take batches of one sample"),
        ):
            next(iter(loader))
        return shapes

    assert run_local(job, 2, timeout=60)[0] == [(1, 8, 8, 8), (1, 16, 8, 8)]
