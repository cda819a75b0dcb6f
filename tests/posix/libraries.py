"""Program of test_programs.py: reads files in the current directory with libraries."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

OUTPUT = Path(sys.argv[1])


def digest(content: bytes | mmap.mmap) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def main() -> None:
    OUTPUT.mkdir()
    for name, listed in (("walk", os.walk(".")), ("fwalk", os.fwalk("."))):
        print(name, sorted((str(t[0]), sorted(t[1]), sorted(t[2])) for t in listed))
    print(sorted(map(str, Path().rglob("*"))), Path("class/../lines").resolve().name)
    print(float(np.load("array.npy").sum()), float(np.load("array.npy", mmap_mode="r")[7].sum()))
    print(np.fromfile("large", np.uint8, count=1000, offset=77).sum())
    print(np.memmap("large", np.uint8, "r", offset=4097, shape=9999).sum())
    for name in ("large", "lines"):
        with Path(name).open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                print(digest(mapped), len(mapped))
            given = subprocess.run(["cksum"], stdin=file, stdout=-1, check=True).stdout
            print(given, os.fstat(file.fileno()).st_size)
    with Path("lines").open() as file:
        print(file.readline(), file.tell(), sum(len(line) for line in file))
    listed = subprocess.run("ls; pwd -P", shell=True, cwd="class/a", stdout=-1, check=True)
    print(listed.stdout.decode(), Path("class").samefile(Path.cwd() / "class"))
    with h5py.File("volume.h5") as file:
        print(float(file["full"][1:3, 5:9].sum()), list(file))
    print(digest(np.asarray(Image.open("image.png")).tobytes()))
    shutil.copytree("class", OUTPUT / "class")
    shutil.copyfile("large", OUTPUT / "large")
    shutil.make_archive(str(OUTPUT / "all"), "tar", ".")
    print([digest(path.read_bytes()) for path in sorted(OUTPUT.rglob("*.bin"))])
    print(digest((OUTPUT / "large").read_bytes()), (OUTPUT / "all.tar").stat().st_size)


if __name__ == "__main__":
    main()
