"""Opens untrusted HDF5 files; no other module of pydist opens HDF5 files on disk.

HDF5 lets a file name other files (external storage, external links, virtual datasets), run code
(dynamic filter plugins), and declare far more than it holds. `safe_open` refuses all of that before
a byte of data is read, and reports HDF5's errors on damaged files in one line. Only the HDF5
library itself remains trusted.

Reading is exact: a block of a contiguous dataset is read by `pread` of its bytes and no others, and
where HDF5 reads one, its sieve buffer is off (with its default of 64 kB, a cut of height or width
read 2 to 4 times as much).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5f, h5fd, h5l, h5p, h5t

from pydist.data.file_image import write_hdf5
from pydist.data.formats import Driver, Storage, StoredFile
from pydist.data.hdf5_rules import Limits, check_filters, check_size, check_type
from pydist.data.mpi_io import MpiIo
from pydist.data.plain_array import PlainArray, plain_array
from pydist.data.regular import Stamp, change_since, require_regular
from pydist.errors import DataError, UsageError, one_line

SUFFIXES = (".hdf5", ".h5")

HDF5_ERRORS = (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)
"""The exceptions that h5py raises for damaged files, depending on the damaged part."""


def safe_open(
    path: str | Path,
    *,
    allow_roots: Sequence[str | Path] = (),
    limits: Limits | None = None,
    driver: Driver | None = None,
) -> SafeFile:
    """Opens an HDF5 file for reading.

    Args:
        path: the file.
        allow_roots: folders to which soft links, external links and sources of virtual datasets
            may lead. None by default: then links and virtual datasets are refused.
        limits: the limits on what a file may declare.
        driver: a file object from which to read instead of from `path`, which is then only a
            name; or how to read it by MPI-IO.

    Raises:
        DataError: the file is missing, not HDF5, cut short or damaged.
    """
    name = Path(path)
    by_mpi = driver if isinstance(driver, MpiIo) else None
    stamp = _check_file(name) if driver is by_mpi else None
    roots = tuple(Path(root).resolve() for root in allow_roots)
    return SafeFile(name, _open(name, driver), roots, limits or Limits(), stamp, by_mpi)


class SafeFile(StoredFile):
    """An open HDF5 file that returns only checked datasets; made by `safe_open`."""

    errors = HDF5_ERRORS
    suffix = ".hdf5"

    def __init__(
        self,
        path: Path,
        file: h5py.File,
        roots: tuple[Path, ...],
        limits: Limits,
        stamp: Stamp | None,
        by_mpi: MpiIo | None = None,
    ) -> None:
        super().__init__(path)
        self._file = file
        self._roots = roots
        self._limits = limits
        self._stamp = stamp
        self._by_mpi = by_mpi
        self._linked: list[SafeFile] = []
        self._plain: dict[int, tuple[h5py.Dataset, PlainArray | None]] = {}
        """By id: the datasets that were returned, and how they are read without HDF5."""

    def __enter__(self) -> SafeFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @classmethod
    def open(
        cls,
        path: Path,
        allow_roots: Sequence[str | Path] = (),
        driver: Driver | None = None,
    ) -> SafeFile:
        """Opens a file; see `safe_open`."""
        return safe_open(path, allow_roots=allow_roots, driver=driver)

    def read(
        self,
        dataset: h5py.Dataset,
        window: tuple[slice, ...],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Reads a part of a dataset, directly into `out` if given."""
        _, plain = self._plain.get(id(dataset), (None, None))
        if plain is not None and window and (out is None or plain.fits(out)):
            return plain.read(window, out)
        if out is None:
            return np.asarray(dataset[window])
        if self._by_mpi is not None and window:
            self._by_mpi.read(dataset, window, out)
        else:
            dataset.read_direct(out, window)
        return out

    def close(self) -> None:
        """Closes the file, and the files that its links led to."""
        self._plain.clear()
        for file in self._linked:
            file.close()
        self._file.close()

    def change(self) -> str | None:
        """Describes a change of the file, or of a linked file, since it was opened.

        HDF5 reads zeros where a file has become shorter: values count only if this reports no
        change after the read. A caller's file object (`driver`) is not checked.

        Returns:
            One line that names the file; None without a change.
        """
        found = None if self._stamp is None else change_since(self.path, self._stamp)
        if found is not None or not self._linked:
            return found
        changes = (file.change() for file in self._linked)
        return next((each for each in changes if each is not None), None)

    def names(self) -> list[str]:
        """Returns up to `Limits.names` names at the top of the file, for messages."""
        return _names(self._file, self._limits.names)

    def dataset(self, name: str) -> h5py.Dataset:
        """Finds and checks a dataset of numbers.

        Raises:
            DataError: there is none of that name, or it breaks a rule of this module.
        """
        try:
            dataset = self._find(name)
            if self._stamp is not None:  # not through a caller's file object
                self._plain[id(dataset)] = dataset, plain_array(dataset)
        except DataError:
            raise
        except HDF5_ERRORS as error:
            raise DataError(f"{self.path}: {name!r} is damaged: {one_line(error)}") from error
        return dataset

    def text(self, name: str, errors: str = "strict") -> str | None:
        """Returns an attribute of the file if it is a string of fixed length, else `None`.

        Args:
            name: of the attribute.
            errors: handles bytes that are not UTF-8, as in `bytes.decode`.
        """
        try:
            kind = self._file.attrs.get_id(name).get_type() if name in self._file.attrs else None
            if not isinstance(kind, h5t.TypeStringID) or kind.is_variable_str():
                return None
            return bytes(self._file.attrs[name]).decode(errors=errors)
        except HDF5_ERRORS as error:
            raise DataError(f"{self.path}: {name!r} is damaged: {one_line(error)}") from error

    def texts(self) -> dict[str, str]:
        """Returns the attributes of the file that are strings of fixed length.

        Bytes that are not UTF-8 become lone surrogates, which `write` turns back.
        """
        try:
            names = list(self._file.attrs)[: self._limits.attributes]
        except HDF5_ERRORS as error:
            raise DataError(
                f"{self.path}: its attributes are damaged: {one_line(error)}"
            ) from error
        found = {name: self.text(name, "surrogateescape") for name in names}
        return {name: text for name, text in found.items() if text is not None}

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Returns whether a file's name is that of an HDF5 file."""
        return path.suffix in SUFFIXES and path.is_file()

    @classmethod
    def check_storage(cls, storage: Storage) -> None:
        """Checks that HDF5 has a kind of storage; see `StoredFile.check_storage`."""
        if storage.shards or storage.compression not in ("none", "gzip"):
            raise UsageError("HDF5 files have no shards, and no compression but gzip")

    @classmethod
    def write(
        cls,
        path: Path,
        arrays: Mapping[str, npt.NDArray[Any]],
        texts: Mapping[str, str],
        storage: Storage,
    ) -> None:
        """Writes arrays; see `write_hdf5`."""
        write_hdf5(path, arrays, texts, storage)

    def _find(self, name: str) -> h5py.Dataset:
        """Follows `name` link by link; the file that has the dataset checks it."""
        components = [c for c in name.split("/") if c]
        if len(components) > self._limits.depth or self._limits.depth < 1:
            raise DataError(f"{self.path}: {name!r} is too deep, or its links form a circle")
        here: Any = self._file
        for position, component in enumerate(components):
            if not isinstance(here, h5py.Group):
                raise DataError(f"{self.path}: {here.name!r} is a dataset, not a group")
            key = component.encode()
            if key not in here.id:
                shown = ", ".join(_names(here, self._limits.names)) or "nothing"
                raise DataError(f"{self.path}: no {component!r} in {here.name!r}; it has {shown}")
            kind = here.id.links.get_info(key).type
            if kind != h5l.TYPE_HARD:
                return self._follow(here, key, kind, components[position + 1 :])
            here = here[component]
        if isinstance(here, h5py.Group):
            shown = ", ".join(_names(here, self._limits.names)) or "nothing"
            raise DataError(f"{self.path}: {name!r} is a group, not a dataset; it has {shown}")
        if not isinstance(here, h5py.Dataset):
            raise DataError(f"{self.path}: {name!r} is not a dataset")
        self._check(name, here)
        return here

    def _follow(self, group: h5py.Group, key: bytes, kind: int, rest: list[str]) -> h5py.Dataset:
        """Follows a soft or external link, if its target is allowed."""
        link = f"{group.name.rstrip('/')}/{key.decode(errors='replace')}"
        if kind not in (h5l.TYPE_SOFT, h5l.TYPE_EXTERNAL):
            raise DataError(f"{self.path}: {link!r} is a user-defined link, which is never opened")
        value = group.id.links.get_val(key)
        if kind == h5l.TYPE_SOFT:
            target = value.decode()
            if not self._roots:
                raise DataError(
                    f"{self.path}: {link!r} is a soft link to {target!r}; links are opened only "
                    "with allow_roots"
                )
            base = "" if target.startswith("/") else group.name
            deeper = replace(self._limits, depth=self._limits.depth - 1)
            inner = SafeFile(self.path, self._file, self._roots, deeper, None, self._by_mpi)
            found = inner.dataset("/".join([base, target, *rest]))
            self._linked += inner._linked
            return found
        file, target = (part.decode() for part in value)
        found_file = self._linked_file(file, f"{link!r} is an external link to {file!r}")
        return found_file.dataset("/".join([target, *rest]))

    def _linked_file(self, name: str, what: str) -> SafeFile:
        """Opens a file that this one links to, if it is in an allowed folder."""
        target = (self.path.parent / name).resolve()
        if not any(target.is_relative_to(root) for root in self._roots):
            allowed = ", ".join(map(str, self._roots)) or "none"
            raise DataError(f"{self.path}: {what}, outside allow_roots ({allowed})")
        deeper = replace(self._limits, depth=self._limits.depth - 1)
        if deeper.depth < 1:
            raise DataError(f"{self.path}: {what}: too many links, or a circle of them")
        file = safe_open(target, allow_roots=self._roots, limits=deeper, driver=self._by_mpi)
        self._linked.append(file)
        return file

    def _check(self, name: str, dataset: h5py.Dataset) -> None:
        """Raises `DataError` if the dataset breaks a rule."""
        where = f"{self.path}: {name!r}"
        check_type(where, dataset.id.get_type())
        if dataset.id.get_space().get_simple_extent_type() != h5py.h5s.SIMPLE:
            raise DataError(f"{where} is not an array")
        creation = dataset.id.get_create_plist()
        if creation.get_external_count():
            raise DataError(
                f"{where} keeps its data in external storage ({_shown(creation.get_external(0)[0])}"
                "), which is never opened"
            )
        if creation.get_layout() == h5d.VIRTUAL:
            self._check_sources(where, creation)
            return
        check_filters(where, creation)
        check_size(where, dataset, creation, self._limits, self._file.id.get_filesize())

    def _check_sources(self, where: str, creation: h5p.PropDCID) -> None:
        """Checks that every source of a virtual dataset is allowed and passes the checks."""
        for i in range(creation.get_virtual_count()):
            file, name = creation.get_virtual_filename(i), creation.get_virtual_dsetname(i)
            what = f"{where} is a virtual dataset with the source {_shown(file)}"
            if not self._roots:
                raise DataError(f"{what}; these are opened only with allow_roots")
            if "%" in file + name:
                raise DataError(f"{what}: sources by pattern are never opened")
            source = self if file == "." else self._linked_file(file, what)
            source.dataset(name)


def _open(path: Path, driver: Driver | None) -> h5py.File:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_sieve_buf_size(0)
    if isinstance(driver, MpiIo):
        driver.prepare(access)
    elif driver is not None:
        access.set_fileobj_driver(h5fd.fileobj_driver, driver)
    try:
        file = h5py.File(h5f.open(os.fsencode(path), h5f.ACC_RDONLY, access))
    except HDF5_ERRORS as error:
        raise DataError(f"{path}: cut short, damaged or not HDF5: {one_line(error)}") from error
    if isinstance(driver, MpiIo):
        driver.opened(file)
    return file


def _check_file(path: Path) -> Stamp:
    status = require_regular(path)
    if status.st_size == 0:
        raise DataError(f"{path}: empty, not an HDF5 file")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: no permission to read it")
    return Stamp.of(status)


def _names(group: h5py.Group, most: int) -> list[str]:
    """Returns up to `most` names in a group, without opening the named objects."""
    names: list[str] = []

    def collect(name: bytes) -> bool | None:
        names.append(name.decode(errors="replace"))
        return True if len(names) >= most else None

    group.id.links.iterate(collect)
    return names


def _shown(name: bytes | str) -> str:
    return repr(name.decode(errors="replace") if isinstance(name, bytes) else name)
