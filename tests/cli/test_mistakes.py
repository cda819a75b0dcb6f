"""Tests of wrong input to commands: one line names the value and the possible ones."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from pydist.cli.main import main
from pydist.data.index import verify_dataset
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.nifti import outline_of, read_nifti
from pydist.data.medical.options import CTOptions
from pydist.data.publish import publish
from pydist.errors import DataError, DiskError
from support.data.damage import flip
from support.jobs.children import child_environment

CASE = "scans/imagesTr/ct_0001_0000.nii.gz"
LABEL = "scans/labelsTr/ct_0001.nii.gz"
NETWORKS = """
from torch import nn
def fits(): return nn.Conv3d(1, 2, 3)
def fails(): raise ValueError("no\\nweights")
def number(): return 3
def leaves(): raise SystemExit(0)
def too_big(): raise MemoryError
class Through(nn.Module):
    def __init__(self, change): super().__init__(); self.change = change
    def forward(self, x): return self.change(x * 2)
def nothing(): return Through(lambda x: None)
def indices(): return Through(lambda x: x.argmax(1))
def detached(): return Through(lambda x: x.detach())
def lazy(): return nn.LazyConv3d(2, 3)
def leaves_in_a_call(): return Through(lambda x: exit())
"""


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> Path:
    """Returns a data set of two volumes in nnU-Net's folder layout."""
    folder = tmp_path_factory.mktemp("scans")
    generate_ct(folder, CTOptions(count=2, shape=(8, 8, 8), format="nifti"))
    return folder


@pytest.fixture
def place(scans, tmp_path, monkeypatch) -> Path:
    shutil.copytree(scans, tmp_path / "scans")
    for name in ("file", "file.nii", "y_probabilities.nii"):
        (tmp_path / name).write_text("a file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nets.py").write_text(NETWORKS)
    (tmp_path / "run.toml").write_text('[data]\npath = "none"\n')
    (tmp_path / "linked").symlink_to("plain")
    for name in ("loop", "loop.nii"):
        (tmp_path / name).symlink_to(name)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "exits.py").write_text("def f(): pass\nimport sys\nsys.exit(0)\n")
    (tmp_path / "plain").mkdir()
    shutil.copy(tmp_path / CASE, tmp_path / "plain" / "case.nii.gz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, arguments: list[str], code: int) -> str:
    """Runs a command that must fail; returns its one-line error."""
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("data foo", 2, "no command 'data foo'; did you mean data info?"),
        ("bench x", 2, "no command 'bench x'; there are: bench sample-size, bench scaling\n"),
        ("data nifti scans out --cube 0", 2, "error: cube=0: at least 1 voxel"),
        ("data nifti scans out --spacing nan 1 1", 2, "lengths in mm > 0"),
        ("data nifti scans file", 74, "file: it is a file, and a folder is needed"),
        ("data ct out --spacing inf 1 1", 2, "lengths in mm > 0"),
        ("data ct out --noise nan", 2, "noise=nan: 0 to 10000 H"),
        ("predict run nowhere.nii -o x.nii", 65, "nowhere.nii: no such file or folder"),
        ("predict run file.nii -o x.png", 2, r"x.png: the name of a NIfTI file ends in"),
        ("predict run file -o x.nii", 2, "file: not NIfTI files (.nii, .nii.gz) or NumPy files"),
        ("predict run empty -o x", 2, "empty: a folder without NIfTI files"),
        ("predict run file.nii -o nowhere/x.nii", 74, "nowhere: no such folder"),
        ("predict run scans/imagesTr file.nii -o x", 2, "is a folder: give it alone"),
        ("predict run file.nii -o x.nii --overlap 0.5", 2, "give --sliding as well"),
        ("predict run file.nii -o x.nii --truth nowhere", 65, "nowhere: no such file or folder"),
        ("predict run file.nii -o x.nii --truth scans", 65, "scans: no file.nii or file.nii.gz"),
        ("status nowhere", 2, "nowhere has no log.jsonl: expected the folder of a run"),
        ("predict run file.nii -o x.nii -n 0", 2, "0 ranks: at least 1 is needed"),
        ("predict run", 2, "are required: -o/--output; pydist predict --help tells more"),
        ("predict", 2, "error: the following arguments are required: checkpoint, -o/--output;"),
        ("data convert scans", 2, "arguments are required: folder; pydist data convert --help"),
        ("check", 2, "required: network; pydist check --help tells more"),
        ("check nets.py:fits", 2, "--sample is required without CONFIG.toml; pydist check --help"),
        ("check run.toml", 65, "none: no such folder; `pydist data universes none`"),
        ("predict run file.nii -o x.nii -n x", 2, "error: -n/--ranks x: INT is expected"),
        ("predict run file.nii -o x.nii --spatial 2 1", 2, "--spatial 2 1: INT INT INT is"),
        ("check nets.py:fits --sample 1,8 --seed x", 2, "error: --seed x: INT is expected"),
        ("check nets.py:fits --sample 1,8 --tolerance x", 2, "--tolerance x: FLOAT is expected"),
        ("train run.toml --mesh.spatial 2 1", 2, "2 1: INT INT INT or auto is expected"),
        ("run file", 2, "arguments are required: -n; pydist run --help tells more"),
        ("train file -n x", 2, "argument -n: invalid int value: 'x'"),
        ("train run.toml -n 3 --mesh.spatial 2 1 1", 2, "(depth 2) and 3 ranks: possible are mult"),
        ("train run.toml -n 3 --mesh.data 2", 2, "(data 2) and 3 ranks: possible are 2"),
        ("train run.toml -n 3 --train.batch 2", 2, "train.batch = 2 with 3 sample groups"),
        ("train run.toml -n 2", 65, "none: no such folder; `pydist data universes none`"),
        ("demo unet --width 20", 2, "--width 20: multiples of 8 are possible"),
        ("check broken.py:f --sample 1,8", 2, "can't import broken.py: SyntaxError: invalid"),
        ("check nets.py:fails --sample 1,8,8,8", 71, "ValueError: no"),
        ("check nets.py:number --sample 1,8,8,8", 2, "makes a int; expected"),
        ("check nets.py:fits --sample 1,8,8,8 --tolerance nan", 2, "tolerance=nan: 0 or more"),
        ("check nets.py:nothing --sample 1,8,8,8", 2, "returns no tensor of real numbers"),
        ("check nets.py:indices --sample 1,8,8,8", 2, "returns no tensor of real numbers"),
        ("check nets.py:detached --sample 1,8,8,8", 2, "output has no gradient: it was detached"),
        ("check nets.py:lazy --sample 1,8,8,8", 2, "have no shape yet (lazy modules): call it"),
        ("check exits.py:f --sample 1,8", 2, "can't import exits.py: it calls sys.exit(0)"),
        ("check nets.py:leaves --sample 1,8,8,8", 71, "failed on 1,8,8,8: it calls sys.exit(0)"),
        ("check nets.py:leaves_in_a_call --sample 1,8,8,8", 71, "it calls sys.exit()"),
        ("check nets.py:too_big --sample 1,8,8,8", 66, "failed on 1,8,8,8: MemoryError"),
        ("check nets.py:fits --sample 1,100000,100000,100000", 66, "allocate"),
        ("check nets.py:fits --sample 1,2000000000,2000000000,2000000000", 66, "overflow"),
        ("check nets.py:fits --sample 1,99999999999,8,8", 2, "below 2**31"),
        ("check nets.py:fits --sample 1,8,8,8 --spatial 100000,1,1", 2, "at most 1024 run as"),
        (f"check nets.py:fits --sample 1,8,8,8 --seed {2**64}", 2, "a number of 64 bits"),
        ("run -n 100000000 nets.py", 2, "100000000 ranks: at most "),
        ("data ct out --noise 1e30", 2, "noise=1e+30: 0 to 10000 Hounsfield"),
        *(
            (f"data universes out --cell {cell}", 2, "Mpc/h from 0.001 to 1000")
            for cell in ("nan", "inf", "1e30", "1e-30")
        ),
        *(
            (f"data {what}", 74, "bytes are needed and")
            for what in (
                "ct out --count 1000000 --shape 2048 2048 2048",
                "ct out --count 1000000 --shape 2048 2048 2048 --format nifti",
                "ct out --count 1000000 --shape 2048 2048 2048 --format both",
                "ct out --count 1000000 --shape 2048 2048 2048 --storage chunked",
                "universes out --count 1000000 --width 2048 --storage chunked --compression gzip",
            )
        ),
        ("data universes out --redshifts nan", 2, "at least one, each from 0 to 1000"),
        (f"predict run {CASE} -o {CASE}", 2, f"{CASE}: it would overwrite what is read"),
        (f"predict run {CASE} -o {LABEL} --truth {LABEL}", 2, f"{LABEL}: it would overwrite what"),
        (
            "predict run scans/imagesTr -o scans/labelsTr --truth scans/labelsTr",
            2,
            "ct_0000.nii.gz: it would overwrite what is read",
        ),
        (
            f"predict run {CASE} -o y.nii --probabilities --truth y_probabilities.nii",
            2,
            "y_probabilities.nii: it would overwrite what is read",
        ),
        ("predict run plain -o plain", 2, "plain: labels would be stored among the images"),
        ("predict run plain -o linked", 2, "linked: labels would be stored among the images"),
        ("predict run plain -o loop", 74, "loop: Too many levels of symbolic links"),
        ("predict run file.nii -o loop.nii", 74, "loop.nii: Too many levels of symbolic links"),
        (f"predict run file.nii -o y.nii --sliding {10**26}", 2, "below 2**31"),
        ("predict run file.nii -o y.nii --sliding 99999999996", 2, "below 2**31"),
        ("profile run.toml --trace nowhere/t.json", 74, "nowhere: no such folder"),
        ("check nets.py:fits --sample 2,8,8,8", 71, "failed on 2,8,8,8: RuntimeError"),
    ],
)
def test_a_mistake_is_one_line(place, capsys, arguments, code, message):
    assert message in refused(capsys, arguments.split(), code)
    assert not list(place.glob("out/*"))
    assert not list(place.glob("x*"))


def cut(path: str) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:-50])


def wrong_checksum(path: str) -> None:
    flip(Path(path), -5)


def smaller(path: str) -> None:
    nib.save(nib.load(path).slicer[:-1], path)


def four_dims(path: str) -> None:
    volume = nib.load(path)
    nib.save(nib.Nifti1Image(np.stack([np.asarray(volume.dataobj)] * 2, -1), volume.affine), path)


def missing(path: str) -> None:
    Path(path).unlink()


@pytest.mark.parametrize(
    ("damage", "path", "message"),
    [
        (cut, CASE, f"{CASE}: cut short"),
        (wrong_checksum, CASE, f"{CASE}: damaged gzip data: CRC check failed"),
        (wrong_checksum, LABEL, f"{LABEL}: damaged gzip data: CRC check failed"),
        (smaller, LABEL, f"{LABEL} has (7, 8, 8) voxels, {CASE} (8, 8, 8)"),
        (four_dims, LABEL, f"{LABEL} has 2 channels; one is expected"),
        (missing, LABEL, f"its label {LABEL} is missing"),
        (missing, CASE, f"its image {CASE} is missing"),
        (missing, "scans/dataset.json", "imagesTr and no dataset.json"),
    ],
)
def test_a_bad_case_is_named_and_nothing_is_half_written(place, capsys, damage, path, message):
    damage(path)
    assert message in refused(capsys, ["data", "nifti", "scans", "out"], 65)
    left = {file.name for file in place.glob("out/*")}
    assert left <= {"ct_0000.hdf5", ".made.jsonl"}


@pytest.mark.parametrize("read", [read_nifti, outline_of])
def test_a_pipe_is_no_image(tmp_path, read):
    os.mkfifo(tmp_path / "x.nii")
    with pytest.raises(DataError, match=r"x.nii: not a regular file"):
        read(tmp_path / "x.nii")


def test_a_pipe_in_a_data_set_is_a_fault(tmp_path):
    manifest = generate_ct(tmp_path, CTOptions(count=2, shape=(8, 8, 8)))
    path = tmp_path / manifest.files[0].path
    path.unlink()
    os.mkfifo(path)
    assert verify_dataset(tmp_path) == [f"{path}: not a regular file"]
    (tmp_path / "dataset.json").unlink()
    os.mkfifo(tmp_path / "dataset.json")
    with pytest.raises(DataError, match=r"dataset.json: not a regular file"):
        verify_dataset(tmp_path)


@pytest.mark.parametrize(("arguments", "code"), [(["data", "--help"], 0), (["data"], 2)])
def test_a_group_of_commands_has_help(capsys, arguments, code):
    assert main(arguments) == code
    shown = capsys.readouterr().out
    assert "usage: pydist data COMMAND" in shown
    assert "data verify" in shown
    assert "train" not in shown


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_place_that_takes_no_files_is_not_called_full():
    with pytest.raises(DiskError, match=r"^/proc: no files can be written there"):
        publish(Path("/proc/x"), b"content")


def test_a_mistake_is_one_line_on_a_terminal_with_colors():
    """The library that parses options frames and colors its errors there."""
    reader, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "pydist", "data", "index", "folder", "--bogus"],
        stdout=terminal,
        stderr=subprocess.PIPE,
        env=child_environment(TERM="xterm-256color"),
        text=True,
        check=False,
    )
    os.close(terminal)
    os.close(reader)
    assert done.returncode == 2
    assert done.stderr == "error: Unrecognized options: --bogus\n"
