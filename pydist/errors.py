"""What can go wrong, by whose fault it is, and the exit code that says so.

Every error that a user can cause or meet is one of these classes, and its message is one line that
names what was given and what is possible. The exit codes are part of the public interface: job
scripts act on them (75, for one, means "requeue me").
"""

from __future__ import annotations

import errno
import re
import select
import sys

_ALLOCATION = re.compile(
    r"out of memory|out_of_memory|not enough memory|memory allocation failed|ALLOC_FAILED"
    r"|storage size calculation overflow|integer multiplication overflow"
    r"|(can't|can not|cannot|unable to|failed to|could not) allocate",
    re.IGNORECASE,
)
"""What torch, CUDA, cuBLAS, cuDNN, oneDNN and HDF5 say where there is no memory left."""


_SIGPIPE = 141
"""The exit code, as of a shell, of a tool whose output is no longer read."""


class PydistError(Exception):
    """Base of all errors that pydist raises on purpose."""

    exit_code = 71


class UsageError(PydistError, ValueError):
    """The call or the configuration asks for something impossible."""

    exit_code = 2


class NotSupported(PydistError, NotImplementedError):
    """A call that is valid in torch but has no exact form on sharded tensors.

    It is a `RuntimeError` (through `NotImplementedError`): torch would turn a `TypeError` raised
    inside an operator into "unsupported operand" and hide the reason.
    """

    exit_code = 2


class DataError(PydistError, ValueError):
    """A file or a sample is missing, damaged or not what it should be."""

    exit_code = 65


class DoesNotFit(PydistError, MemoryError):
    """The work does not fit into the memory of the ranks it was given."""

    exit_code = 66


class RankFailed(PydistError, RuntimeError):
    """Another rank raised, so that this one can't go on."""

    exit_code = 71


class RankLost(PydistError, RuntimeError):
    """A rank died or hangs."""

    exit_code = 72


class CheckpointError(PydistError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or does not match the model."""

    exit_code = 73


class DiskError(PydistError, OSError):
    """Writing or reading failed: disk full, permission, quota."""

    exit_code = 74


class Stopped(PydistError):
    """Stopped by a signal after a checkpoint was saved."""

    exit_code = 75


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the host or of a device, could not be had.

    torch and HDF5 raise errors of other kinds then, which only their text tells from the rest.
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, PydistError) or not isinstance(error, RuntimeError | OSError):
        return False
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    return _ALLOCATION.search(str(error)) is not None


def in_words(error: BaseException) -> str:
    """What an error of a user's program says, on one line."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def disk_is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or this user's part of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def output_is_gone(error: BaseException) -> bool:
    """Whether an error means that the reader of this process's output has ended: `| head` does."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    for stream in (sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                poll.register(stream.fileno(), 0)
        except (OSError, ValueError):
            continue
    return any(event & select.POLLERR for _, event in poll.poll(0))


def exit_code_of(error: BaseException) -> int:
    """The exit code with which a process that ends with `error` should end."""
    if isinstance(error, PydistError):
        return error.exit_code
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        # A launcher ends the other ranks for it, so it is no success where the system cuts it to 0.
        return code if code == 0 or code & 0xFF else PydistError.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    foreseen = (
        (out_of_memory, DoesNotFit.exit_code),
        (disk_is_full, DiskError.exit_code),
        (output_is_gone, _SIGPIPE),
    )
    return next((code for is_one, code in foreseen if is_one(error)), PydistError.exit_code)
