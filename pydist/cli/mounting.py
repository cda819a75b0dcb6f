"""The environment in which programs see a mount: the settings of the preload library.

`libpydist_preload.so` (csrc/preload) answers the POSIX calls of a program below the mount point.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydist import owner
from pydist._loader import native
from pydist.cli.own_options import size_of
from pydist.errors import UsageError
from pydist.packs import servers

LIBRARY = "libpydist_preload.so"
CACHE = 1 << 30
"""The most bytes of copies that stay in memory by default."""


@contextlib.contextmanager
def mounted(
    mount: str,
    packs: str | None = None,
    output: str | None = None,
    large: str | None = None,
    counters: Path | None = None,
    cache: str | None = None,
) -> Iterator[dict[str, str]]:
    """Yields the environment for programs that see a mount, while the context lasts.

    Args:
        mount: the mount point, an absolute path; it need not exist.
        packs: the pack that appears there; None if calls on ordinary files are counted.
        output: "FOLDER" or "NAME=FOLDER": a folder for results, which is made, and its name at the
            mount point.
        large: size from which raw files are not copied into memory, such as "16MiB".
        counters: the file in which calls are counted (see `pydist.cli.store_profile`).
        cache: total size of the small and compressed files whose copies stay in memory, for all
            processes, once they have been opened; "0" for none. By default 1 GiB, or half of what
            is free in shared memory if that is less: programs need it, too.

    Raises:
        UsageError: not Linux, the library was not built, a setting that is not possible, or another
            user has taken the name of the folder for directories.
        DataError: the pack can't be read.
    """
    library = _library()
    settings = {"PYDIST_MOUNT": _mount_point(mount)}
    if packs is not None:
        settings |= _packs(packs)
    if output is not None:
        if packs is None:
            raise UsageError("--output needs --packs: without it, files are written in place")
        settings["PYDIST_MOUNT_OUTPUT"] = _output(output, settings["PYDIST_MOUNT"], packs)
    if large is not None:
        settings["PYDIST_MOUNT_LARGE"] = str(size_of("--large", large))
    if packs is not None and cache is not None:
        settings["PYDIST_MOUNT_CACHE"] = "0" if cache == "0" else str(size_of("--cache", cache))
    if counters is not None:
        settings["PYDIST_MOUNT_PROFILE"] = str(counters)
    with _folder() as folder:
        settings["PYDIST_MOUNT_FOLDERS"] = str(folder)
        if packs is not None and cache is None:
            settings["PYDIST_MOUNT_CACHE"] = str(min(CACHE, shutil.disk_usage(folder).free // 2))
        point = settings["PYDIST_MOUNT"]
        if packs is not None and not Path(point).parent.exists():
            # Stand-ins for missing parents, as programs may look at each folder of a path.
            Path(f"{folder}/parents{point}").mkdir(parents=True)
        yield _environment(settings, library, folder)


def _library() -> Path:
    """Returns the path of the preload library.

    Raises:
        UsageError: not on this system, or it was not built.
    """
    if sys.platform != "linux":
        raise UsageError(f"pydist store exec needs Linux (LD_PRELOAD); this is {sys.platform}")
    if not Path("/proc/self/fd").is_dir():
        raise UsageError("pydist store exec needs /proc, which is not mounted here")
    library = Path(native.__file__).with_name(LIBRARY)
    if not library.is_file():
        raise UsageError(f"{library} is missing: install pydist again (or run tools/dev-build)")
    return library


def _mount_point(given: str) -> str:
    path = os.path.normpath(given)
    if not given.startswith("/") or path in ("/", "//"):
        raise UsageError(f"--mount {given}: an absolute path below / is needed, such as /data")
    if os.path.realpath(path) != path:
        raise UsageError(
            f"--mount {given}: it leads through a symbolic link; its own name is "
            f"{os.path.realpath(path)}"
        )
    return path


def _packs(given: str) -> dict[str, str]:
    """Returns the settings of a pack, whose index must be readable."""
    path = os.path.realpath(given)
    servers.open_pack(path)
    settings = {"PYDIST_MOUNT_PACKS": path}
    if addresses := servers.addresses():
        settings["PYDIST_MOUNT_SERVERS"] = ",".join(addresses)
        settings["PYDIST_MOUNT_SECRET"] = servers.secret().hex()
    return settings


def _output(given: str, mount: str, packs: str) -> str:
    """Returns NAME=FOLDER, with the folder's real path; makes the folder."""
    name, equals, folder = given.partition("=")
    if not equals:
        name, folder = Path(given).resolve().name, given
    if not name or "/" in name or name in (".", ".."):
        raise UsageError(f"--output {given}: the name is one folder at the mount point")
    if native.PackFolder(os.fsencode(packs)).find(os.fsencode(name)) is not None:
        raise UsageError(
            f"--output {given}: the pack has {name!r}; --output NAME={folder} chooses another name"
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {given}: {error.strerror}: {error.filename}") from error
    real = os.path.realpath(folder)
    if f"{real}/".startswith(f"{mount}/"):
        raise UsageError(f"--output {given}: it is below --mount, which hides it")
    return f"{name}={real}"


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Makes a folder for directories and copies of files; removes what killed runs left."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    parent = (base or Path(tempfile.gettempdir())) / f"pydist-mounts-{os.getuid()}"
    try:  # programs are started with the library that it links to, if need be
        owner.make_private_folder(parent)
    except OSError as error:
        raise UsageError(str(error)) from error
    owner.remove_temporaries(parent)
    folder = owner.temporary(parent / "mount").resolve()
    folder.mkdir(mode=0o700)
    try:
        (folder / "taken").write_bytes(bytes(8))  # of the cache, counted by all processes
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(settings: Mapping[str, str], library: Path, folder: Path) -> dict[str, str]:
    if set(" :") & set(str(library)):  # they separate the names of LD_PRELOAD
        link = folder / LIBRARY
        link.symlink_to(library)
        library = link
    others = os.environ.get("LD_PRELOAD")
    preload = f"{library}:{others}" if others else str(library)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYDIST_MOUNT")}
    return {**kept, **settings, "LD_PRELOAD": preload}
