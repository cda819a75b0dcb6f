"""Tests of TFRecord files, against records that Google's own library writes."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

descriptors = pytest.importorskip("google.protobuf.descriptor_pb2")

from google.protobuf import descriptor_pool, message_factory  # noqa: E402

from pydist.data import ShardDataset  # noqa: E402
from pydist.data.convert import convert_dataset  # noqa: E402
from pydist.data.hdf5_rules import Limits  # noqa: E402
from pydist.data.index import index_dataset, verify_dataset  # noqa: E402
from pydist.data.options import ConvertOptions, IndexOptions  # noqa: E402
from pydist.data.tfrecord_file import TfrecordFile  # noqa: E402
from pydist.errors import DataError  # noqa: E402
from support.data.reading import refusal_of  # noqa: E402

X = np.random.default_rng(0).integers(0, 99, (6, 6, 6, 4)).astype("<i2")
Y = np.array([0.5, -1, 2, 3], "<f4")


def example(**features: Any) -> bytes:
    """Returns a `tf.train.Example`, by the message's definition in TensorFlow's example.proto."""
    file = descriptors.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = descriptors.FieldDescriptorProto

    def message(owner: Any, name: str, *fields: tuple[str, int, Any, bool]) -> Any:
        made = owner.add(name=name)
        for field, number, kind, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            added = made.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                added.type, added.type_name = kinds.TYPE_MESSAGE, kind
            else:
                added.type = kind
        return made

    top = file.message_type
    message(top, "BytesList", ("value", 1, kinds.TYPE_BYTES, True))
    message(top, "FloatList", ("value", 1, kinds.TYPE_FLOAT, True))
    message(top, "Int64List", ("value", 1, kinds.TYPE_INT64, True))
    lists = (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List"))
    fields = [(name, n, f".t.{kind}", False) for n, (name, kind) in enumerate(lists, 1)]
    message(top, "Feature", *fields)
    outer = message(top, "Features", ("feature", 1, ".t.Features.FeatureEntry", True))
    entry = message(outer.nested_type, "FeatureEntry", ("key", 1, kinds.TYPE_STRING, False),
                    ("value", 2, ".t.Feature", False))  # fmt: skip
    entry.options.map_entry = True
    message(top, "Example", ("features", 1, ".t.Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))()
    for name, value in features.items():
        feature = made.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif value.dtype.kind == "f":
            feature.float_list.value.extend(value.tolist())
        else:
            feature.int64_list.value.extend(value.tolist())
    return made.SerializeToString()


def crc(content: bytes) -> int:
    """Returns TFRecord's checksum, bit by bit (Castagnoli's polynomial, then masked)."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(content: bytes) -> bytes:
    head = struct.pack("<Q", len(content))
    return head + struct.pack("<I", crc(head)) + content + struct.pack("<I", crc(content))


GOOD = record(example(x=X.tobytes(), y=Y, more=np.arange(3)))


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return refusal_of(lambda: TfrecordFile.open(path), kind=(ValueError, DataError))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("y", [Y, Y.tobytes()], ids=["numbers", "bytes"])
def test_a_folder_of_mlperf(tmp_path: Path, packed: bool, y: Any) -> None:
    for split, count in (("train", 3), ("validation", 1)):
        (tmp_path / "a" / split).mkdir(parents=True)
        for i in range(count):
            content = record(example(x=(X + i).tobytes(), y=y))
            path = tmp_path / "a" / split / f"{i}.tfrecord"
            path.write_bytes(gzip.compress(content) if packed else content)
    manifest = index_dataset(tmp_path / "a", IndexOptions(dataset="x", target="y"))
    assert manifest.splits == {"train": 3, "val": 1}
    assert (manifest.axes, manifest.sample_shape) == ("DHWC", (4, 6, 6, 6))
    assert manifest.target_names == ("Omega_m", "sigma_8", "N_spec", "H_0")
    data = ShardDataset(tmp_path / "a")
    np.testing.assert_array_equal(data.read_block(2), np.moveaxis(X + 2, -1, 0))
    assert data.target(0).tolist() == Y.tolist()
    convert_dataset(tmp_path / "a", tmp_path / "b", ConvertOptions("numpy", "channel-first"))
    assert verify_dataset(tmp_path / "b") == []
    copy = ShardDataset(tmp_path / "b")
    np.testing.assert_array_equal(copy.read_block(1), np.moveaxis(X + 1, -1, 0))
    assert sorted(p.name for p in (tmp_path / "b/train").iterdir()) == ["0", "1", "2"]


def test_names(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(GOOD)
    file = TfrecordFile.open(path)
    with pytest.raises(DataError, match=r"a\.tfrecord: no array 'full'; it has x, y"):
        file.dataset("full")
    path.write_bytes(GOOD + b"x")
    assert "grew from" in (file.change() or "")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cut short: 0 bytes"),
        (GOOD[:-1], "its first record ends at byte"),
        (GOOD + GOOD, "files with one record are read"),
        (b"\1" + GOOD[1:], "checksum of its first record's length differs"),
        (GOOD[:50] + bytes([GOOD[50] ^ 1]) + GOOD[51:], "checksum of its record differs"),
        (gzip.compress(GOOD)[:-1], "its gzip data end early"),
        (gzip.compress(GOOD) + b"x", "other data follow"),
        (b"\x1f\x8b" + GOOD, "damaged gzip data"),
        (record(example(y=Y)), "no feature 'x' in it; it has y"),
        (record(example(x=X.tobytes()[:-2], y=Y)), "x has 863 numbers of int16"),
        (record(example(x=b"", y=Y)), "x has 0 numbers"),
        (record(b"\x0a\x80"), "an integer that does not end"),
        (record(b"\x0a\x7f"), "a field of 127 bytes, of which 0 are"),
        (record(b"\x0b"), "a field of the wire type 3"),
        (record(b"\xff" * 20), "an integer that does not end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",
)
def test_files_that_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    assert why in refusal(tmp_path / "a.tfrecord", content)


def test_a_file_that_expands_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Limits(chunk_bytes=1 << 16)
    monkeypatch.setattr("pydist.data.tfrecord_file.Limits", lambda: small)
    assert "more than 65536 bytes" in refusal(tmp_path / "a", gzip.compress(bytes(1 << 20)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_mutated_records_end_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    """With correct checksums, as an attacker would write them."""
    content = bytearray(example(x=X[:1, :1, :1].tobytes(), y=Y))
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[position] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(bytes(content[: data.draw(st.integers(0, len(content)))])))
    try:
        assert TfrecordFile.open(path).dataset("x").shape == (1, 1, 1, 4)
    except TfrecordFile.errors as error:
        assert "\n" not in str(error)  # noqa: PT017 - it may also be right
