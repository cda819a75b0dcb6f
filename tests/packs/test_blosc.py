"""The codec blosc, with the library that numcodecs brings in its module."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pydist._loader import native
from pydist.errors import NotSupported
from pydist.packs import PackOptions, pack
from support.jobs.children import child_environment

PROGRAM = Path(__file__).with_name("blosc_program.py")


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are found by LD_LIBRARY_PATH")
def test_counts_are_packed_and_spilled(tmp_path: Path) -> None:
    found = importlib.util.find_spec("numcodecs")
    if found is None or found.origin is None:
        pytest.skip("no numcodecs")
    (module,) = Path(found.origin).parent.glob("blosc.*.so")
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "libblosc.so.1").symlink_to(module)
    environment = child_environment()
    others = environment.get("LD_LIBRARY_PATH")
    places = [str(tmp_path / "libraries"), *([others] if others else [])]
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env={**environment, "LD_LIBRARY_PATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "a file of 0 bytes was read into 80000" in ended.stdout


def test_without_the_library_it_is_said(tmp_path: Path) -> None:
    try:
        native.require_codec("blosc")
    except NotSupported:
        pass
    else:
        pytest.skip("the library is installed")
    (tmp_path / "source").mkdir()
    with pytest.raises(NotSupported, match=r"the blosc library can't be opened: libblosc\.so\.1"):
        pack(tmp_path / "source", tmp_path / "pack", PackOptions(codec="blosc", item_size=2))
    assert not (tmp_path / "pack").exists()
