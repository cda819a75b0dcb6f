"""Starts ranks as threads of this process, and ends them together."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

from pydist._loader import native
from pydist.comm.transports.local.transport import LocalTransport
from pydist.errors import RankFailed, RankLost

R = TypeVar("R")

_INSIDE = ("pydist.", "torch.", "threading")


def run_local(
    fn: Callable[..., R],
    size: int,
    *args: object,
    timeout: float = 60,
    **kwargs: object,
) -> list[R]:
    """Runs a function on `size` ranks, each a thread of this process.

    Grad mode, inference mode and autocast of the caller apply to each rank. Random state is per
    process: ranks that draw from it concurrently do not get reproducible numbers.

    Args:
        fn: called as fn(transport, *args, **kwargs) on every rank.
        size: number of ranks.
        *args: passed on, the same objects to all ranks.
        timeout: seconds after which blocked ranks are released and `RankLost` is raised.
        **kwargs: passed on.

    Returns:
        The results in rank order.

    Raises:
        BaseException: the first exception that another rank's failure did not cause, with a note
            that names the rank.
        RankLost: a rank was still busy after `timeout`.
    """
    hub = native.LocalHub(size)
    lent = dict[tuple[int, int, int], object]()
    context = _Context()
    results: dict[int, R] = {}
    failures: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            with context.entered():
                transport = LocalTransport(hub, rank, lent=lent)
                results[rank] = fn(transport, *args, **kwargs)
        except BaseException as error:
            failures.append((rank, error))
            # The stored exception keeps, by its frames, the buffers that others may be reading.
            hub.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            hub.leave(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads, timeout)
    except BaseException as error:
        hub.abort(f"{type(error).__name__}: {error}")
        raise
    if failures:
        raise _first_cause(failures)
    return [results[rank] for rank in range(size)]


def _join(threads: Sequence[threading.Thread], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    busy = [f"{thread.name} {_place_of(thread)}" for thread in threads if thread.is_alive()]
    if busy:
        raise RankLost(f"after {timeout:g} s these ranks have not ended: {', '.join(busy)}")


def _place_of(thread: threading.Thread) -> str:
    """Returns a thread's position: its innermost line outside of pydist and torch."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame = frame.f_back
    return f"(at {frame.f_code.co_filename}:{frame.f_lineno})" if frame is not None else ""


def _first_cause(failures: Sequence[tuple[int, BaseException]]) -> BaseException:
    own = [pair for pair in failures if not isinstance(pair[1], RankFailed)]
    rank, error = (own or failures)[0]
    note = f"raised on rank {rank}"
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    return error


class _Context:
    """Thread-local modes of torch, which new threads do not inherit."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            if torch.cuda.is_available():
                # Backward nodes of all ranks would queue on the device's one engine thread: a node
                # that waits there for another rank would block that rank's nodes forever.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            yield
