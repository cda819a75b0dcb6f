"""Follows a run that other processes do, through a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import select
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from pydist.train.log import PIPE_VARIABLE, Listener

_TICK = 0.1


@contextlib.contextmanager
def followed(listener: Listener) -> Iterator[None]:
    """Hands the events of the run that the `with` block starts to `listener`, in a thread.

    Rank 0 of the job finds the pipe's name in its environment. All that it wrote is handed over
    before the block ends.
    """
    with tempfile.TemporaryDirectory(prefix="pydist-") as folder:
        path = Path(folder, "events")
        os.mkfifo(path, 0o600)
        # Open for writing as well: so the pipe never ends, whoever comes and goes.
        handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        over = threading.Event()
        thread = threading.Thread(target=_follow, args=(handle, listener, over), daemon=True)
        thread.start()
        os.environ[PIPE_VARIABLE] = str(path)
        try:
            yield
        finally:
            del os.environ[PIPE_VARIABLE]
            over.set()
            thread.join()
            os.close(handle)


def _follow(handle: int, listener: Listener, over: threading.Event) -> None:
    unread = b""
    while True:
        # Asked before looking: what was written before the end is still there to be read after it.
        last = over.is_set()
        ready, _, _ = select.select([handle], [], [], 0 if last else _TICK)
        if ready:
            *lines, unread = (unread + os.read(handle, 65536)).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    listener(json.loads(line))
        elif last:
            return
