"""Follows a run of other processes through a pipe."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator

from pydist.launch.leftovers import private_directory
from pydist.parsing import parse_json
from pydist.train.log import PIPE_VARIABLE, Listener

_TICK = 0.1


@contextlib.contextmanager
def followed(listener: Listener) -> Iterator[None]:
    """Passes the events of the run that the `with` block starts to `listener`, in a thread.

    Rank 0 of the job finds the pipe's name in its environment. All its events are delivered before
    the block ends. If `listener` raises, for example because the terminal is no longer read
    (`| head`) or a disk is full, the run is stopped as by SIGTERM, and the block raises the error
    at its end.
    """
    with private_directory() as folder:
        path = folder / "events"
        os.mkfifo(path, 0o600)
        # Open for writing as well, so that the pipe does not end when a writer leaves.
        handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        over = threading.Event()
        failed: list[Exception] = []
        arguments = (handle, listener, over, failed)
        thread = threading.Thread(target=_follow, args=arguments, daemon=True)
        thread.start()
        os.environ[PIPE_VARIABLE] = str(path)
        try:
            yield
        finally:
            del os.environ[PIPE_VARIABLE]
            over.set()
            thread.join()
            os.close(handle)
        if failed:
            raise failed[0]


def _follow(
    handle: int, listener: Listener, over: threading.Event, failed: list[Exception]
) -> None:
    unread = b""
    poll = select.poll()  # unlike select(), for handles above 1,023 too
    poll.register(handle, select.POLLIN)
    while True:
        # Checked before polling, so that events written before the end are still read.
        last = over.is_set()
        if poll.poll(0 if last else _TICK * 1000):
            *lines, unread = (unread + os.read(handle, 65536)).split(b"\n")
            for line in lines:
                try:
                    event = parse_json(line)
                except ValueError:
                    continue
                try:
                    listener(event)
                except Exception as error:
                    failed.append(error)
                    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the launcher's
                        os.kill(os.getpid(), signal.SIGTERM)
                    return
        elif last:
            return
