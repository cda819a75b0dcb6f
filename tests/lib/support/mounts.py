"""A folder of files of several kinds, its pack, and programs that run on both."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from PIL import Image

from pydist.cli.mounting import mounted
from pydist.packs import PackOptions, pack


@dataclass(frozen=True)
class Case:
    """A folder, its pack, and the mount point, which does not exist."""

    folder: Path
    packs: Path
    mount: Path

    @contextmanager
    def environment(self, **settings: Any) -> Iterator[dict[str, str]]:
        with mounted(str(self.mount), str(self.packs), **settings) as environment:
            yield environment

    def loose(self, *command: str | Path, **options: Any) -> bytes:
        """Runs a program in the folder; returns its output, in which the folder is ROOT."""
        return self._run(self.folder, command, dict(os.environ), options)

    def packed(self, *command: str | Path, large: str | None = None, **options: Any) -> bytes:
        """Runs it in the mounted pack."""
        with self.environment(large=large) as environment:
            return self._run(self.mount, command, environment, options)

    def _run(
        self, root: Path, command: Sequence[str | Path], environment: dict[str, str], options: Any
    ) -> bytes:
        # The shell changes to the folder, as this process can't.
        shell = ["bash", "-c", 'cd "$0" && exec "$@"', root, *command]
        ended = subprocess.run(
            shell,
            env={**environment, "LC_ALL": "C.UTF-8", "ROOT": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=100,
            check=False,
            **options,
        )
        output = ended.stdout.replace(os.fsencode(root), b"ROOT")
        return output + f"exit code {ended.returncode}".encode()


def make_case(base: Path) -> Case:
    """Makes the folder and its pack below `base`."""
    make_files(base / "folder")
    pack(base / "folder", base / "packs", PackOptions(partition_bytes="3MB"))
    return Case(base / "folder", base / "packs", base / "mount")


def make_files(folder: Path) -> None:
    random = np.random.default_rng(3)
    for name in ("a", "b"):
        (folder / "class" / name).mkdir(parents=True)
        for number in range(6):
            content = random.integers(0, 256, 3000 * (number + 1), dtype=np.uint8)
            (folder / "class" / name / f"{number}.bin").write_bytes(content.tobytes())
    (folder / "empty folder").mkdir()
    (folder / "empty").write_bytes(b"")
    (folder / "lines").write_text("".join(f"line {i}\n" for i in range(20_000)))
    (folder / "ünicode *?").write_text("text\n")
    (folder / "script").write_text('#! /bin/sh -e\necho "a script" "$0" "$@"\n')
    (folder / "script").chmod(0o755)
    np.save(folder / "array.npy", random.random((60, 80, 100)))
    (folder / "large").write_bytes(random.bytes((5 << 20) + 123))
    with h5py.File(folder / "volume.h5", "w") as file:
        file["full"] = random.random((4, 32, 32, 32))
    Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / "image.png")
    torch.save({"w": torch.arange(300_000.0)}, folder / "tensor.pt")
    for number, path in enumerate(sorted(folder.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number * 10**9))
