"""Tests that folders are published completely or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from pydist.data import publish
from pydist.data.publish import publish_folder
from pydist.errors import DiskError


def fill(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner/file").write_text("new")


def broken(folder: Path) -> None:
    fill(folder)
    raise OSError("100 requested and 7 written")


def test_a_folder_replaces_another_one(tmp_path: Path) -> None:
    path = tmp_path / "above" / "folder"
    publish_folder(path, fill)
    (path / "old").touch()
    publish_folder(path, fill)
    assert [p.name for p in path.rglob("*")] == ["inner", "file"]
    assert [p.name for p in path.parent.iterdir()] == ["folder"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's error says how many numbers were written, and no more."""
    usage = shutil.disk_usage(tmp_path)._replace(free=60_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskError, match=r"written: No space left on device; 0\.1 MB are free"):
        publish_folder(tmp_path / "folder", broken)


def test_other_errors_say_nothing_of_the_disk(tmp_path: Path) -> None:
    def forbidden(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    with pytest.raises(DiskError, match=r"could not be written: Permission denied$"):
        publish_folder(tmp_path / "folder", forbidden)


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with pytest.raises(DiskError, match="folder: could not be written: 100 requested and 7"):
        publish_folder(path, broken)
    assert list(tmp_path.iterdir()) == []
    publish_folder(path, fill)
    with pytest.raises(DiskError):
        publish_folder(path, broken)
    with pytest.raises(KeyboardInterrupt):
        publish_folder(path, lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert (path / "inner/file").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_folder_that_is_replaced_is_there_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_atomic: bool
) -> None:
    """Or its old content is, if the new one can't get its place."""
    if not is_atomic:
        monkeypatch.setattr(publish.ctypes, "CDLL", lambda name: None)
    path = tmp_path / "folder"
    publish_folder(path, lambda folder: (folder / "old").touch())
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        assert not is_atomic  # at no instant it has another name
        if ".tmp-" in self.name and target == path:
            monkeypatch.setattr(Path, "rename", rename)
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    monkeypatch.setattr(Path, "replace", fails)
    if is_atomic:
        publish_folder(path, fill)
    else:
        with pytest.raises(DiskError, match="Input/output error"):
            publish_folder(path, fill)
    assert [each.name for each in path.iterdir()] == ["inner" if is_atomic else "old"]
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    monkeypatch.undo()
    publish_folder(path, fill)
    assert [each.name for each in path.iterdir()] == ["inner"]
