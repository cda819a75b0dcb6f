"""States of the generators of random numbers from which a network may draw."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_lock = threading.Lock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Lets one rank of this process use torch's generator; ranks that are threads share it."""
    # torch takes a lock while it holds Python's: a garbage collection within would wait for both.
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


class Generators:
    """States that torch's, Python's and NumPy's generators have at one time.

    Args:
        device: where the network computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with one_at_a_time():
            self._torchs = torch.get_rng_state()
        self._pythons, self._numpys = random.getstate(), np.random.get_state()
        self._devices = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Sets the generators to these states."""
        with one_at_a_time():
            torch.set_rng_state(self._torchs)
        random.setstate(self._pythons)
        np.random.set_state(self._numpys)
        if self._devices is not None:
            torch.cuda.set_rng_state(self._devices, self._device)
