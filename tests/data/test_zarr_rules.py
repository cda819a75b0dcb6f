"""Tests of every rule on untrusted Zarr files, each with a file that breaks it."""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("zarr")

from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd

from pydist.data.formats import Storage
from pydist.data.hdf5_rules import Limits
from pydist.data.zarr_file import ZarrFile
from pydist.data.zarr_rules import check_array
from pydist.data.zarr_store import unpack
from pydist.errors import DataError
from support.data.reading import refusal_of

VALUES = np.arange(64, dtype="int16").reshape(1, 4, 4, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Writes a good file with the arrays `full` and, in shards, `sharded`; returns its path."""
    path = tmp_path / "file.zarr"
    ZarrFile.write(path, {"full": VALUES}, {}, Storage((2, 2, 2), (), "gzip"))
    ZarrFile.write(tmp_path / "s", {"sharded": VALUES}, {}, Storage((2, 2, 2), (4, 4, 4), "zstd"))
    (tmp_path / "s/sharded").rename(path / "sharded")
    return path


def read(path: Path, name: str, **options: Any) -> np.ndarray:
    """Reads an array, with errors in one line as `ShardDataset` makes them."""
    file = ZarrFile.open(path, **options)
    array = file.dataset(name)
    if np.prod(array.shape, dtype=object) > 1 << 20:
        return np.zeros(0)
    try:
        found = file.read(array, ())
    except file.errors as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from error
    assert found.shape == array.shape
    return found


def refusal(path: Path, name: str = "full", **options: Any) -> str:
    return refusal_of(lambda: read(path, name, **options), path)


def edit(path: Path, change: Callable[[Any], object], name: str = "full") -> None:
    """Changes an array's metadata."""
    file = path / name / "zarr.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def codec(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


BYTES = codec("bytes", endian="little")


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"zarr_format": 2}, "not of Zarr version 3"),
        ({"node_type": "group"}, "is a group"),
        ({"data_type": "object"}, "holds 'object'; possible are bool, int8"),
        ({"data_type": "complex64"}, "holds 'complex64'"),
        ({"data_type": {"name": "structured", "configuration": {}}}, "holds {'name'"),
        ({"data_type": ["int16"]}, "holds .*int16"),
        ({"shape": [1, 4, 4, -4]}, "its shape is"),
        ({"shape": [1, 4, 4, 4.0]}, "its shape is"),
        ({"shape": [1, 4, 4, True]}, "its shape is"),
        ({"shape": [1 << 63]}, "its shape is"),
        ({"shape": [1] * 33}, "up to 32 integers"),
        ({"shape": "1444"}, "its shape is"),
        ({"shape": [1, 4, 4]}, "have not the array's 3 dims"),
        ({"shape": [1, 1 << 40, 4, 4]}, "declares 35184372088832 bytes and holds"),
        ({"chunk_grid": codec("rectilinear")}, "its chunk grid is 'rectilinear'"),
        ({"chunk_grid": codec("regular", chunk_shape=[1, 2, 0, 2])}, "its chunk shape is"),
        ({"chunk_grid": codec("regular", chunk_shape=[1, 1 << 40, 1 << 40, 2])}, "has chunks of"),
        ({"chunk_grid": codec("regular")}, "its chunk shape is None"),
        ({"chunk_key_encoding": codec("default", separator="../")}, "its separator is '../'"),
        ({"chunk_key_encoding": codec("suffix", suffix="/../x")}, "its key encoding is 'suffix'"),
        ({"storage_transformers": [codec("x")]}, "storage transformers"),
        ({"codecs": []}, "its codecs are"),
        ({"codecs": [BYTES] * 9}, "1 to 8 are expected"),
        ({"codecs": [BYTES, codec("gzip", level=1), codec("zstd")]}, "compressed twice"),
        ({"codecs": [codec("numcodecs.pickle")]}, "a codec is 'numcodecs.pickle'"),
        ({"codecs": [codec("vlen-bytes")]}, "a codec is 'vlen-bytes'"),
        ({"codecs": [BYTES, codec("numcodecs.zfpy")]}, "possible are transpose, bytes, sharding"),
        ({"codecs": [{"configuration": {}}]}, "a codec is"),
        ({"codecs": [BYTES, 5]}, "a codec is 5"),
        ({"codecs": [{"name": "bytes", "configuration": [1]}]}, "a table is expected"),
        ({"codecs": [codec("gzip", level=1)]}, "damaged"),
        ({"codecs": [codec("transpose", order=[0, 0, 1, 2]), BYTES]}, "damaged"),
        ({"fill_value": "x"}, "damaged"),
        ({"fill_value": None}, "damaged"),
    ],
)
def test_metadata_that_are_refused(path: Path, entries: dict[str, Any], why: str) -> None:
    edit(path, lambda record: record.update(entries))
    message = refusal(path)
    assert re.search(why, message), message


SHARDING = {
    "chunk_shape": [1, 2, 2, 2], "codecs": [BYTES], "index_codecs": [BYTES, {"name": "crc32c"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"chunk_shape": [1, 3, 2, 2]}, "do not divide shards"),
        ({"chunk_shape": [1, 2, 2]}, "do not divide shards"),
        ({"codecs": [codec("sharding_indexed", **SHARDING)]}, "shards in its shards"),
        ({"codecs": [codec("numcodecs.pickle")]}, "a codec is"),
        ({"index_codecs": [BYTES, codec("gzip", level=1)]}, "an index codec is 'gzip'"),
        ({"index_codecs": []}, "its index codecs are"),
        ({"index_location": "middle"}, "the index of its shards is at 'middle'"),
    ],
)
def test_shards_that_are_refused(path: Path, changes: dict[str, Any], why: str) -> None:
    def change(record: Any) -> None:
        record["codecs"] = [codec("sharding_indexed", **{**SHARDING, **changes})]

    edit(path, change, "sharded")
    assert why in refusal(path, "sharded")


def test_shards_with_too_many_chunks() -> None:
    record = {
        "zarr_format": 3, "node_type": "array", "shape": [1 << 30], "data_type": "int8",
        "chunk_grid": codec("regular", chunk_shape=[1 << 30]), "chunk_key_encoding": "default",
        "codecs": [codec("sharding_indexed", **{**SHARDING, "chunk_shape": [1]})],
    }  # fmt: skip
    with pytest.raises(DataError, match="has shards of 1073741824 chunks; 1048576 are possible"):
        check_array("x", record, Limits())
    record["codecs"] = [codec("sharding_indexed", **{**SHARDING, "chunk_shape": [1 << 29]})]
    with pytest.raises(DataError, match="has chunks of 536870912 bytes; 1000 are possible"):
        check_array("x", record, Limits(chunk_bytes=1000))
    with pytest.raises(DataError, match="has shards of 1073741824 bytes; 1000 are possible"):
        check_array("x", record, Limits(declared_bytes=1000))


@pytest.mark.parametrize("name", ["..", "../file.zarr/full", "/full", "full/", "", ".", "a\0b"])
def test_names_that_lead_out(path: Path, name: str) -> None:
    assert "leads out of it, or is no name in it" in refusal(path, name)


def test_names_that_lie_too_deep(path: Path) -> None:
    assert "too deep" in refusal(path, "a/" * 20 + "b")


def test_symbolic_links(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    chunk, folder = path / "full/c/0/0/0/0", path / "full"
    chunk.rename(outside)
    chunk.symlink_to(outside)
    assert f"0/0/0/0: a link to {outside}, outside allow_roots (none)" in refusal(path)
    file = ZarrFile.open(path, allow_roots=[tmp_path])
    np.testing.assert_array_equal(file.read(file.dataset("full"), ()), VALUES)
    chunk.unlink()
    outside.rename(chunk)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert "outside allow_roots" in refusal(path)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    (folder / "c").rename(path / "moved")
    (folder / "c").symlink_to("../moved", target_is_directory=True)  # which stays in the file
    file = ZarrFile.open(path)
    np.testing.assert_array_equal(file.read(file.dataset("full"), ()), VALUES)


def test_a_pipe_in_place_of_a_chunk_does_not_block(path: Path) -> None:
    chunk = path / "full/c/0/0/0/0"
    chunk.unlink()
    os.mkfifo(chunk)
    assert "not a regular file" in refusal(path)
    (path / "full/zarr.json").unlink()
    os.mkfifo(path / "full/zarr.json")
    assert "not a regular file" in refusal(path)


def test_metadata_that_are_no_json(path: Path) -> None:
    for text in (b"", b"{", b"\xff", b"[" * 100_000, b'{"a": ' * 70 + b"1" + b"}" * 70):
        (path / "full/zarr.json").write_bytes(text)
        assert "not JSON" in refusal(path)
    (path / "full/zarr.json").write_bytes(b" " * ((1 << 24) + 1))
    assert "more than 16777216 bytes" in refusal(path)


def test_chunks_that_expand_beyond_what_they_declare(path: Path) -> None:
    chunk = path / "full/c/0/0/0/0"
    chunk.write_bytes(gzip.compress(bytes(1 << 24)))
    assert "it expands to more bytes where 16 are declared" in refusal(path)
    chunk.write_bytes(bytes(1 << 17))
    assert "has 131072 bytes; its values need up to" in refusal(path)


def blosc_claiming(size: int) -> bytes:
    packed = bytearray(Blosc().encode(bytes(1000)))
    packed[4:8] = size.to_bytes(4, "little")
    return bytes(packed)


def zstd_claiming(size: int) -> bytes:
    """Returns a frame whose header declares its content in 8 bytes (RFC 8878)."""
    packed = Zstd().encode(bytes(1000))
    assert packed[4] >> 6 == 1  # two bytes: 256 to 65791
    return packed[:4] + bytes([packed[4] | 0xC0]) + size.to_bytes(8, "little") + packed[7:]


def zstd_of_unknown_size(content: bytes) -> bytes:
    """Returns a frame that does not declare its size, with one block as it is (RFC 8878)."""
    return bytes.fromhex("28b52ffd0058") + (len(content) << 3 | 1).to_bytes(3, "little") + content


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("gzip", gzip.compress(bytes(1001))),
        ("gzip", gzip.compress(bytes(999))),
        ("gzip", gzip.compress(bytes(1000))[:-1]),
        ("gzip", gzip.compress(bytes(1000)) + b"x"),
        ("gzip", gzip.compress(bytes(500)) * 3),
        ("gzip", b""),
        ("zstd", Zstd().encode(bytes(1001))),
        ("zstd", Zstd().encode(bytes(999))),
        ("zstd", Zstd().encode(bytes(1000))[:-1]),
        ("zstd", Zstd().encode(bytes(1000)) * 2),
        ("zstd", zstd_claiming(1 << 60)),
        ("zstd", zstd_claiming((1 << 64) - 1)),
        ("zstd", zstd_of_unknown_size(bytes(999))),
        ("zstd", zstd_of_unknown_size(bytes(1001))),
        ("zstd", b"\x28\xb5\x2f\xfd"),
        ("zstd", b"x" * 100),
        ("blosc", Blosc().encode(bytes(1001))),
        ("blosc", Blosc().encode(bytes(1000))[:-1]),
        ("blosc", Blosc().encode(bytes(1000)) + b"x"),
        ("blosc", blosc_claiming((1 << 31) - 1)),
        ("blosc", b"\2" * 15),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",
)
def test_damaged_compressed_data(name: str, packed: bytes) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        unpack(name, np.frombuffer(packed, np.uint8), 1000)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("size", [1, 255, 256, 1000, 65_791, 65_792, 200_000])
def test_intact_compressed_data(size: int) -> None:
    values = np.arange(size, dtype=np.uint8)
    halves = values[: size // 2], values[size // 2 :]
    for name, packed in (
        ("gzip", gzip.compress(values)),
        ("gzip", b"".join(map(gzip.compress, halves))),
        ("zstd", Zstd().encode(values)),
        ("zstd", zstd_of_unknown_size(values[:1000].tobytes()) if size <= 1000 else b""),
        ("blosc", Blosc().encode(values)),
    ):
        if packed:
            found = unpack(name, np.frombuffer(packed, np.uint8), size)
            np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_an_index_that_leads_out_of_its_shard(path: Path, where: int) -> None:
    edit(
        path,
        lambda record: record["codecs"][0]["configuration"].update(index_codecs=[BYTES]),
        "sharded",
    )
    shard = path / "sharded/c/0/0/0/0"
    content = shard.read_bytes()[:-4]  # without the checksum of the index
    index = np.frombuffer(content[-128:], "<u8").copy()
    index[where] = (1 << 64) - 10 if where < 2 else 1 << 40
    shard.write_bytes(content[:-128] + index.tobytes())
    file = ZarrFile.open(path)
    array = file.dataset("sharded")
    box = tuple(slice(0, n) for n in (1, 2, 2, 4))  # not the full shard
    for window in (box, ()):
        with pytest.raises(file.errors):
            file.read(array, window)


NAUGHTY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["bytes", "gzip", "default", "regular", "int16", "NaN", "0x7fc00000"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), name=st.sampled_from(["full", "sharded"]))
def test_mutated_metadata_end_in_one_line(path: Path, data: st.DataObject, name: str) -> None:
    """A wrong entry gives either numbers of the declared shape, or one `DataError`."""
    file = path / name / "zarr.json"
    before = file.read_text()
    record = copy.deepcopy(json.loads(before))
    for _ in range(data.draw(st.integers(1, 2))):
        here, places = record, []
        while isinstance(here, dict | list) and here and (not places or data.draw(st.booleans())):
            keys = sorted(here) if isinstance(here, dict) else range(len(here))
            places.append((here, data.draw(st.sampled_from(list(keys)))))
            here = here[places[-1][1]]
        if places:
            owner, key = places[-1]
            owner[key] = data.draw(NAUGHTY)
    message = ""
    file.write_text(json.dumps(record))
    try:
        read(path, name)
    except DataError as error:
        message = str(error)
    finally:
        file.write_text(before)
    assert "\n" not in message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), name=st.sampled_from(["full", "sharded"]))
def test_mutated_chunks_end_in_one_line(path: Path, data: st.DataObject, name: str) -> None:
    chunk = path / name / "c/0/0/0/0"
    before = chunk.read_bytes()
    image = bytearray(before[: data.draw(st.integers(0, len(before)))])
    for position in data.draw(st.lists(st.integers(0, len(before) - 1), max_size=3)):
        if position < len(image):
            image[position] ^= data.draw(st.integers(1, 255))
    chunk.write_bytes(image)
    try:
        assert read(path, name).shape == VALUES.shape
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017 - it may also be right
    finally:
        chunk.write_bytes(before)
