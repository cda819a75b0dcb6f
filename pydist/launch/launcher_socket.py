"""The connection between a rank and the launcher that watches it.

A rank reports its identity, asks before it prints an error (so that an error of all ranks is
printed once), and reports an orderly exit. Either side sees the other one's death immediately, as
the end of the stream: the launcher then ends the job, and a rank ends itself, so that no rank
outlives its launcher. The connection is a Unix socket in a directory that only the user can enter.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
from typing import ClassVar

VARIABLE = "PYDIST_SUPERVISOR"
"""Environment variable that holds the path of the launcher's socket."""

ORPHANED = 143


class LauncherSocket:
    """Connection that a rank has to the `pydist run` that started it."""

    current: ClassVar[LauncherSocket | None] = None
    """The connection of this process, if it has one."""

    def __init__(self, path: str, rank: int) -> None:
        """Connects and reports this rank.

        Args:
            path: the launcher's socket.
            rank: this process's rank in the job.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ended = False
        self.joined = False
        """Whether this rank has joined the other ranks; reported to the launcher at the end."""
        self._send({"rank": rank, "pid": os.getpid()})
        LauncherSocket.current = self
        threading.Thread(target=self._listen, name="pydist launcher socket", daemon=True).start()

    def fileno(self) -> int:
        """Returns the socket's descriptor, for the native watchdog's last message."""
        return self._socket.fileno()

    def claim(self, exit_code: int) -> bool:
        """Reports a failure of this rank; returns True if it is the first of the job."""
        self._send({"claim": exit_code})
        try:
            return self._answers.get(timeout=5)
        except queue.Empty:
            return True

    def say(self, text: str) -> None:
        """Makes the launcher print a text: MPICH drops output written just before a rank ends."""
        self._send({"say": text})

    def end(self) -> None:
        """Reports that this process ends in good order."""
        self._ended = True
        self._send({"end": self.joined})

    def _send(self, message: dict[str, int | str]) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: `_listen` acts on it
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(64):
                for answer in data.split():
                    self._answers.put(answer == b"yes")
        if not self._ended:
            os._exit(ORPHANED)
