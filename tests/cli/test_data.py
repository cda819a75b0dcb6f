"""Tests of `pydist data`: one line reports the result or the mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import pytest

from pydist.cli.main import main
from pydist.data.lock import FolderLock
from support.data.damage import flip


def test_ct_to_nifti_to_hdf5_and_verified(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = ["data", "ct", "a", "--count", "3", "--shape", "8", "12", "16", "--format", "both"]
    assert main(made) == 0
    assert "3 synthetic CT volumes of 8 × 12 × 16 voxels → 3 samples" in capsys.readouterr().out
    assert main(["data", "nifti", "a/nifti", "b", "--cube", "8", "--validation", "0.3"]) == 0
    assert "3 cases → 3 samples of 8³ (2 train, 1 val) in b" in capsys.readouterr().out
    label = tmp_path / "a" / "nifti" / "labelsTr" / "ct_0001.nii.gz"
    label.write_bytes(label.read_bytes()[:-9])
    assert main(["data", "nifti", "a/nifti", "c"]) == 65
    assert "ct_0001.nii.gz: cut short" in capsys.readouterr().err
    assert main(["data", "nifti", "a/nifti", "c", "--on-bad-case", "skip"]) == 0
    shown = capsys.readouterr().out
    assert "rejected" in shown
    assert "2 cases, 1 rejected → 2 samples of 8 × 16 × 16" in shown

    assert main(["data", "verify", "b"]) == 0
    flip(tmp_path / "b" / "ct_0000.hdf5", -1)
    capsys.readouterr()
    assert main(["data", "verify", "b"]) == 65
    shown = capsys.readouterr()
    assert "ct_0000.hdf5: checksum" in shown.out
    assert "b has damaged or unusable files (files: 1)" in shown.err


def test_several_shapes_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for count, extent in ((1, "8"), (2, "16")):
        shape = ["--shape", "8", "8", extent]
        options = ["--count", str(count), *shape, "--format", "nifti", "--overwrite"]
        assert main(["data", "ct", "a", *options]) == 0
        first = tmp_path / "a" / "imagesTr" / "ct_0000_0000.nii.gz"
        if count == 1:
            kept = first.read_bytes(), (tmp_path / "a/labelsTr/ct_0000.nii.gz").read_bytes()
    first.write_bytes(kept[0])
    (tmp_path / "a/labelsTr/ct_0000.nii.gz").write_bytes(kept[1])
    capsys.readouterr()
    assert main(["data", "nifti", "a", "b"]) == 0
    assert "2 samples of up to 8 × 8 × 16" in capsys.readouterr().out


def test_export(tmp_path, capsys):
    assert main(["export", str(tmp_path), str(tmp_path / "m.safetensors")]) == 73
    assert "no checkpoint here" in capsys.readouterr().err


def test_pack_and_verify(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.txt", "a/b/y.txt", "a/b/z.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name * 100)
    assert main(["data", "pack", "a", "-o", "p", "--codec", "zstd", "--partitions", "2"]) == 0
    shown = capsys.readouterr().out
    assert "data       3 files in 2 folders, 2,500 → " in shown
    assert " in p  0 s" in shown
    assert main(["data", "verify", "p"]) == 0
    assert "verified   p" in capsys.readouterr().out
    assert main(["data", "pack", "a", "-o", "p", "--seed", "1"]) == 2
    assert "p has a pack of other files or with other options" in capsys.readouterr().err
    part = tmp_path / "p" / "part-00000.pack"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert main(["data", "verify", "p"]) == 65
    shown = capsys.readouterr()
    assert f"damaged    {tmp_path}/p: " in shown.out
    assert "p does not match its checksums (files: 1)" in shown.err


def test_index_convert_info(tmp_path, capsys, monkeypatch):
    pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    made = ["data", "universes", "a", "--count", "4", "--width", "8", "--layout", "cosmoflow"]
    assert main(made) == 0
    (tmp_path / "a" / "dataset.json").unlink()
    assert main(["data", "index", "a", "--width", "8", "--validation", "0.5"]) == 0
    assert "4 hdf5 files → 32 samples of 8³ (16 train, 16 val) in a" in capsys.readouterr().out
    chunks = ["--chunks", "4", "4", "4", "--shards", "8", "8", "8", "--compression", "zstd"]
    converted = ["data", "convert", "a", "b", "--layout", "channel-first", "--workers", "1"]
    assert main([*converted, *chunks]) == 0
    assert "32 zarr files → 32 samples of 8³" in capsys.readouterr().out
    assert main(["data", "info", "b"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "samples    32 (16 train, 16 val)",
        "shape      4 channels; 8 × 8 × 8 voxels: 32",
        "stored     int16 CDHW: full, unitPar",
        "normalize  none, log1p, window, mean, standardize",
        "values     not read; --deep reads all of them",
    ):
        assert line in shown
    assert main(["data", "info", "b", "--deep", "--workers", "1"]) == 0
    assert "; 0 NaN, 0 infinite values" in capsys.readouterr().out
    assert main(["data", "info", "b", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["format"], described["deep"]["val"]["files"]) == ("zarr", 16)
    assert main(["data", "verify", "b", "--workers", "2"]) == 0
    (tmp_path / "b/univ_000001_3.zarr/full/c/0/0/0/0").write_bytes(b"")
    capsys.readouterr()
    assert main(["data", "info", "b", "--deep", "--workers", "1"]) == 65
    shown = capsys.readouterr()
    assert "damaged    b/univ_000001_3.zarr: " in shown.out
    assert "b has damaged or missing files (1)" in shown.err
    assert main(["data", "index", "a", "--width", "8", "--class-names", "x", "y"]) == 65
    assert "with class_names it is one number from 0 to 1" in capsys.readouterr().err


def test_labels_in_info(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "ct", "a", "--count", "1", "--shape", "8", "8", "8"]) == 0
    assert main(["data", "info", "a", "--deep", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "label 0 (background): " in shown
    assert "shape      1 channel; " in shown
    assert main(["data", "info", "b"]) == 65
    assert main(["data", "convert", "a", "b", "--format", "tiff"]) == 2
    assert main(["data", "index", "a"]) == 2
    assert "--overwrite (overwrite=True) replaces its manifest" in capsys.readouterr().err


def test_a_split_without_a_good_file_has_no_range_in_info(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = ["data", "ct", "a", "--count", "2", "--shape", "8", "8", "8", "--validation", "0.5"]
    assert main(make) == 0
    (tmp_path / "a" / "ct_0001.hdf5").unlink()
    assert main(["data", "info", "a", "--deep", "--workers", "1"]) == 65
    assert "val        no file could be read" in capsys.readouterr().out.splitlines()


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """Makes a pack of 3 files in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("x.txt", "b/y.txt", "b/z.txt"):
        path = tmp_path / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name * 100)
    assert main(["data", "pack", "a", "-o", "p", "--codec", "zstd", "--partitions", "2"]) == 0
    return tmp_path / "p"


def test_info_of_a_pack(packed, capsys):
    capsys.readouterr()
    assert main(["data", "info", "p"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "files      3 in 2 folders, 1.9 kB"
    assert shown[1].startswith("stored     ")
    assert shown[1].endswith("%): 3 zstd")
    assert shown[2:] == [
        "pack       2 partitions, all here",
        "checksums  not compared; --deep compares all of them",
    ]
    assert main(["data", "info", "p", "--deep"]) == 0
    assert "checksums  all match" in capsys.readouterr().out
    part = packed / "part-00000.pack"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + b"?")
    assert main(["data", "info", "p", "--deep"]) == 65
    shown = capsys.readouterr()
    assert f"damaged    {Path.cwd()}/p: " in shown.out
    assert "p does not match its checksums (files: 1)" in shown.err
    part.unlink()
    assert main(["data", "info", "p", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["files"], described["folders"], described["bytes"]) == (3, 2, 1900)
    assert (described["codecs"], described["options"]["codec"]) == ({"zstd": 3}, "zstd")
    assert (described["partitions"], described["partitions_here"]) == (2, 1)


@pytest.mark.parametrize("workers", ["1", "3"])
def test_verify_of_a_pack_reads_all_of_it(packed, capsys, workers):
    options = ["--workers", workers]
    assert main(["data", "verify", "p", *options]) == 0
    assert main(["data", "verify", "p", "--deep", *options]) == 0
    for part in packed.glob("*.pack"):
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    capsys.readouterr()
    assert main(["data", "verify", "p", *options]) == 65
    assert "p does not match its checksums (files: 2)" in capsys.readouterr().err
    assert main(["data", "verify", "p", "--workers", "0"]) == 2


@pytest.mark.parametrize("command", ["info", "verify"])
@pytest.mark.parametrize("option", [["--untrusted"], ["--allow-roots", "a"]])
def test_options_about_the_files_of_data_sets_are_refused_with_a_pack(
    packed, capsys, command, option
):
    assert main(["data", command, "p", *option]) == 2
    assert "are for data sets, and p is a pack" in capsys.readouterr().err


def test_verify_deep_finds_what_training_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("a", 1.0), ("b", float("nan"))):
        with h5py.File(tmp_path / f"{name}.hdf5", "w") as file:
            file["full"] = [[[[1.0, value]] * 2] * 2] * 2
            file["unitPar"] = [0.5]
    index = ["data", "index", ".", "--no-statistics", "--validation", "0", "--workers", "1"]
    assert main(index) == 0
    verify = ["data", "verify", ".", "--workers", "1"]
    assert main(verify) == 0
    for _ in range(2):
        capsys.readouterr()
        assert main([*verify, "--deep"]) == 65
        assert "damaged    b.hdf5: 8 NaN, 0 infinite values" in capsys.readouterr().out
    # Bits that a disk has lost: the file's time and size are the same.
    assert main(["data", "info", ".", "--deep", "--workers", "1"]) == 0
    status = (tmp_path / "a.hdf5").stat()
    flip(tmp_path / "a.hdf5", -1)
    os.utime(tmp_path / "a.hdf5", ns=(status.st_atime_ns, status.st_mtime_ns))
    capsys.readouterr()
    assert main([*verify, "--deep"]) == 65
    assert "damaged    a.hdf5: checksum" in capsys.readouterr().out


def test_a_second_command_on_a_folder_is_refused(packed, tmp_path, capsys):
    assert main(["data", "universes", "u", "--count", "1", "--width", "8"]) == 0
    commands = [["index", "u"], ["verify", "u"], ["verify", "u", "--deep"], ["info", "u", "--deep"]]
    commands += [["verify", "p"], ["info", "p", "--deep"]]
    for command in commands:
        with FolderLock(tmp_path / command[1]):
            assert main(["data", *command]) == 2
        assert f"{command[1]} is in use: process " in capsys.readouterr().err
    for command in commands[1:]:
        assert main(["data", *command, "--workers", "1"]) == 0
