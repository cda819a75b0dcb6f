"""Packing is killed 120 times: nothing half-made is read, and the rest is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from pydist._loader import native
from pydist.packs import PackFileSystem
from support.jobs.children import child_environment
from support.trees import found


def test_packing_survives_kills(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "pack"
    rng = np.random.default_rng(3)
    for number in range(240):
        path = source / f"class{number % 6}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.integers(0, 4, int(rng.integers(1, 60_000)), np.uint8).tobytes())
    script = Path(__file__).with_name("kill_packing.py")
    done = subprocess.run(
        [sys.executable, str(script), str(source), str(folder), "120"],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    assert sum(left.values()) == 120
    assert left["partitions"] >= 12  # after renamings of partitions, before that of the index
    # Nothing is left of all of the runs but the pack, and it has what was packed.
    names = [native.PACK_INDEX, *(native.partition_name(number) for number in range(6))]
    assert sorted(path.name for path in folder.iterdir()) == names
    PackFileSystem(folder).get("", str(tmp_path / "extracted"), recursive=True)
    assert found(tmp_path / "extracted") == found(source)
