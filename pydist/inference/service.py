"""Answers requests with a resident network: a queue between those who ask and the ranks.

A thread of its own, of an HTTP server or another front, submits images. The ranks compute in their
main threads, as communication belongs to one thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pydist.errors import DataError, PydistError
from pydist.inference.resident import Resident, labels_of
from pydist.interop import ArrayLike

_TICK = 0.01
"""Seconds after which a service without requests tells the other ranks that it is alive."""

SECONDS_TO_END = 600
"""Time to answer the requests that are under way when the service is asked to end."""


class Busy(PydistError):
    """Error of a request that arrives while too many are waiting."""


class Closing(PydistError):
    """Error of a request that arrives after the service was asked to end."""

    def __init__(self) -> None:
        super().__init__("the service is ending")


@dataclass
class _Request:
    """Image that waits for its prediction."""

    x: Tensor
    answer: Future[Any] = field(default_factory=Future)


class Service:
    """Queue that holds the requests for a resident network, on the first rank.

    Args:
        resident: the network.
        waiting: the largest number of requests that wait.
    """

    def __init__(self, resident: Resident, waiting: int = 64) -> None:
        self.resident = resident
        self.answered = 0
        """Number of requests that were answered."""
        self._queue: queue.Queue[_Request] = queue.Queue(waiting)
        self._closing = threading.Event()
        # No request is added after closing. A second signal may call `close` within the first.
        self._lock = threading.RLock()

    def submit(self, image: ArrayLike) -> Future[Any]:
        """Adds a request. From any thread.

        Args:
            image: see `Resident.prepared`.

        Returns:
            The future answer: of a segmentation the class of each voxel, [D, H, W]; else a dict,
            of a regression the values by name, of a classification class and scores.

        Raises:
            DataError: the image is refused, see `Resident.prepared`.
            Busy: too many requests are waiting.
            Closing: the service is ending.
        """
        request = _Request(self.resident.prepared(image))
        with self._lock:
            if self.is_closing:
                raise Closing
            try:
                self._queue.put_nowait(request)
            except queue.Full:
                raise Busy(f"{self._queue.maxsize} requests are waiting: try again later") from None
        return request.answer

    def close(self) -> None:
        """Refuses requests from now on, and lets `run` end when all that wait are answered."""
        with self._lock:
            self._closing.set()

    def run(self, is_over: Callable[[], bool] = lambda: True) -> None:
        """Answers requests until `close` was called, all are answered and `is_over` agrees.

        In the main thread of the first rank; the other ranks are in `Resident.follow`.
        """
        told = 0.0
        while True:
            requests = self._taken()
            if requests:
                self._answer(requests)
            elif self.is_closing and self._queue.empty() and is_over():
                self.resident.end()
                return
            elif time.monotonic() - told >= _TICK:
                self.resident.idle()
                told = time.monotonic()

    def _taken(self) -> list[_Request]:
        """Returns requests that all groups can compute at a time; waits for a first one shortly."""
        found: list[_Request] = []
        try:
            found.append(self._queue.get(timeout=_TICK))
            while len(found) < self.resident.groups:
                found.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        # Those whose client has left are not computed.
        return [each for each in found if each.answer.set_running_or_notify_cancel()]

    def _answer(self, requests: list[_Request]) -> None:
        outputs = self.resident.predict([each.x for each in requests])
        for request, output in zip(requests, outputs, strict=True):
            self.answered += 1
            try:
                request.answer.set_result(self._result(output))
            except DataError as error:
                request.answer.set_exception(error)

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    @property
    def kind(self) -> str:
        """What is predicted: "segmentation", "regression" or "classification"."""
        return self.resident.loaded.kind

    def _result(self, output: Tensor) -> Any:
        """Returns the answer of an output of the network.

        Raises:
            DataError: the output is not finite.
        """
        if self.kind == "segmentation":
            return labels_of(output)
        if not output.isfinite().all():
            raise DataError("the network's output for this input has NaN or infinite values")
        outputs = output.double().flatten().tolist()
        names = self.resident.loaded.names_of(len(outputs))
        values = dict(zip(names, outputs, strict=True))
        if self.kind == "regression":
            return {"values": values}
        return {"class": max(values, key=values.__getitem__), "scores": values}

    def facts(self) -> dict[str, Any]:
        """Returns what the service tells of itself."""
        manifest, mesh = self.resident.loaded.manifest, self.resident.mesh
        return {
            "status": "ending" if self.is_closing else "ok",
            "network": self.resident.loaded.name,
            "task": self.kind,
            "outputs": list(manifest.class_names or manifest.target_names),
            "channels": manifest.sample_shape[0],
            "multiple": self.resident.loaded.task.multiple or 1,
            "ranks": mesh.world.size,
            "mesh": str(mesh.grid),
            "waiting": self._queue.qsize(),
            "answered": self.answered,
        }
