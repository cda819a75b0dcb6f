"""Tests of publishing: files appear complete or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pydist.data.publish import need_space, publish, require_room
from pydist.errors import DiskError


def test_replaces_a_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", memoryview(b"second")):
        publish(path, content)
        assert path.read_bytes() == bytes(content)
    assert list(tmp_path.iterdir()) == [path]


def test_failure_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    publish(path, b"old")

    def refuse(self: Path, target: Path) -> None:
        raise OSError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(DiskError, match="could not write 3 bytes: Permission denied"):
            publish(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="No such file"):
        publish(tmp_path / "no" / "file", b"x")


def test_needed_space_is_named(tmp_path: Path) -> None:
    need_space(tmp_path, 1)
    with pytest.raises(
        DiskError, match=rf"{tmp_path}: {1 << 60} bytes are needed and \d+ are free"
    ):
        need_space(tmp_path, 1 << 60)


def test_what_an_earlier_run_has_left_counts_as_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(DiskError, match="bytes are needed"):
        require_room(tmp_path, 2, free, packed=False)
    (tmp_path / "part").mkdir()
    with (tmp_path / "part" / "first").open("wb") as file:
        file.truncate(free + (1 << 30))  # sparse: takes no space
    require_room(tmp_path, 2, free, packed=False)
