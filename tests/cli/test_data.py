"""Tests of `pydist data`: one line reports the result or the mistake."""

from __future__ import annotations

from pydist.cli.main import main


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
    volume = tmp_path / "b" / "ct_0000.hdf5"
    raw = bytearray(volume.read_bytes())
    raw[-1] ^= 1
    volume.write_bytes(raw)
    capsys.readouterr()
    assert main(["data", "verify", "b"]) == 65
    shown = capsys.readouterr()
    assert "ct_0000.hdf5: checksum" in shown.out
    assert "b does not match its manifest (files: 1)" in shown.err


def test_several_shapes_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for count, extent in ((1, "8"), (2, "16")):
        shape = ["--shape", "8", "8", extent]
        assert main(["data", "ct", "a", "--count", str(count), *shape, "--format", "nifti"]) == 0
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
    assert "damaged    p: " in shown.out
    assert "p does not match its checksums (files: 1)" in shown.err
