"""Serves a resident network over HTTP, by Starlette and uvicorn.

POST /predict takes an array [C, D, H, W], or [C, H, W] of an image, as the content of a .npy file.
It answers the classes of a segmentation, [D, H, W] or [H, W], as .npy as well; of other tasks JSON
with the values, or class and scores.
GET /health answers JSON: status, network, task, ranks, requests that wait and were answered.

Anything else is refused as JSON, {"error": "..."}: 400 for a body that is no array or an array that
the network refuses, 404, 405, 413 for a body that is too large, 503 with Retry-After where too many
requests wait or the service is ending.
"""

from __future__ import annotations

import asyncio
import io
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.numpy_file import read_header
from pydist.errors import DataError, PydistError, UsageError
from pydist.inference.service import SECONDS_TO_END, Busy, Closing, Service

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError:
    raise UsageError("a server needs Starlette and uvicorn: pip install 'pydist[serve]'") from None

NPY = "application/x-npy"
"""Content type of arrays."""
_START_SECONDS = 30.0
_TICK = 0.2
"""Seconds after which a request whose body stalls looks whether the service is ending."""


def application(service: Service, largest: int) -> Starlette:
    """Returns the ASGI application of a service.

    Args:
        service: answers the requests.
        largest: bytes of the largest body that is accepted.
    """

    async def predict(request: Request) -> Response:
        image = array_of(await _body(request, largest, service))
        # Checking and normalizing takes long for large volumes: other requests go on meanwhile.
        answer = await asyncio.wrap_future(await asyncio.to_thread(service.submit, image))
        if isinstance(answer, dict):
            return JSONResponse(answer)
        content = io.BytesIO()
        np.save(content, answer, allow_pickle=False)
        return Response(content.getvalue(), media_type=NPY)

    async def health(request: Request) -> Response:
        return JSONResponse(service.facts())

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, Busy | Closing):
            return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
        if isinstance(error, HTTPException):
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        if isinstance(error, DataError | UsageError):
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"error": "the server has failed"}, 500)

    routes = [Route("/predict", predict, methods=["POST"]), Route("/health", health)]
    handlers: Any = {HTTPException: refused, PydistError: refused, Exception: refused}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _body(request: Request, largest: int, service: Service) -> bytes:
    """Reads a body, at most as large as allowed; it may come without its length.

    One that stalls is given up when the service ends, which would refuse it anyway.
    """
    content, chunks = bytearray(), request.stream()
    while True:
        coming = asyncio.ensure_future(anext(chunks, None))
        while not (await asyncio.wait({coming}, timeout=_TICK))[0]:
            if service.is_closing:
                coming.cancel()
                raise Closing
        if (chunk := coming.result()) is None:
            return bytes(content)
        content += chunk
        if len(content) > largest:
            raise HTTPException(413, f"the body has more than {largest} bytes")


def array_of(content: bytes) -> npt.NDArray[np.generic]:
    """Reads an array from the content of a .npy file.

    Raises:
        DataError: it is none, has more or fewer bytes than its header says, or holds other than
            real numbers of up to 8 bytes.
    """
    try:
        file = io.BytesIO(content)
        shape, backwards, dtype = read_header(file)
        # Before anything of that size is allocated.
        expected, found = np.prod(shape, dtype=object) * dtype.itemsize, len(content) - file.tell()
        if expected != found:
            raise ValueError(f"{found} bytes for the shape {shape} of {dtype}: {expected} needed")
        values = np.frombuffer(content, dtype, offset=file.tell())
        array = values.reshape(shape, order="F" if backwards else "C")
    except ValueError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"the body is not the content of a .npy file: {reason}") from None
    # In the machine's byte order, and writable, as torch needs it.
    return np.array(array, dtype=dtype.newbyteorder("="), order="C")


class HttpServer:
    """HTTP server that a service has, in a thread of its own.

    Args:
        service: answers the requests.
        host: address to listen at.
        port: its port; 0 for any free one.
        largest: bytes of the largest body that is accepted.

    Raises:
        UsageError: the address can't be used.
    """

    def __init__(self, service: Service, host: str, port: int, largest: int) -> None:
        self._service = service
        app = application(service, largest)
        config = uvicorn.Config(
            app, host, port, log_level="critical", access_log=False, lifespan="off",
            timeout_graceful_shutdown=SECONDS_TO_END,  # of clients that do not read their answers
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="pydist http", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started and self._thread.is_alive():
            if time.monotonic() > deadline:
                raise UsageError(f"no server at {host}:{port} within {_START_SECONDS:.0f} s")
            time.sleep(0.01)
        if not self._server.started:
            raise UsageError(
                f"can't listen at {host}:{port}: is the port free, and the address this machine's?"
            )
        self.host = host
        """Address at which it listens."""
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        """Port at which it listens."""

    def _run(self) -> None:
        with suppress(SystemExit):  # uvicorn exits where the address is in use
            self._server.run()

    def close(self) -> None:
        """Accepts no more connections; those that have requests under way get their answers."""
        self._service.close()
        self._server.should_exit = True

    @property
    def is_over(self) -> bool:
        """Whether all requests were answered after `close`."""
        return not self._thread.is_alive()
