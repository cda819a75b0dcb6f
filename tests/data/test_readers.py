"""Tests of several reading threads: batches in order, errors at their batch, files one by one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pydist.comm import Transport
from pydist.data import BadSample, Loader, ShardDataset
from pydist.data.convert import convert_dataset
from pydist.data.open_files import _Handles, _Place
from pydist.data.options import ConvertOptions
from pydist.mesh import Mesh
from pydist.partition import Box
from support.data.numbers import Numbers, on_ranks, seen


class Meeting(Numbers):
    """Source whose reads wait until as many are under way at once."""

    def __init__(self, size: int, readers: int) -> None:
        super().__init__(size)
        self.barrier = threading.Barrier(readers, timeout=20)

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        self.barrier.wait()
        return super().read_block(index, box, out)


def test_several_readers_read_at_once_and_batches_keep_their_order() -> None:
    def job(transport: Transport, readers: int) -> list:
        mesh, dataset = Mesh(transport, 1, (2, 1, 1), seed=5), Meeting(12, readers)
        with Loader(dataset, mesh, 1, readers=readers, training=False) as loader:
            return [seen(batch, dataset) for _ in range(2) for batch in loader.batches(0)]

    assert on_ranks(2, job, 3) == on_ranks(2, job, 1) == [[[i] for i in range(12)] * 2] * 2


def test_an_error_of_one_of_several_readers_is_raised_at_its_batch() -> None:
    def job(transport: Transport) -> list:
        dataset = Numbers(8, delay=0.01, bad={3: None})
        with Loader(dataset, Mesh(transport), 1, readers=4, training=False) as loader:
            batches = iter(loader)
            got = [seen(next(batches), dataset) for _ in range(3)]
            with pytest.raises(BadSample, match="sample 3 is bad"):
                next(batches)
        return got

    assert on_ranks(1, job) == [[[0], [1], [2]]]


def test_as_many_batches_are_read_ahead_as_there_are_readers() -> None:
    def job(transport: Transport) -> None:
        dataset = Numbers(20)
        with Loader(dataset, Mesh(transport), 1, readers=6) as loader:
            batches = iter(loader)
            next(batches)
            for _ in range(200):
                if len(dataset.reads) >= 7:
                    break
                time.sleep(0.01)
            time.sleep(0.05)
            assert len(dataset.reads) == 7

    on_ranks(1, job)


@pytest.mark.parametrize("kind", ["hdf5", "numpy", "zarr"])
@pytest.mark.parametrize("open_files", [1, 3])
def test_several_threads_read_the_files_of_a_data_set(
    universes: Path, tmp_path: Path, kind: str, open_files: int
) -> None:
    """Files are opened, read, closed for others and closed by a caller at the same time."""
    if kind == "zarr":
        pytest.importorskip("zarr.buffer", reason="zarr 3.1 is not installed")
    options = {"layout": "channel-first", "chunks": None if kind == "numpy" else (4, 4, 4)}
    convert_dataset(universes, tmp_path / "made", ConvertOptions(kind, **options))
    one, several = (ShardDataset(tmp_path / "made", open_files=open_files) for _ in range(2))
    expected = [one.read_block(index) for index in range(len(one))]
    failed: list[str] = []

    def read(number: int) -> None:
        order = np.random.default_rng(number).permutation(len(several)).tolist()
        for index in order * 3:
            if not torch.equal(several.read_block(index), expected[index]):
                failed.append(f"sample {index}")
            if index == number:
                several.close()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failed
    assert several.bytes_read == 4 * 3 * one.bytes_read


def test_a_file_that_was_closed_meanwhile_is_not_opened_beside_the_table() -> None:
    """It would stay open beyond the limit."""
    handles = _Handles(one_at_a_time=False)
    first = handles.hold("a")
    found: list[_Place] = []
    other = threading.Thread(target=lambda: found.append(handles.hold("a")))
    other.start()
    time.sleep(0.05)  # it waits for the lock
    handles._places.clear()  # as `close` does, before it waits for the lock
    first.lock.release()
    other.join(10)
    assert found == [handles._places["a"]]
    assert found[0] is not first
