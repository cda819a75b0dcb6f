"""Tests of files that another process reads: the same blocks, and errors in place of crashes."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("zarr")

from pydist.data import BadSample, CTOptions, Manifest, ShardDataset, generate_ct, open_files
from pydist.data.convert import convert_dataset
from pydist.data.isolated import ReadingProcess
from pydist.data.options import ConvertOptions
from pydist.data.safe_open import safe_open
from pydist.data.trust import FileTrust
from pydist.errors import DataError, UsageError
from pydist.partition import Box


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Makes the same volumes in each format."""
    root = tmp_path_factory.mktemp("volumes")
    generate_ct(root / "hdf5", CTOptions(count=3, shape=(8, 9, 10), validation=0))
    for name in ("zarr", "numpy"):
        convert_dataset(root / "hdf5", root / name, ConvertOptions(name))
    return {name: root / name for name in ("hdf5", "zarr", "numpy")}


@pytest.fixture(scope="module")
def isolated(volumes: dict[str, Path]) -> Iterator[dict[str, ShardDataset]]:
    found = {name: ShardDataset(root, untrusted=True) for name, root in volumes.items()}
    yield found
    for each in found.values():
        each.close()


def reader(data: ShardDataset) -> ReadingProcess:
    found = data._files._handles.reader
    assert found is not None
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), name=st.sampled_from(["hdf5", "zarr", "numpy"]))
def test_blocks_are_the_same(
    volumes: dict[str, Path], isolated: dict[str, ShardDataset], data: st.DataObject, name: str
) -> None:
    lo = [data.draw(st.integers(0, n)) for n in (1, 8, 9, 10)]
    hi = [data.draw(st.integers(a, n)) for a, n in zip(lo, (1, 8, 9, 10), strict=True)]
    box, index = Box(tuple(lo), tuple(hi)), data.draw(st.integers(0, 2))
    plain, other = ShardDataset(volumes[name]), isolated[name]
    assert torch.equal(other.read_block(index, box), plain.read_block(index, box))
    inner = Box(tuple(lo[1:]), tuple(hi[1:]))
    assert torch.equal(other.read_labels(index, inner), plain.read_labels(index, inner))
    shape = [b - a for a, b in zip(lo, hi, strict=True)]
    stored = [torch.zeros(shape, dtype=torch.int16) for _ in range(2)]
    other.read_stored(index, box, stored[0])
    plain.read_stored(index, box, stored[1])
    assert torch.equal(*stored)
    plain.close()


def test_targets(universes: Path) -> None:
    data = ShardDataset(universes, untrusted=True)
    assert torch.equal(data.target(3), ShardDataset(universes).target(3))
    assert pickle.loads(pickle.dumps(data)).target(3).tolist() == data.target(3).tolist()
    data.close()


@pytest.mark.parametrize("name", ["hdf5", "zarr", "numpy"])
def test_a_crash_names_the_file_and_the_next_read_works(
    volumes: dict[str, Path], name: str
) -> None:
    data = ShardDataset(volumes[name], untrusted=True)
    expected = data.read_block(1)
    pid = reader(data).pid
    assert pid is not None
    os.kill(pid, signal.SIGSEGV)
    with pytest.raises(BadSample, match=r"ct_0001.* was ended by SIGSEGV") as caught:
        data.read_block(1)
    assert "\n" not in str(caught.value)
    assert torch.equal(data.read_block(1), expected)
    assert reader(data).pid not in (None, pid)
    os.kill(reader(data).pid or 0, signal.SIGKILL)
    with pytest.raises(DataError, match=r"ct_0002.* was ended by SIGKILL"):
        data.read_block(2)  # a file that was not open yet
    data.close()


def test_a_read_after_an_interrupted_one_gets_its_own_values(
    volumes: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, data = (ShardDataset(volumes["hdf5"], untrusted=each) for each in (False, True))
    data.read_block(1)
    data.read_block(2)  # open files

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ReadingProcess, "_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            data.read_block(1)
    assert torch.equal(data.read_block(2), plain.read_block(2))
    assert torch.equal(data.read_block(1), plain.read_block(1))
    data.close()


CRASHES = (
    "import json, os, signal, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pydist.data.safe_open import SafeFile; "
    "SafeFile.texts = lambda self: os.kill(os.getpid(), signal.SIGSEGV); "
    "from pydist.data.isolated_reader import serve_reads; serve_reads(sys.argv[2])"
)


def test_conversion_names_a_file_whose_texts_end_the_process(
    volumes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pydist.data.isolated._START", CRASHES)
    trust = FileTrust((tmp_path,), untrusted=True)  # roots that no kept process has
    with pytest.raises(DataError, match=r"ct_0000\.hdf5: .* was ended by SIGSEGV"):
        convert_dataset(volumes["hdf5"], tmp_path / "copy", ConvertOptions("numpy"), trust=trust)


def test_conversion_keeps_long_texts(tmp_path: Path) -> None:
    generate_ct(tmp_path / "data", CTOptions(count=1, shape=(8, 8, 8), validation=0))
    path = tmp_path / "data" / "ct_0000.hdf5"
    texts = {f"text {number}": str(number) * 30_000 for number in range(5)}
    with h5py.File(path, "a") as file:
        for name, text in texts.items():
            file.attrs[name] = np.bytes_(text)
    manifest = Manifest.load(tmp_path / "data")
    entry = dataclasses.replace(manifest.files[0], bytes=path.stat().st_size, checksum="")
    dataclasses.replace(manifest, files=(entry,)).save(tmp_path / "data")
    untrusted = FileTrust(untrusted=True)
    convert_dataset(
        tmp_path / "data", tmp_path / "copy", ConvertOptions("hdf5", chunks=(4, 4, 4)),
        trust=untrusted,
    )  # fmt: skip
    with safe_open(tmp_path / "copy" / "ct_0000.hdf5") as file:
        assert texts.items() <= file.texts().items()


def test_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 256 MB, as HDF5 unpacks it in full, where 100 MB are free."""
    generate_ct(tmp_path, CTOptions(count=1, shape=(8, 8, 8), validation=0))
    path = tmp_path / "ct_0000.hdf5"
    with h5py.File(path, "a") as file:
        del file["volume"]
        chunk = (1, 1024, 1024, 128)
        large = file.create_dataset(
            "volume", (1, 8, 8, 8), "i2", chunks=chunk, maxshape=(1, None, None, None),
            compression="gzip", compression_opts=1,
        )  # fmt: skip
        large[0, 0, 0, 0] = 7
    data = ShardDataset(tmp_path, untrusted=True)
    box = Box((0, 0, 0, 0), (1, 1, 1, 1))
    data.read_labels(0)
    status = Path(f"/proc/{reader(data).pid}/status").read_text()
    used = int(status.partition("VmSize:")[2].split()[0]) * 1024
    assert data.read_block(0, box).item() == 7
    data.close()
    monkeypatch.setattr(open_files, "MEMORY", used + 100 * 10**6)
    data = ShardDataset(tmp_path, untrusted=True)
    with pytest.raises(BadSample, match=r"ct_0000\.hdf5: 'volume', sample 0"):
        data.read_block(0, box)
    assert data.read_labels(0).shape == (8, 8, 8)
    data.close()


def test_refusals_are_those_of_the_format(volumes: dict[str, Path], tmp_path: Path) -> None:
    Manifest.load(volumes["hdf5"]).save(tmp_path)
    data = ShardDataset(tmp_path, untrusted=True)
    with pytest.raises(DataError, match=r"ct_0000\.hdf5: No such file"):
        data.read_block(0)
    with h5py.File(tmp_path / "ct_0000.hdf5", "w") as file:
        file["volume"] = h5py.SoftLink("/etc")
    with pytest.raises(DataError, match=r"'/volume' is a soft link to '/etc'"):
        data.read_block(0)
    data.close()
    with pytest.raises(UsageError, match="no driver is possible"):
        ShardDataset(tmp_path, untrusted=True, driver=lambda _: io.BytesIO())


def test_a_file_that_changes(volumes: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(volumes["hdf5"], tmp_path, dirs_exist_ok=True)
    data = ShardDataset(tmp_path, untrusted=True)
    expected = data.read_block(0)
    path = tmp_path / "ct_0000.hdf5"
    os.utime(path, ns=(1, 1))  # the same content: it is opened again
    assert torch.equal(data.read_block(0), expected)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"ct_0000\.hdf5: shrank from"):
        data.read_block(0)
    data.close()


def test_the_process_ends_with_the_data_set(volumes: dict[str, Path]) -> None:
    data = ShardDataset(volumes["numpy"], untrusted=True)
    data.read_block(0)
    first = reader(data).pid
    data.close()
    data.read_block(0)
    second = reader(data).pid
    assert first != second
    del data
    for pid in (first, second):
        assert pid is not None
        while True:  # pytest's time limit ends the test
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.01)


REPLIES = {
    "no JSON": ("b'{'", "failed"),
    "no table": ("b'[1]'", "its reply is no table"),
    "endless": ("b'x' * (1 << 17)", "its reply is too long"),
    "negative": ("""b'{"shape": [-1], "dtype": "<i2"}'""", "describes 'volume' as"),
    "objects": ("""b'{"shape": [1], "dtype": "O"}'""", "holds objects"),
    "text": ("""b'{"shape": "1", "dtype": "<i2"}'""", "describes 'volume' as"),
    "an error in lines": ("""b'{"error": "a\\\\nb"}'""", "a b"),
}


@pytest.mark.parametrize("kind", REPLIES)
def test_replies_of_a_process_that_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever it answers, there is one line, and no crash."""
    content, why = REPLIES[kind]
    script = (
        "import sys; sys.stdin.readline(); "
        f"sys.stdout.buffer.write({content} + bytes([10])); sys.stdout.flush(); sys.stdin.read()"
    )
    monkeypatch.setattr("pydist.data.isolated._START", script)
    monkeypatch.setattr("pydist.data.isolated._LONGEST", 1 << 16)
    process = ReadingProcess("hdf5", (), 1 << 40)
    with pytest.raises(ValueError, match=why) as caught:
        process.open(tmp_path / "x").dataset("volume")
    assert "\n" not in str(caught.value)
    process.close()
    assert np.frombuffer(process.room(16), "u1", 16).sum() == 0
