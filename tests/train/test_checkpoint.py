"""Tests that checkpoints are complete or absent after a crash, and that bit flips are found."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pydist import owner
from pydist.errors import CheckpointError, DiskError
from pydist.train import checkpoint


def parts(value: float) -> dict:
    return {
        "model": {"fc.weight": torch.full((3, 2), value), "fc.bias": torch.arange(2)},
        "random": {"numbers": (1, 2, 3), "value": value},
    }


def value_of(path: Path) -> float:
    state = checkpoint.read(path)
    assert (state["model"]["fc.weight"] == state["random"]["value"]).all()
    return state["random"]["value"]


def test_written_parts_come_back(tmp_path):
    path = checkpoint.write(tmp_path / "ckpt", 120, parts(0.5))
    assert path.name == "step-000120"
    assert (tmp_path / "ckpt" / "last").resolve() == path.resolve()
    state = checkpoint.read(path)
    assert state["step"] == 120
    assert state["random"] == {"numbers": (1, 2, 3), "value": 0.5}
    assert torch.equal(state["model"]["fc.weight"], torch.full((3, 2), 0.5))
    assert state["model"]["fc.bias"].dtype == torch.int64


def test_the_latest_are_kept_and_ordered_by_step(tmp_path):
    for step in (1, 20, 300, 1_000_000, 1_000_001):
        checkpoint.write(tmp_path, step, parts(step), keep=3)
    kept = checkpoint.complete(tmp_path)
    assert [p.name for p in kept] == ["step-000300", "step-1000000", "step-1000001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["last", *(p.name for p in kept)])


def test_a_checkpoint_of_the_same_step_is_left_as_it_is(tmp_path):
    first = checkpoint.write(tmp_path, 7, parts(1.0))
    written = (first / "manifest.json").stat().st_mtime_ns
    assert checkpoint.write(tmp_path, 7, parts(1.0)) == first
    assert (first / "manifest.json").stat().st_mtime_ns == written


class Crash(BaseException):
    """Sudden end, like a kill, which nothing in pydist catches."""


def inject(monkeypatch, at: int, error: BaseException) -> list[str]:
    """Makes file system call number `at` raise `error`; returns the list of call names."""
    calls: list[str] = []
    lock = threading.Lock()  # files are flushed by several threads

    def failing(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            with lock:
                calls.append(name)
                if len(calls) == at:
                    raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("fsync", "open"):
        failing(os, name)
    for name in ("mkdir", "open", "rename", "replace", "symlink_to"):
        failing(Path, name)
    failing(checkpoint.shutil, "rmtree")
    return calls


def save_over_two(folder: Path) -> None:
    checkpoint.write(folder, 3, parts(3.0), keep=2)


@pytest.mark.parametrize("kind", ["crash", "full"])
def test_whatever_call_fails_the_last_complete_checkpoint_loads(tmp_path, kind):
    """Every call of publishing fails once, as in SQLite's tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path / "count"
        for step in (1, 2):
            checkpoint.write(folder, step, parts(step))
        calls = inject(patch, 0, Crash())
        save_over_two(folder)
        total = len(calls)
    assert total > 20

    for at in range(1, total + 1):
        folder = tmp_path / f"{kind}-{at}"
        for step in (1, 2):
            checkpoint.write(folder, step, parts(step))
        with pytest.MonkeyPatch.context() as patch:
            if kind == "crash":
                inject(patch, at, Crash())
                with pytest.raises(Crash):
                    save_over_two(folder)
            else:
                inject(patch, at, OSError(errno.ENOSPC, "No space left on device"))
                with pytest.raises(DiskError, match="No space left"):
                    save_over_two(folder)
        found = checkpoint.complete(folder)
        assert len(found) >= 2
        for path in found:
            assert value_of(path) == int(path.name[-1])
        assert (folder / "last").resolve() in {p.resolve() for p in found[-2:]}
        save_over_two(folder)
        assert value_of(checkpoint.complete(folder)[-1]) == 3.0


def test_a_failed_write_leaves_no_file_behind(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        inject(patch, 6, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(DiskError, match=r"No space left on device; .* MB are free") as caught:
            checkpoint.write(tmp_path, 1, parts(1.0))
    assert caught.value.exit_code == 74
    assert str(tmp_path / "step-000001") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys, torch
from pathlib import Path
from pydist.train import checkpoint
calls = 0
real = os.fsync
def fsync(handle):
    global calls
    calls += 1
    if calls >= int(sys.argv[2]):
        os._exit(9)
    real(handle)
os.fsync = fsync
checkpoint.write(Path(sys.argv[1]), 2, {"model": {"w": torch.ones(1000)}})
"""


def test_a_killed_write_is_ignored_and_its_part_is_removed(tmp_path):
    checkpoint.write(tmp_path, 1, parts(1.0))
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, "3"], check=False, timeout=60, cwd=tmp_path
    )
    assert ended.returncode == 9
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-000001"]
    (part,) = owner.remove_temporaries(tmp_path)
    assert part.name.startswith(".step-000002.tmp-")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step-000001"]


FULL = """
import resource, sys, torch
from pathlib import Path
from pydist.errors import DiskError
from pydist.train import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.write(Path(sys.argv[1]), 2, {"model": {"w": torch.ones(100_000)}})
except DiskError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_file_system_that_takes_no_more_ends_with_74_and_the_path(tmp_path):
    checkpoint.write(tmp_path, 1, parts(1.0))
    ended = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path],
        check=False,
        timeout=60,
        capture_output=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 74, ended.stderr
    assert str(tmp_path / "step-000002") in ended.stdout.decode()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step-000001"]
    assert value_of(tmp_path / "step-000001") == 1.0


def test_every_flipped_bit_is_detected(tmp_path):
    """Flips one bit in each byte of every file, another bit for each byte."""
    path = checkpoint.write(tmp_path, 1, parts(1.0))
    for file in sorted(path.iterdir()):
        raw = file.read_bytes()
        for i in range(len(raw)):
            flipped = bytearray(raw)
            flipped[i] ^= 1 << (i % 8)
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError, match="step-000001"):
                checkpoint.read(path)
        file.write_bytes(raw)
    assert value_of(path) == 1.0


@pytest.mark.parametrize("damage", ["cut", "gone", "emptied"])
@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_damage_is_refused_by_name_and_the_previous_one_offered(tmp_path, file, damage):
    checkpoint.write(tmp_path, 1, parts(1.0))
    path = checkpoint.write(tmp_path, 2, parts(2.0))
    victim = path / file
    if damage == "gone":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size // 2 if damage == "cut" else 0)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path)
    message = str(caught.value)
    assert str(path) in message
    assert f"the previous one is {tmp_path / 'step-000001'}" in message
    assert caught.value.exit_code == 73


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_file_that_can_not_be_read_now_is_not_called_damaged(tmp_path, monkeypatch, number):
    path = checkpoint.write(tmp_path, 1, parts(1.0))

    def fails(self):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(DiskError, match=f"can't read checkpoint {path}: .*{os.strerror(number)}"):
        checkpoint.read(path)
    monkeypatch.undo()
    assert value_of(path) == 1.0


@pytest.mark.parametrize(
    ("text", "what"), [("", "is not JSON"), ("[1, 2]", "is not that of"), ("{", "is not JSON")]
)
def test_a_manifest_of_other_content_is_named(tmp_path, text, what):
    path = checkpoint.write(tmp_path, 1, parts(1.0))
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"is damaged: manifest.json {what}"):
        checkpoint.read(path)


def test_a_newer_format_and_a_missing_folder_are_refused(tmp_path):
    path = checkpoint.write(tmp_path, 1, parts(1.0))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(CheckpointError, match="format version 99, this pydist reads version 1"):
        checkpoint.read(path)
    with pytest.raises(CheckpointError, match="no such folder; there is no earlier one"):
        checkpoint.read(tmp_path / "step-000009")


def test_files_outside_the_checkpoint_are_not_read(tmp_path):
    path = checkpoint.write(tmp_path, 1, parts(1.0))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../secret.json"] = manifest["files"]["state.json"]
    (path / "manifest.json").write_bytes(checkpoint._seal(manifest))
    with pytest.raises(CheckpointError, match=r"names a file '\.\./secret\.json'"):
        checkpoint.read(path)
    target = tmp_path / "elsewhere.json"
    checkpoint.write(tmp_path, 2, parts(2.0))
    (tmp_path / "step-000002" / "state.json").rename(target)
    (tmp_path / "step-000002" / "state.json").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        checkpoint.read(tmp_path / "step-000002")


def test_pickle_is_never_used(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert value_of(checkpoint.write(tmp_path, 1, parts(1.0))) == 1.0


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_a_pickle_in_place_of_a_file_is_refused_and_not_run(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    path = checkpoint.write(tmp_path, 1, parts(1.0))
    payload = pickle.dumps(Payload())
    (path / file).write_bytes(payload)
    manifest = json.loads((path / "manifest.json").read_text()) if "manifest" not in file else None
    if manifest:
        crc = checkpoint.native.crc32c(payload)
        manifest["files"][file] = {"bytes": len(payload), "crc32c": f"{crc:08x}"}
        (path / "manifest.json").write_bytes(checkpoint._seal(manifest))
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read(path)
    assert not Path("executed").exists()
