"""Tests of every rule of `safe_open`, each with a file that breaks it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pydist.data.hdf5_rules import Limits
from pydist.data.safe_open import safe_open
from pydist.errors import DataError
from support.data.reading import refusal_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Writes a good file with `full` and a dataset in a group; returns its path."""
    path = tmp_path / "file.hdf5"
    with h5py.File(path, "w") as file:
        file["full"] = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
        file["group/inner"] = np.arange(3.0)
    return path


def refusal(path: Path, name: str, **options: object) -> str:
    with safe_open(path, **options) as file:
        return refusal_of(lambda: file.dataset(name), path)


def low_level(
    path: Path, shape: tuple[int, ...], configure: Callable[[h5p.PropDCID], None]
) -> None:
    """Adds the dataset `odd` with properties that h5py's own interface does not offer."""
    with h5py.File(path, "a") as file:
        creation = h5p.create(h5p.DATASET_CREATE)
        configure(creation)
        h5d.create(file.id, b"odd", h5t.NATIVE_INT16, h5s.create_simple(shape), creation)


def test_good_file(path: Path) -> None:
    with safe_open(path) as file:
        np.testing.assert_array_equal(
            file.dataset("full")[1:, 1], np.arange(24).reshape(4, 3, 2)[1:, 1]
        )
        np.testing.assert_array_equal(file.dataset("/group/inner")[...], [0, 1, 2])
        assert sorted(file.names()) == ["full", "group"]


def test_file_may_be_open_already(path: Path) -> None:
    with h5py.File(path, "r") as first, safe_open(path) as second, safe_open(path) as third:
        for file in (second, third):
            np.testing.assert_array_equal(file.dataset("full")[...], first["full"][...])


def test_text_of_the_file(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.attrs["tag"] = np.bytes_("fixed")
        file.attrs["long"] = "of variable length"
        file.attrs["number"] = 3
    with safe_open(path) as file:
        assert [file.text(n) for n in ("tag", "long", "number", "none")] == ["fixed"] + [None] * 3


def test_missing_dataset_is_named_with_what_there_is(path: Path) -> None:
    assert "no 'fulll' in '/'; it has full, group" in refusal(path, "fulll")
    assert "no 'x' in '/group'; it has inner" in refusal(path, "group/x")
    assert "is a group" in refusal(path, "group")
    assert "is a group" in refusal(path, "/")
    assert "'/full' is a dataset, not a group" in refusal(path, "full/inner")
    assert "too deep" in refusal(path, "a/" * 20)


def test_names_in_a_message_are_few(tmp_path: Path) -> None:
    path = tmp_path / "many.hdf5"
    with h5py.File(path, "w") as file:
        for i in range(100):
            file[f"d{i:03}"] = 0
    assert refusal(path, "x").count("d0") == 20


def test_external_storage(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"password")
    with h5py.File(path, "a") as file:
        file.create_dataset("odd", (8,), "u1", external=[(str(secret), 0, 8)])
    assert "external storage" in refusal(path, "odd")
    assert "external storage" in refusal(path, "odd", allow_roots=[tmp_path])


def test_soft_link_at_any_component(path: Path, tmp_path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["soft"] = h5py.SoftLink("/full")
        file["other"] = h5py.SoftLink("/group")
        file["group/up"] = h5py.SoftLink("../full")
        file["group/near"] = h5py.SoftLink("inner")
    assert "'/soft' is a soft link to '/full'" in refusal(path, "soft")
    assert "'/other' is a soft link" in refusal(path, "other/inner")
    with safe_open(path, allow_roots=[tmp_path]) as file:
        assert file.dataset("soft").shape == (4, 3, 2)
        assert file.dataset("other/inner").shape == (3,)
        assert file.dataset("group/near").shape == (3,)
    assert "no '..' in '/group'" in refusal(path, "group/up", allow_roots=[tmp_path])


def test_circle_of_links(path: Path, tmp_path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["a"] = h5py.SoftLink("/b")
        file["b"] = h5py.SoftLink("/a")
        file["c"] = h5py.ExternalLink("file.hdf5", "c")
    assert "circle" in refusal(path, "a", allow_roots=[tmp_path])
    with safe_open(path, allow_roots=[tmp_path]) as file, pytest.raises(DataError, match="circle"):
        file.dataset("c")


def test_external_link(path: Path, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        with h5py.File(folder / "other.hdf5", "w") as file:
            file["x/y"] = np.arange(5)
            file["soft"] = h5py.SoftLink("/x/y")
    with h5py.File(path, "a") as file:
        file["in"] = h5py.ExternalLink("in/other.hdf5", "/x")
        file["out"] = h5py.ExternalLink("in/../out/other.hdf5", "/x")
        file["soft"] = h5py.ExternalLink("in/other.hdf5", "/soft")
        file["gone"] = h5py.ExternalLink("in/gone.hdf5", "/x")
    assert "external link to 'in/other.hdf5', outside allow_roots (none)" in refusal(path, "in/y")
    assert "outside allow_roots" in refusal(path, "out/y", allow_roots=[inside])
    with safe_open(path, allow_roots=[inside]) as file:
        np.testing.assert_array_equal(file.dataset("in/y")[...], np.arange(5))
        np.testing.assert_array_equal(file.dataset("soft")[...], np.arange(5))
        with pytest.raises(DataError, match=r"gone\.hdf5: No such file"):
            file.dataset("gone")


def test_external_link_to_a_dataset_in_chunks_and_to_a_virtual_one(
    path: Path, tmp_path: Path
) -> None:
    values = np.arange(32 * 32 * 32).reshape(32, 32, 32)
    (tmp_path / "in").mkdir()
    with h5py.File(tmp_path / "in" / "part.hdf5", "w") as file:
        file["x"] = values
    with h5py.File(tmp_path / "in" / "other.hdf5", "w") as file:
        file.create_dataset("chunked", data=values, chunks=(16, 16, 16))
        layout = h5py.VirtualLayout(values.shape, values.dtype)
        layout[:] = h5py.VirtualSource("part.hdf5", "x", values.shape)  # beside other.hdf5
        file.create_virtual_dataset("virtual", layout)
        layout[:] = h5py.VirtualSource(".", "chunked", values.shape)
        file.create_virtual_dataset("of the same file", layout)
        file.create_dataset("never", (4,), "i8")
    names = ("chunked", "virtual", "of the same file", "never")
    with h5py.File(path, "a") as file:
        for name in names:
            file[name] = h5py.ExternalLink("in/other.hdf5", f"/{name}")
    with safe_open(path, allow_roots=[tmp_path]) as file:
        for name in names[:3]:
            np.testing.assert_array_equal(file.read(file.dataset(name), ()), values)
        with pytest.raises(DataError, match=r"other\.hdf5: '/never' .*never written"):
            file.dataset("never")


def test_link_through_a_symlink_out_of_the_root(path: Path, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    with h5py.File(outside / "other.hdf5", "w") as file:
        file["x"] = np.arange(5)
    (inside / "door.hdf5").symlink_to(outside / "other.hdf5")
    with h5py.File(path, "a") as file:
        file["x"] = h5py.ExternalLink("in/door.hdf5", "/x")
    assert "outside allow_roots" in refusal(path, "x", allow_roots=[inside])


def test_virtual_dataset(path: Path, tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        with h5py.File(folder / "part.hdf5", "w") as file:
            file["x"] = np.arange(4)
            file.create_dataset("never", (4,), "i8")
    with h5py.File(path, "a") as file:
        sources = {
            "good": ("in/part.hdf5", "x"),
            "bad": ("out/part.hdf5", "x"),
            "gone": ("in/gone.hdf5", "x"),
            "empty": ("in/part.hdf5", "never"),
        }
        for name, (part, inner) in sources.items():
            layout = h5py.VirtualLayout((4,), "i8")
            layout[:] = h5py.VirtualSource(part, inner, (4,))
            file.create_virtual_dataset(name, layout)
        pattern = h5p.create(h5p.DATASET_CREATE)
        space = h5s.create_simple((4,), (h5s.UNLIMITED,))
        space.select_hyperslab((0,), (h5s.UNLIMITED,), (4,), (4,))
        pattern.set_virtual(space, b"in/part%b.hdf5", b"x", h5s.create_simple((4,)))
        space.select_all()
        h5d.create(file.id, b"pattern", h5t.NATIVE_INT64, space, pattern)
    assert "virtual dataset with the source 'in/part.hdf5'" in refusal(path, "good")
    with safe_open(path, allow_roots=[inside]) as file:
        np.testing.assert_array_equal(file.dataset("good")[...], np.arange(4))
        for name, why in {
            "bad": "outside allow_roots",
            "gone": "No such file",
            "empty": "never written",
            "pattern": "by pattern",
        }.items():
            with pytest.raises(DataError, match=why):
                file.dataset(name)


def test_filter_plugin(path: Path) -> None:
    def unknown_filter(creation: h5p.PropDCID) -> None:
        creation.set_chunk((4,))
        creation.set_filter(32015, h5z.FLAG_OPTIONAL)  # zstd, a registered plugin

    low_level(path, (8,), unknown_filter)
    assert "needs the filter plugin 32015; possible are deflate" in refusal(path, "odd")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.array(["a", "b"], dtype=h5py.string_dtype()), "strings"),
        (np.array([b"a", b"b"]), "strings"),
        (np.zeros(3, dtype=[("x", "f4"), ("y", "i4")]), "compound values"),
        (np.zeros(3, dtype=complex), "compound values"),
        (np.zeros(3, dtype=bool), "an enumeration"),
        (np.void(b"abc"), "opaque bytes"),
        (np.zeros(3, dtype=np.longdouble), "16 bytes"),
    ],
)
def test_types_that_are_not_numbers(path: Path, value: np.ndarray, what: str) -> None:
    with h5py.File(path, "a") as file:
        file["odd"] = value
    assert what in refusal(path, "odd")


def test_variable_length_and_references(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset("vlen", (3,), h5py.vlen_dtype(np.int32))
        file.create_dataset("ref", (3,), h5py.ref_dtype)
    assert "values of variable length" in refusal(path, "vlen")
    assert "references" in refusal(path, "ref")


def test_scalar_and_empty(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["scalar"] = 3.0
        file["empty"] = h5py.Empty("f4")
    assert "not an array" in refusal(path, "scalar")
    assert "not an array" in refusal(path, "empty")


def test_shape_bomb(path: Path) -> None:
    def chunked(creation: h5p.PropDCID) -> None:
        creation.set_chunk((1 << 20,))

    low_level(path, (1 << 46,), chunked)
    assert "declares 140737488355328 bytes and holds 0" in refusal(path, "odd")


def test_huge_chunk(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset("odd", data=np.zeros(4096, np.int8), chunks=(4096,))
    assert "chunks of 4096 bytes" in refusal(path, "odd", limits=Limits(chunk_bytes=4095))


def test_what_was_never_written(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset("contiguous", (10,), "f4")
        half = file.create_dataset("chunked", (10,), "f4", chunks=(3,))
        half[:4] = 1
    assert "0 of 40 bytes" in refusal(path, "contiguous")
    assert "2 of 4 chunks are missing" in refusal(path, "chunked")


def test_files_that_are_not_hdf5(tmp_path: Path) -> None:
    empty, text = tmp_path / "empty.hdf5", tmp_path / "text.hdf5"
    empty.touch()
    text.write_text("no HDF5 at all " * 100)
    for path, why in (
        (tmp_path / "none.hdf5", "No such file"),
        (empty, "empty"),
        (text, "not HDF5"),
        (tmp_path, "not a regular file"),
    ):
        with pytest.raises(DataError, match=why) as caught:
            safe_open(path)
        assert str(path) in str(caught.value)


def test_number_types_of_odd_form(path: Path) -> None:
    odd = h5t.NATIVE_INT16.copy()
    odd.set_precision(3)
    odd.set_offset(9)
    with h5py.File(path, "a") as file:
        h5d.create(file.id, b"odd", odd, h5s.create_simple((4,))).write(
            h5s.ALL, h5s.ALL, np.zeros(4, np.int16)
        )
        file["big"] = np.arange(4, dtype=">i2")
    assert "unusual form" in refusal(path, "odd")
    with safe_open(path) as file:
        np.testing.assert_array_equal(file.dataset("big")[...], np.arange(4))


def test_chunk_of_no_bytes_is_refused_before_hdf5_reads_it(path: Path) -> None:
    """HDF5 2.0 ends the process with a segmentation fault when it unpacks such a chunk."""
    with h5py.File(path, "a") as file:
        odd = file.create_dataset("odd", data=np.zeros(64), chunks=(8,), compression="gzip")
        size = odd.id.get_chunk_info(3).size
    image = bytearray(path.read_bytes())
    # A node of the chunks' tree gives each chunk's size, filter mask and offset in the array.
    key = size.to_bytes(4, "little") + bytes(4) + (24).to_bytes(8, "little")
    position = image.index(key)
    assert image.count(key) == 1
    image[position : position + 4] = bytes(4)
    path.write_bytes(image)
    assert "the chunk at (24,) has 0 bytes" in refusal(path, "odd")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_cut_and_damaged_files_end_in_a_data_error(path: Path, data: st.DataObject) -> None:
    """A wrong byte gives either the right numbers or one `DataError`."""
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)), "cut")
    image = bytearray(whole[:cut] if data.draw(st.booleans(), "truncate") else whole)
    for position in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=3), "flips"):
        if position < len(image):
            image[position] ^= data.draw(st.integers(1, 255))
    message = ""
    try:
        with safe_open("damaged.hdf5", driver=io.BytesIO(image)) as file:
            assert file.dataset("full").shape is not None
    except DataError as error:
        message = str(error)
    assert "\n" not in message
