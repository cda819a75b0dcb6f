"""Defines the error classes of pydist, by cause, with their exit codes.

Every error that a user can cause or encounter is one of these classes, and its message is one line
that names the given and the possible values. The exit codes are part of the public interface: job
scripts act on them (for example, 75 means "requeue me").
"""

from __future__ import annotations

import errno
import mmap
import re
import select
import sys

_ALLOCATION = re.compile(
    r"out of memory|out_of_memory|not enough memory|memory allocation failed|ALLOC_FAILED|bad_alloc"
    r"|storage size calculation overflow|integer multiplication overflow"
    r"|(can't|can not|cannot|unable to|failed to|could not) allocate",
    re.IGNORECASE,
)
"""Out-of-memory messages of torch, CUDA, cuBLAS, cuDNN, oneDNN and HDF5."""

_ONEDNN = re.compile(r"could not (create|execute|initialize) a \w+")
"""Messages of oneDNN, which do not say whether memory was missing."""

_SPARE = 256 << 20
"""Bytes that a process can still get unless memory was missing for a oneDNN primitive."""

_WANTED = re.compile(
    r"(?:allocate|allocating):? (?P<n>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>bytes|[KMGTP]i?B)"
)
"""The size in such a message of torch ("you tried to allocate 4096 bytes"), CUDA ("Tried to
allocate 2.00 GiB") or NumPy ("Unable to allocate 3.6 TiB")."""

SIGPIPE_CODE = 141
"""The exit code, as of a shell, of a tool whose output is no longer read."""


class PydistError(Exception):
    """Base class of all errors that pydist raises deliberately."""

    exit_code = 71
    on_all_ranks = False
    """Whether all ranks have raised it at the same place, so that they can go on together; see
    `pydist.comm.consensus.together`."""


class UsageError(PydistError, ValueError):
    """A call or a configuration that requests something impossible."""

    exit_code = 2


class NotSupported(PydistError, NotImplementedError):
    """A call that is valid in torch but has no exact form on sharded tensors.

    A `RuntimeError` (through `NotImplementedError`), as torch would turn a `TypeError` raised
    inside an operator into "unsupported operand" and hide the reason.
    """

    exit_code = 2


class DataError(PydistError, ValueError):
    """A file or a sample that is missing, damaged or not as expected."""

    exit_code = 65


class DoesNotFit(PydistError, MemoryError):
    """Work that does not fit into the memory of its ranks."""

    exit_code = 66


class RankFailed(PydistError, RuntimeError):
    """An error on another rank, after which this one can't continue."""

    exit_code = 71


class RankLost(PydistError, RuntimeError):
    """A rank that died or hangs."""

    exit_code = 72


class CheckpointError(PydistError, RuntimeError):
    """A checkpoint that is missing, incomplete, damaged or does not match the model."""

    exit_code = 73


class DiskError(PydistError, OSError):
    """Write or read that failed: disk full, permission, quota."""

    exit_code = 74


class Stopped(PydistError):
    """A stop by a signal, after a checkpoint was saved."""

    exit_code = 75


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that host or device memory could not be allocated.

    torch and HDF5 then raise errors of other types, which only the text distinguishes.
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, PydistError) or not isinstance(error, RuntimeError | OSError):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    said = str(error)
    return bool(_ALLOCATION.search(said) or (_ONEDNN.search(said) and not _can_get(_SPARE)))


def _can_get(nbytes: int) -> bool:
    """Returns whether this process can get memory; takes none."""
    try:
        mmap.mmap(-1, nbytes).close()
    except (OSError, MemoryError):
        return False
    return True


def wanted_bytes(error: BaseException) -> int | None:
    """Returns the bytes that could not be allocated, if the error tells."""
    found = _WANTED.search(str(error))
    if found is None:
        return None
    power = 0 if found["unit"] == "bytes" else 1 + "KMGTP".index(found["unit"][0])
    return round(float(found["n"]) * 1024**power)


def one_line(error: BaseException) -> str:
    """Returns the message of an error on one line."""
    return " ".join(str(error).split())


def in_words(error: BaseException) -> str:
    """Returns one line that describes an error of a user's program."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def disk_is_full(error: BaseException) -> bool:
    """Returns whether an error means that a disk, or this user's quota, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def output_is_gone(error: BaseException) -> bool:
    """Returns whether an error means that this process's output is no longer read (`| head`)."""
    return isinstance(error, BrokenPipeError) and output_is_unread()


def output_is_unread() -> bool:
    """Returns whether this process's output is a pipe that has no reader any more."""
    poll = select.poll()
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                poll.register(stream.fileno(), 0)
        except (OSError, ValueError):
            continue
    return any(event & select.POLLERR for _, event in poll.poll(0))


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code for a process that ends with `error`."""
    if isinstance(error, PydistError):
        return error.exit_code
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        # A launcher ends the other ranks for it, so a code cut to 0 is not a success.
        return code if code == 0 or code & 0xFF else PydistError.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    foreseen = (
        (out_of_memory, DoesNotFit.exit_code),
        (disk_is_full, DiskError.exit_code),
        (output_is_gone, SIGPIPE_CODE),
    )
    return next((code for is_one, code in foreseen if is_one(error)), PydistError.exit_code)
