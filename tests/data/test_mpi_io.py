"""Tests of reads by MPI-IO, for which h5py must be built with MPI: its wheels are not."""

from __future__ import annotations

import pickle
import shutil

import h5py
import pytest
import torch

from pydist.cli.main import main
from pydist.data import MpiIo, ShardDataset
from pydist.errors import DataError, UsageError
from pydist.partition import Box
from pydist.train.config import DataConfig

parallel = pytest.mark.skipif(not h5py.get_config().mpi, reason="this h5py is serial")
serial = pytest.mark.skipif(h5py.get_config().mpi, reason="this h5py knows MPI")


@serial
def test_a_serial_h5py_is_named_with_what_helps():
    with pytest.raises(UsageError, match="HDF5_MPI=ON pip install --no-binary=h5py h5py"):
        MpiIo()


@serial
def test_a_run_is_refused_before_its_ranks_start(tmp_path, capfd):
    (tmp_path / "run.toml").write_text("[data]\nmpi_io = true")
    assert main(["train", str(tmp_path / "run.toml"), "-n", "1"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: MPI-IO needs h5py built with the site's MPI")


def test_another_process_reads_without_mpi():
    with pytest.raises(UsageError, match=r"data\.untrusted"):
        DataConfig(mpi_io=True, untrusted=True).check()


@parallel
def test_blocks_are_those_of_other_reads(universes):
    plain, by_mpi = ShardDataset(universes), ShardDataset(universes, driver=MpiIo())
    channels, *extents = plain.sample_shape
    inner = Box((0, 1, 2, 3), (channels, *(n - 1 for n in extents)))
    for data in (by_mpi, pickle.loads(pickle.dumps(by_mpi))):
        for index in range(len(plain)):
            assert torch.equal(data.read_block(index, inner), plain.read_block(index, inner))
            assert torch.equal(data.target(index), plain.target(index))


@parallel
def test_a_damaged_file_is_one_line(universes, tmp_path):
    folder = shutil.copytree(universes, tmp_path / "damaged")
    data = ShardDataset(folder, driver=MpiIo({"romio_ds_read": "disable"}))
    path = folder / data.manifest.files[0].path
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=path.name):
        data.read_block(0)


@parallel
def test_an_mpi_for_one_thread_is_named_and_not_called_damage(universes, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with pytest.raises(UsageError, match="lacks MPI_THREAD_MULTIPLE"):
        ShardDataset(universes, driver=MpiIo()).read_block(0)
