"""What can go wrong, by whose fault it is, and the exit code that says so.

Every error that a user can cause or meet is one of these classes, and its message is one line that
names what was given and what is possible. The exit codes are part of the public interface: job
scripts act on them (75, for one, means "requeue me").
"""

from __future__ import annotations


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


def exit_code_of(error: BaseException) -> int:
    """The exit code with which a process that ends with `error` should end."""
    if isinstance(error, PydistError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, MemoryError):
        return DoesNotFit.exit_code
    return 71
