"""Tests of device input with the CPU as the device: all but the copies and the streams."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pydist.comm import LocalTransport, Transport, run_local
from pydist.data import BadSample, Loader, ShardDataset
from pydist.data.device_input import DeviceInput
from pydist.data.store.form import BlockForm
from pydist.errors import UsageError
from pydist.mesh import Mesh
from pydist.partition import Box
from support.data.stored import local_of

CPU = torch.device("cpu")


class Exported:
    """Array of another library that offers only DLPack."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def __dlpack__(self, **options: object) -> object:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


class Arrays:
    """Source that returns its own arrays instead of filling tensors."""

    sample_shape = (1, 4, 3, 5)
    num_targets = 2
    labeled = False
    dtype = torch.float32
    identity = "arrays"

    def __init__(self, kind: Callable[[Tensor], object]) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 5

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        return self.sample_shape

    def whole(self, index: int) -> Tensor:
        return index + torch.arange(60, dtype=torch.float32).reshape(self.sample_shape) / 64

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> object:
        assert box is not None
        cut = tuple(slice(*bounds) for bounds in zip(box.lo, box.hi, strict=True))
        return self.kind(self.whole(index)[cut].clone())

    def target(self, index: int) -> object:
        return self.kind(torch.tensor([index, -index], dtype=torch.float32))


def through_device(loader: Loader) -> Loader:
    """Makes a loader read like `device="cuda"`, with the CPU as the device."""
    assert loader._ahead.device_inputs is None
    loader._ahead.device_inputs = queue.SimpleQueue()
    for _ in range(loader.readers):
        loader._ahead.device_inputs.put(DeviceInput(CPU))
    if loader.store is not None:
        loader.store.form = BlockForm(loader.dataset, loader.mesh, on_device=True)
        loader.store.holdings._format_of = loader.store.form.of
    return loader


@pytest.mark.parametrize("normalize", ["none", "log1p", "mean", "standardize"])
@pytest.mark.parametrize("layout", ["universes", "public_universes"])
@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 2)])
def test_what_comes_through_a_device_has_the_bits_of_the_host(
    layout: str,
    normalize: str,
    spatial: tuple[int, int, int],
    request: pytest.FixtureRequest,
) -> None:
    root = request.getfixturevalue(layout)

    def job(transport: Transport) -> None:
        dataset = ShardDataset(root, normalize=normalize)
        mesh = Mesh(transport, 1, spatial)
        with Loader(dataset, mesh, 5) as host, through_device(Loader(dataset, mesh, 5)) as device:
            for one, other in zip(host, device, strict=True):
                assert torch.equal(one.inputs.to_local(), other.inputs.to_local())
                assert torch.equal(one.targets, other.targets)
                assert one.indices == other.indices

    run_local(job, math.prod(spatial), timeout=60)


def test_each_of_several_readers_has_buffers_of_its_own(public_universes: Path) -> None:
    """Eight samples share a file, so readers wait for each other's reads, not for their copies."""

    def job(transport: Transport) -> None:
        dataset = ShardDataset(public_universes, normalize="log1p", open_files=1)
        mesh = Mesh(transport, 1, (2, 1, 1))
        several = through_device(Loader(dataset, mesh, 2, readers=4))
        with Loader(dataset, mesh, 2) as host, several as device:
            for _ in range(3):
                for one, other in zip(host, device, strict=True):
                    assert torch.equal(one.inputs.to_local(), other.inputs.to_local())
                    assert one.indices == other.indices

    run_local(job, 2, timeout=60)


@pytest.mark.parametrize(
    ("root", "normalize"),
    [("universes", "none"), ("universes", "log1p"), ("volumes", "none"), ("volumes", "ct")],
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_the_store_keeps_stored_values_for_a_device(
    root: str, normalize: str, on_disk: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Counts of int16 with targets, intensities with labels; 2 groups x depth 2, 3 epochs."""
    folder = request.getfixturevalue(root)
    disk: dict[str, Any] = {"store_memory": 9000, "store_disk": "1 GB", "store_folder": tmp_path}

    def job(transport: Transport) -> None:
        dataset = ShardDataset(folder, normalize=normalize)
        mesh = Mesh(transport, 2, (2, 1, 1))
        more = disk if on_disk else {}
        stored = through_device(Loader(dataset, mesh, 5, store="memory", **more))
        with Loader(dataset, mesh, 5) as host, stored as device:
            assert device.store is not None
            for epoch in range(3):
                for one, other in zip(host, device, strict=True):
                    assert torch.equal(one.inputs.to_local(), other.inputs.to_local())
                    assert torch.equal(local_of(one.targets), local_of(other.targets))
                figures = device.store.counted().over(transport)
                assert figures.hit_rate == (epoch > 0)
                assert (figures.disk_rate > 0) == (on_disk and epoch > 0)
            entry = next(iter(device.store.entries.values()))
            assert entry.block.dtype == dataset.stored_dtype == torch.int16

    run_local(job, 4, timeout=60)


@pytest.mark.parametrize("kind", [Tensor.numpy, Exported])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("store", ["off", "memory"])
def test_a_source_may_give_any_array(
    kind: Callable[[Tensor], object], device: bool, store: str
) -> None:
    def job(transport: Transport) -> None:
        source = Arrays(kind)
        with Loader(source, Mesh(transport, 1, (2, 1, 1)), 3, store=store) as loader:
            if device:
                through_device(loader)
            for batch in (batch for _ in range(2) for batch in loader):
                whole = batch.inputs.full_tensor()
                for n, index in enumerate(batch.indices):
                    assert torch.equal(whole[n], source.whole(index))
                    assert batch.targets[n].tolist() == [index, -index]

    run_local(job, 2, timeout=60)


class TwoChannels(Arrays):
    sample_shape = (2, 4, 3, 5)

    def whole(self, index: int) -> Tensor:
        return torch.full(self.sample_shape, float(index))


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("store", ["off", "memory"])
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (lambda x: x[:1], r"\(1, 4, 3, 5\) for a block or target of \(2, 4, 3, 5\)"),
        (lambda x: x[:1] if x.dim() == 1 else x, r"\(1,\) for a block or target of \(2,\)"),
    ],
)
def test_an_array_of_another_shape_is_not_repeated(
    kind: Callable[[Tensor], object], shapes: str, device: bool, store: str
) -> None:
    loader = Loader(TwoChannels(kind), Mesh(LocalTransport()), 3, store=store)
    if device:
        through_device(loader)
    with pytest.raises(UsageError, match=shapes), loader:
        next(iter(loader))


class Scalars(Arrays):
    num_targets = 1

    def target(self, index: int) -> Tensor:
        return torch.tensor(float(index))


def test_a_target_may_be_a_scalar() -> None:
    with Loader(Scalars(torch.clone), Mesh(LocalTransport()), 2, training=False) as loader:
        batch = next(iter(loader))
        assert batch.targets.tolist() == [[0.0], [1.0]]


class Halved(ShardDataset):
    """Data set of a user who changes the inputs."""

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        return super().read_block(index, box, out).div_(2)


class HalvedEverywhere(Halved):
    """The same, for devices as well."""

    def normalize(
        self, index: int, first_channel: int, stored: Tensor, out: Tensor, found: Tensor
    ) -> None:
        super().normalize(index, first_channel, stored, out, found)
        out.div_(2)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("store", ["off", "memory"])
@pytest.mark.parametrize("kind", [Halved, HalvedEverywhere])
def test_an_overridden_read_is_neither_left_out_on_devices_nor_in_the_store(
    volumes: Path, kind: type[ShardDataset], device: bool, store: str
) -> None:
    whole, mesh = ShardDataset(volumes), Mesh(LocalTransport())
    with Loader(kind(volumes), mesh, 2, store=store) as loader:
        if device:
            through_device(loader)
        for batch in (batch for _ in range(2) for batch in loader):
            for n, index in enumerate(batch.indices):
                assert torch.equal(batch.inputs.to_local()[n], whole.read_block(index) / 2)
        if loader.store is not None:
            dtype = torch.float32 if kind is Halved else torch.int16
            assert {entry.block.dtype for entry in loader.store.entries.values()} == {dtype}


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "float32"])
def test_every_stored_type_goes_through(write_samples: Callable[..., Path], dtype: str) -> None:
    top = np.iinfo(dtype).max if dtype.startswith("u") else 1000
    sample = np.linspace(0, top, 2 * 3 * 4 * 5).reshape(2, 3, 4, 5).astype(dtype)
    dataset = ShardDataset(write_samples([sample]), normalize="log1p")
    stored = torch.empty(sample.shape, dtype=dataset.stored_dtype)
    dataset.read_stored(0, None, stored)
    np.testing.assert_array_equal(stored.numpy().astype(dtype), sample)
    out, found = torch.empty(sample.shape), torch.zeros(1, dtype=torch.int32)
    dataset.normalize(0, 0, stored, out, found)
    assert torch.equal(out, dataset.read_block(0))
    np.testing.assert_allclose(out, np.log1p(sample.astype(np.float64)), rtol=1e-6)
    with pytest.raises(UsageError, match="out is"):
        dataset.read_stored(0, None, torch.empty(1))


@pytest.mark.parametrize("on_bad_sample", ["stop", "skip"])
def test_what_is_not_finite_is_found_and_named(
    write_samples: Callable[..., Path], on_bad_sample: str
) -> None:
    samples = [np.ones((1, 4, 4, 4), np.float32) * i for i in range(4)]
    samples[2][0, 3, 1, 2] = math.nan
    root = write_samples(samples)

    def job(transport: Transport) -> list[dict[int, str]]:
        mesh = Mesh(transport, 1, (2, 1, 1))
        data = ShardDataset(root, normalize="log1p")
        loader = Loader(data, mesh, 4, training=False, on_bad_sample=on_bad_sample)
        with through_device(loader):
            for batch in loader:
                if on_bad_sample == "stop":
                    continue  # this rank's block is good
                assert batch.weight.tolist() == [1, 1, 0, 1]
                expected = torch.log1p(torch.tensor([0.0, 1.0, 3.0, 3.0]))
                torch.testing.assert_close(batch.inputs.full_tensor()[:, 0, 3, 1, 2], expected)
            return loader.skipped

    if on_bad_sample == "stop":
        with pytest.raises(BadSample, match=r"value nan at channel 0, voxel \(3, 1, 2\)"):
            run_local(job, 2, timeout=60)
    else:
        assert [list(skipped) for skipped in run_local(job, 2, timeout=60)] == [[2], [2]]


class Event:
    """Event at the end of a copy that records waits for it."""

    def __init__(self, waits: list[int], number: int) -> None:
        self.waits, self.number = waits, number

    def synchronize(self) -> None:
        self.waits.append(self.number)


def test_a_buffer_is_filled_again_only_when_its_copy_has_ended() -> None:
    waits: list[int] = []
    through = DeviceInput(CPU)
    addresses = []
    for number in range(5):
        staged = through.staging((2, 3), torch.int16)
        addresses.append(staged.data_ptr())
        through._slots[through._filled % 2].sent = Event(waits, number)  # as `send` does
        assert waits == list(range(number - 1)), "waited for the copy of two blocks ago, no later"
    assert addresses[0] == addresses[2] == addresses[4]
    assert addresses[1] == addresses[3] != addresses[0]


def test_a_larger_block_gets_a_larger_buffer() -> None:
    through = DeviceInput(CPU)
    for shape in ((2,), (3, 4), (1,), (0, 5)):
        staged = through.staging(shape, torch.float64)
        staged.fill_(1)
        assert staged.shape == shape
