"""Tests of NIfTI files: full reads, checks of every byte, and unchanged headers on writing."""

from __future__ import annotations

import gzip
import math
import struct
import tracemalloc
from contextlib import closing, nullcontext

import nibabel as nib
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pydist.data.medical.grid import resized_part
from pydist.data.medical.nifti import OpenNifti, outline_of, read_nifti
from pydist.data.medical.nifti_header import without_private
from pydist.data.medical.nifti_writing import write_nifti
from pydist.errors import DataError, DiskError, UsageError
from pydist.partition import Box


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "<f4", ">i2", "float64", "uint16"])
def test_a_file_is_read_as_nibabel_reads_it_and_written_as_it_was(
    tmp_path, write, suffix, kind, dtype
):
    voxels = np.random.default_rng(0).integers(0, 200, (5, 4, 3)).astype(dtype)
    path = write(tmp_path / f"a{suffix}", voxels, kind=kind)
    found = read_nifti(path)
    np.testing.assert_array_equal(found.values(), np.asarray(nib.load(path).dataobj))
    np.testing.assert_array_equal(found.affine, nib.load(path).affine)
    write_nifti(tmp_path / f"b{suffix}", found.stored, found.block)
    unpack = gzip.decompress if suffix == ".nii.gz" else bytes
    assert unpack((tmp_path / f"b{suffix}").read_bytes()) == unpack(path.read_bytes())


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        ("int16", (1, -1024), "int32"),
        ("int16", (-70000, 5), "int64"),
        ("uint8", (2, 0), "int32"),
        ("int16", (0.5, 3), "float64"),
    ],
)
def test_slope_and_intercept_give_hounsfield_units(tmp_path, dtype, scale, expected):
    stored = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    image = nib.Nifti1Image(stored, np.eye(4))
    image.to_filename(tmp_path / "a.nii")
    raw = bytearray((tmp_path / "a.nii").read_bytes())
    raw[112:120] = struct.pack("<ff", *scale)
    (tmp_path / "a.nii").write_bytes(raw)
    values = read_nifti(tmp_path / "a.nii").values()
    assert values.dtype == expected
    np.testing.assert_array_equal(values, stored.astype(float) * scale[0] + scale[1])


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(st.data())
def test_parts_of_an_open_file_are_those_of_the_whole(tmp_path, data):
    shape = data.draw(st.sampled_from([(4, 3, 7), (4, 3, 5, 2)]))
    path = tmp_path / f"a{len(shape)}{data.draw(st.sampled_from(['.nii', '.nii.gz']))}"
    if not path.exists():
        voxels = np.random.default_rng(0).integers(-200, 200, shape).astype(">i2")
        nib.save(nib.Nifti1Image(voxels, np.eye(4)), path)
    expected = read_nifti(path).values().reshape(*shape[:3], -1)
    with closing(OpenNifti(path)) as file:
        for _ in range(data.draw(st.integers(1, 6))):
            ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape[:3]]
            channel = data.draw(st.integers(0, expected.shape[3] - 1))
            place = tuple(slice(lo, hi) for lo, hi in ends)
            found = file.part(place, channel)
            np.testing.assert_array_equal(found, expected[..., channel][place])


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_an_open_file_holds_few_planes(tmp_path, write, suffix):
    path = write(tmp_path / f"a{suffix}", np.zeros((64, 64, 200), np.int16))
    tracemalloc.start()
    with closing(OpenNifti(path)) as file:
        for z in range(200):
            file.part((slice(0, 64), slice(0, 64), slice(max(0, z - 1), z + 1)), 0)
        held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 64 * 64 * 200 * 2 / 5


def test_an_open_file_is_checked_to_its_end(packed):
    packed.write_bytes(packed.read_bytes()[:-4])  # of the checksum
    with closing(OpenNifti(packed)) as file:
        depth = file.about.shape[2]
        file.planes(0, depth - 1)
        with pytest.raises(DataError, match="cut short: the gzip data end early"):
            file.planes(depth - 1, depth)


@pytest.mark.parametrize(("name", "place"), [("scl_slope", 112), ("scl_inter", 116)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_slope_or_intercept_that_is_no_number_is_refused(tmp_path, suffix, name, place, value):
    """nibabel ignores a slope of NaN and would return unscaled values."""
    path = tmp_path / f"a{suffix}"
    nib.Nifti1Image(np.ones((2, 3, 4), np.int16), np.eye(4)).to_filename(path)
    pack, unpack = (gzip.compress, gzip.decompress) if suffix == ".nii.gz" else (bytes, bytes)
    raw = bytearray(unpack(path.read_bytes()))
    raw[place : place + 4] = struct.pack("<f", value)
    path.write_bytes(pack(bytes(raw)))
    for read in (lambda: read_nifti(path).values(), lambda: outline_of(path)):
        with pytest.raises(DataError, match=rf"{path}: {name} is {value}: a finite number is need"):
            read()


def test_values_beyond_float32_are_refused_with_their_range(tmp_path, write):
    """They overflow in float32, and so does interpolation between values just below the limit."""
    path = write(tmp_path / "a.nii", np.arange(-60, 60, dtype=np.int16).reshape(4, 5, 6))
    raw = bytearray(path.read_bytes())
    raw[112:116] = struct.pack("<f", 1e38)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.nii: values from -6e\+39 to 5\.9e\+39 do not fit f"):
        read_nifti(path).values()
    whole, box = Box((0, 0, 0), (4, 5, 6)), Box((0, 0, 0), (3, 7, 9))
    for factor, refused in ((1.8, True), (1.6, False)):
        raw[112:116] = struct.pack("<f", factor * 1e38 / 60)
        path.write_bytes(raw)
        with pytest.raises(DataError, match="do not fit float32") if refused else nullcontext():
            values = resized_part(read_nifti(path).values(), whole, whole.hi, box.hi, box)
            assert np.isfinite(values).all()


@pytest.mark.parametrize("inter", [0, 5, math.nan])
def test_a_slope_of_0_means_values_as_they_are_stored(tmp_path, inter):
    nib.Nifti1Image(np.full((2, 3, 4), 7, np.int16), np.eye(4)).to_filename(tmp_path / "a.nii")
    raw = bytearray((tmp_path / "a.nii").read_bytes())
    raw[112:120] = struct.pack("<ff", 0, inter)
    (tmp_path / "a.nii").write_bytes(raw)
    assert (read_nifti(tmp_path / "a.nii").values() == 7).all()


@pytest.fixture
def packed(tmp_path, write, scan):
    return write(tmp_path / "case.nii.gz", scan[0])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.61, 0.99])
def test_a_cut_file_is_refused_in_one_line(packed, share):
    whole = packed.read_bytes()
    for content in (whole, gzip.decompress(whole)):
        packed.write_bytes(content[: int(share * len(content))])
        with pytest.raises(DataError) as caught:
            read_nifti(packed)
        message = str(caught.value)
        assert message.startswith(f"{packed}: ")
        assert "\n" not in message
    for missing in (1, 4, 8):  # bytes of gzip's trailing checksum and length
        packed.write_bytes(whole[:-missing])
        with pytest.raises(DataError, match="cut short: the gzip data end early"):
            read_nifti(packed)


def test_no_flipped_bit_of_a_compressed_file_goes_unseen(packed):
    whole = packed.read_bytes()
    expected = read_nifti(packed)
    unseen = 0
    for i in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[i] ^= 1 << (i % 8)
        packed.write_bytes(flipped)
        try:
            found = read_nifti(packed)
        except DataError:
            continue
        unseen += 1  # meaningless bits: gzip's time and system, deflate's padding
        assert found.block == expected.block
        np.testing.assert_array_equal(found.stored, expected.stored)
    assert unseen < 9


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(st.data())
def test_damaged_headers_are_refused_or_read_and_never_crash(tmp_path, data):
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    path = tmp_path / "a.nii"
    if not path.exists():
        nib.save(nib.Nifti1Image(voxels, np.eye(4)), path)
    raw = bytearray(path.read_bytes())
    interesting = [*range(4), *range(40, 56), *range(70, 120), *range(252, 348)]
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.sampled_from(interesting))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "b.nii"
    damaged.write_bytes(raw)
    try:
        found = read_nifti(damaged)
        affine, values = found.affine, found.values()
    except DataError as refused:
        lines = str(refused).splitlines()
    else:
        lines = [str(damaged)]
        assert np.isfinite(affine).all()
        assert values.size == found.stored.size
    assert len(lines) == 1
    assert lines[0].startswith(str(damaged))


def header_with(path, **fields) -> bytes:
    image = nib.load(path)
    image.header["vox_offset"] = 352
    for name, value in fields.items():
        image.header[name] = value
    return image.header.binaryblock


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": [3, 32767, 32767, 32767, 1, 1, 1, 1]}, "cut short: .* bytes are declared"),
        ({"dim": [2, 9, 7, 1, 1, 1, 1, 1]}, r"\[9, 7\] voxels: 3 dims are needed"),
        ({"dim": [5, 2, 2, 2, 2, 2, 1, 1]}, "3 dims are needed, or 4 with channels"),
        ({"dim": [3, 9, -7, 5, 1, 1, 1, 1]}, "3 dims are needed"),
        ({"datatype": 128, "bitpix": 24}, "integers and real numbers are possible"),
        ({"datatype": 32, "bitpix": 64}, "integers and real numbers are possible"),
        ({"magic": b"ni1"}, "convert it to .nii"),
        ({"magic": b"xyz"}, "damaged header: magic string"),
        ({"vox_offset": 100}, "damaged header: vox offset 100"),
        ({"vox_offset": 1e9}, r"voxels begin at byte 1e\+09"),
        ({"vox_offset": np.nan}, "voxels begin at byte nan"),
        ({"sizeof_hdr": 300}, "not a NIfTI file"),
    ],
)
def test_what_a_header_can_not_mean_is_said(tmp_path, packed, fields, message):
    path = tmp_path / "a.nii"
    content = gzip.decompress(packed.read_bytes())
    path.write_bytes(header_with(packed, **fields) + content[348:])
    with pytest.raises(DataError, match=message):
        read_nifti(path)


def test_affines_that_flatten_are_refused(tmp_path, packed):
    path = tmp_path / "a.nii"
    content = gzip.decompress(packed.read_bytes())
    for row in ([0, 0, 0, 0], [np.nan, 0, 0, 0], [0, 0.7, 0, 0]):
        path.write_bytes(header_with(packed, srow_x=row, sform_code=1) + content[348:])
        with pytest.raises(DataError, match="not invertible"):
            _ = read_nifti(path).affine


def test_more_than_was_declared_is_refused(packed):
    packed.write_bytes(gzip.compress(gzip.decompress(packed.read_bytes()) + bytes(1 << 21)))
    with pytest.raises(DataError, match="bytes follow the voxels"):
        read_nifti(packed)


def test_nan_is_named_by_its_voxel(tmp_path, write):
    voxels = np.zeros((3, 4, 5), dtype=np.float32)
    voxels[2, 1, 3] = np.nan
    with pytest.raises(DataError, match=r"a\.nii: value nan at voxel \(2, 1, 3\)"):
        read_nifti(write(tmp_path / "a.nii", voxels)).values()


def test_missing_files_and_folders(tmp_path, packed):
    with pytest.raises(DataError, match=r"nowhere\.nii: No such file"):
        read_nifti(tmp_path / "nowhere.nii")
    found = read_nifti(packed)
    with pytest.raises(UsageError, match=r"ends in \.nii or \.nii\.gz"):
        write_nifti(tmp_path / "a.mha", found.stored, found.block)
    with pytest.raises(UsageError, match="do not fit the header's"):
        write_nifti(tmp_path / "a.nii", found.stored[1:], found.block)
    with pytest.raises(DiskError, match="No such file"):
        write_nifti(tmp_path / "no" / "a.nii", found.stored, found.block)


def test_other_numbers_keep_the_place_in_space(tmp_path, write, scan):
    path = write(tmp_path / "a.nii.gz", np.stack([scan[0]] * 2, -1), scale=(2.0, 1.0), cal_max=9)
    found = read_nifti(path)
    write_nifti(tmp_path / "b.nii.gz", scan[1], found.block, "uint8")
    ours, theirs = nib.load(tmp_path / "b.nii.gz"), nib.load(path)
    assert ours.get_data_dtype() == np.uint8
    assert ours.shape == (9, 7, 5)
    np.testing.assert_array_equal(np.asarray(ours.dataobj), scan[1])
    np.testing.assert_array_equal(ours.affine, theirs.affine)
    for name in ("qform_code", "sform_code", "xyzt_units", "pixdim", "quatern_b", "srow_z"):
        np.testing.assert_array_equal(ours.header[name], theirs.header[name])
    again = read_nifti(tmp_path / "b.nii.gz")
    assert again.header.get_slope_inter() == (1, 0)
    np.testing.assert_array_equal(again.values(), scan[1])


def test_free_text_goes_and_nothing_else(packed, tmp_path, write, scan):
    named = write(tmp_path / "b.nii", scan[0], descrip=b"Jane Doe", aux_file=b"jane.txt")
    assert without_private(read_nifti(named).block) == read_nifti(packed).block
