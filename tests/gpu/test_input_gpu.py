"""Input on a CUDA device: kernels, pinned buffers of the loader, arrays of other libraries."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch

from pydist import _native as native
from pydist.comm import LocalTransport
from pydist.data import BadSample, Loader, ShardDataset, UniverseOptions, generate_universes
from pydist.data.blocks import read_group
from pydist.data.device_input import DeviceInput
from pydist.data.sampler import MeshSampler
from pydist.data.universes.simulate import simulate
from pydist.interop import as_tensor
from pydist.mesh import Mesh
from support.kernels.conversions import INPUTS, MAPS, SMALL, WIDE, block, flag, table

ORDERS = [(0, 1, 2, 3), (1, 2, 3, 0), (3, 1, 0, 2)]


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def room(shape, dtype: str, order) -> torch.Tensor:
    """Returns poisoned memory on the device, in any order of the dims."""
    inverse = [order.index(dim) for dim in range(4)]
    made = torch.full([shape[d] for d in order], math.nan, dtype=getattr(torch, dtype))
    return made.cuda().permute(inverse)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("out_dtype", INPUTS)
@pytest.mark.parametrize("dtype", SMALL)
def test_tables_give_the_bits_of_the_cpu(dtype, out_dtype, order):
    stored = block(dtype)
    entries = table(stored, out_dtype)
    expected, found = np.empty(stored.shape, out_dtype), flag()
    native.look_up(stored, entries, 3.7, expected, found)
    out, found_there = room(stored.shape, out_dtype, order), on_device(found)
    native.look_up(on_device(stored), on_device(entries), 3.7, out, found_there)
    assert torch.equal(out.cpu(), torch.from_numpy(expected))
    assert found_there.item() == 0


@pytest.mark.parametrize("out_dtype", INPUTS)
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("width", [5, 64, 131])
@pytest.mark.parametrize(("skipped", "skipped_to"), [(0, 0), (1, 1), (1, 2), (3, 3)])
def test_rows_may_begin_anywhere(dtype, out_dtype, width, skipped, skipped_to):
    """Rows in vectors, their heads and tails, and rows whose sides are aligned differently."""
    stored = block(dtype, (3, 2, 5, width + skipped))
    entries = table(stored, out_dtype)
    expected = np.full((3, 2, 5, width + skipped_to), np.nan, out_dtype)
    out, found = on_device(expected), flag()
    native.look_up(stored[..., skipped:], entries, 1.0, expected[..., skipped_to:], found)
    there = on_device(stored)[..., skipped:]
    native.look_up(there, on_device(entries), 1.0, out[..., skipped_to:], on_device(found))
    np.testing.assert_array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("out_dtype", INPUTS)
@pytest.mark.parametrize("dtype", SMALL + WIDE)
@pytest.mark.parametrize("log", [False, True])
def test_rescaling_is_that_of_the_cpu(dtype, out_dtype, log):
    stored = block(dtype)
    expected, found = np.empty(stored.shape, out_dtype), flag()
    native.rescale(stored, MAPS, log, 1.5, expected, found)
    out, found_there = room(stored.shape, out_dtype, ORDERS[0]), on_device(found)
    native.rescale(on_device(stored), on_device(MAPS), log, 1.5, out, found_there)
    few = 4 * np.finfo(out_dtype).eps if log else 0
    np.testing.assert_allclose(out.cpu(), expected, rtol=few, atol=few)


@pytest.fixture(scope="module")
def universes(tmp_path_factory):
    """Generates 24 samples of 32³."""
    root = tmp_path_factory.mktemp("universes")
    generate_universes(root, UniverseOptions(count=4, width=32, seed=3, layout="cosmoflow"))
    return root


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("normalize", ["none", "log1p", "mean", "standardize"])
def test_batches_have_the_bits_of_the_host(universes, normalize, memory_format):
    """The device is busy meanwhile, and batches are kept until later ones have arrived."""
    dataset, mesh = ShardDataset(universes, normalize=normalize), Mesh(LocalTransport())
    device_loader = Loader(dataset, mesh, 4, device="cuda", memory_format=memory_format)
    stream = torch.cuda.Stream()
    kept = []
    with Loader(dataset, mesh, 4) as host, device_loader as device:
        with torch.cuda.stream(stream):
            for one, other in zip(host, device, strict=True):
                torch.cuda._sleep(20_000_000)
                local = other.inputs.to_local()
                assert local.is_contiguous(memory_format=memory_format)
                kept.append((one, local * 1, other.targets * 1))
        torch.cuda.synchronize()
    for one, inputs, targets in kept:
        assert torch.equal(inputs.cpu(), one.inputs.to_local())
        assert torch.equal(targets.cpu(), one.targets)


@pytest.mark.parametrize("normalize", ["none", "log1p"])
def test_batches_of_the_store_have_the_bits_of_files(universes, normalize):
    """The store keeps int16 counts, which the device normalizes in each epoch."""
    plain, dataset = (ShardDataset(universes, normalize=normalize) for _ in range(2))
    mesh = Mesh(LocalTransport())
    with (
        Loader(plain, mesh, 4, device="cuda") as files,
        Loader(dataset, mesh, 4, device="cuda", store="memory") as stored,
    ):
        for _ in range(3):
            for one, other in zip(files, stored, strict=True):
                assert torch.equal(one.inputs.to_local(), other.inputs.to_local())
                assert torch.equal(one.targets, other.targets)
        before = dataset.bytes_read
        assert len(list(stored)) == len(stored)
        assert dataset.bytes_read == before
        assert {e.block.dtype for e in stored.store.entries.values()} == {torch.int16}


def test_a_bad_sample_is_named(tmp_path):
    import h5py

    options = UniverseOptions(count=2, width=32, box_width=32, validation=0.0, dtype="float32")
    manifest = generate_universes(tmp_path, options)
    with h5py.File(tmp_path / manifest.files[1].path, "r+") as file:
        file["full"][0, 1, 2, 3] = math.nan
    mesh = Mesh(LocalTransport())
    with (
        Loader(ShardDataset(tmp_path), mesh, 2, device="cuda") as loader,
        pytest.raises(BadSample, match=r"value nan at channel 0, voxel \(1, 2, 3\)"),
    ):
        next(iter(loader))


class Described:
    """Object with nothing but the CUDA array interface."""

    def __init__(self, values):
        self._values = values
        self.__cuda_array_interface__ = values.__cuda_array_interface__


def test_arrays_on_a_device_are_shared():
    values = torch.arange(24.0, device="cuda").reshape(2, 3, 4)
    found = as_tensor(Described(values))
    assert found.data_ptr() == values.data_ptr()
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        array = cupy.arange(1 << 20, dtype="float32")
        for _ in range(50):
            array += 1
        total = as_tensor(array).sum()
    expected = (1 << 20) * ((1 << 20) - 1) / 2 + 50 * (1 << 20)
    assert total.item() == pytest.approx(expected, rel=1e-5)


class Queued:
    """Array whose owner still computes it, on a stream of its own or on the default stream."""

    def __init__(self, device: torch.device, on_default: bool) -> None:
        stream = torch.cuda.default_stream(device) if on_default else torch.cuda.Stream(device)
        self._values = torch.zeros(1 << 20, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            self._values += 1
        stream_of_it = {"stream": stream.cuda_stream or 1, "version": 3}  # 0 is not allowed
        self.__cuda_array_interface__ = {**self._values.__cuda_array_interface__, **stream_of_it}
        self._stream = stream


@pytest.mark.parametrize("on_default", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_an_array_is_shared_where_it_lies_and_read_behind_its_owner(index, on_default):
    if index >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    device = torch.device("cuda", index)
    array = Queued(device, on_default)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = as_tensor(array)
        assert found.device == device
        assert found.data_ptr() == array._values.data_ptr()
        assert found.to("cuda:0").sum().item() == 1 << 20


class OnDevice:
    """Data source whose samples are arrays on the device that exist for one call each."""

    sample_shape = (1, 32, 32, 32)
    num_targets = 1
    labeled = False
    dtype = torch.float32
    identity = "on device"

    def __init__(self) -> None:
        self.given = []

    def __len__(self) -> int:
        return 4

    def shape_of(self, index):
        return self.sample_shape

    def read_block(self, index, box=None, out=None):
        array = Described(torch.full(self.sample_shape, float(index), device="cuda"))
        self.given.append(weakref.ref(array))
        return array

    def target(self, index):
        return torch.zeros(1)


def test_arrays_of_a_source_live_until_they_are_copied():
    source, mesh = OnDevice(), Mesh(LocalTransport())
    device_input = DeviceInput(torch.device("cuda", 0))
    read = read_group(
        source, mesh, MeshSampler(4, 1, 0, 2, shuffle=False).batch(0, 0), device_input
    )
    assert all(given() is not None for given in source.given)
    read.arrival.hand_over(read.inputs, read.targets)
    assert read.arrival.not_finite() == []
    assert read.inputs[:, 0, 0, 0, 0].tolist() == [0.0, 1.0]
    del read
    assert all(given() is None for given in source.given)


@pytest.mark.parametrize("assignment", ["ngp", "cic"])
def test_universes_from_a_device_are_those_of_the_host(assignment):
    """Up to 1 in 10,000 particles may differ, moved over a cell's border by rounding."""
    pytest.importorskip("cupy")
    options = {"width": 32, "box_width": 64, "assignment": assignment}
    dtype = {"ngp": "int16", "cic": "float32"}[assignment]
    on_host = simulate(UniverseOptions(device="cpu", dtype=dtype, **options), 1)
    from_device = simulate(UniverseOptions(device="gpu", dtype=dtype, **options), 1)
    assert type(from_device) is np.ndarray
    moved = np.abs(from_device.astype(np.float64) - on_host).sum() / 2
    assert moved <= 1e-4 * on_host.sum()
