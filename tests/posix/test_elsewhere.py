"""Tests that a mounted pack has partitions of other nodes, which servers send."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pydist.packs.servers import serve
from support.mounts import Case

SCRIPT = """
cksum lines large class/*/*.bin
exec 100<&- 200<&- 300<&-
for i in $(seq 3 250); do eval "exec $i>&-"; done
cat class/b/*.bin lines | cksum
cksum < large; cp large "$0"; cksum < "$0"
python3 -c 'import mmap; f = open("large", "rb"); print(sum(mmap.mmap(f.fileno(), 0, access=1)))'
"""


@pytest.mark.parametrize("large", [None, "1kB"])
def test_partitions_come_from_servers(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: str | None
) -> None:
    monkeypatch.setenv("PYDIST_PACKS_SECRET", "0123456789abcdef")
    parts = sorted(case.packs.glob("part-*"))
    assert len(parts) > 2
    here = tmp_path / "here"
    here.mkdir()
    shutil.copy(case.packs / "index.pdx", here)
    shutil.copy(parts[1], here)
    server = serve(case.packs, str(tmp_path / "socket"))
    monkeypatch.setenv("PYDIST_PACKS_SERVERS", str(tmp_path / "socket"))
    command = ["bash", "-c", SCRIPT, str(tmp_path / "copy")]
    packed = Case(case.folder, here, case.mount).packed(*command, large=large)
    assert packed == case.loose(*command)
    del server
