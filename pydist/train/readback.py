"""Reads the losses of steps from a device without a wait of the host within a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist.watchdog import BLOCKED, phase

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.data.loader import Batch


@dataclass
class TakenStep:
    """Step that was taken, whose loss may not have been read yet.

    Attributes:
        step: its number, from 1 on.
        batch: the samples, of the first pass.
        count: samples of the group's mean loss that count; 1 if the loss is a sum.
        rate: learning rate.
        loss: over all samples, after it was read.
        seconds: time of the step.
        parts: seconds by part.
        sent: bytes that this rank has sent for gradients.
    """

    step: int
    batch: Batch
    count: int
    rate: float
    loss: float = math.nan
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Returns the fields of the event "step"."""
        size = self.batch.step_size
        return {
            "step": self.step,
            "epoch": self.batch.epoch,
            "loss": self.loss,
            "lr": self.rate,
            "batch": size,
            "passes": self.batch.parts,
            "seconds": self.seconds,
            "samples_per_second": size / self.seconds,
            "gradient_bytes": self.sent,
            "parts": self.parts,
        }


class LateLosses:
    """Losses whose values are read one step late on devices: the host has queued a step by then.

    On CPUs, whose steps are done when their calls return, each loss is read immediately. So it is
    where ranks compute on different kinds of devices, as all ranks read at the same steps.

    Args:
        device: of the losses.
        world: the ranks.
        late: False reads each loss immediately, as measurements of steps need it.
    """

    def __init__(self, device: torch.device, world: Transport, late: bool = True) -> None:
        self.behind = int(late and device.type == "cuda" and not world.mixes)
        """Losses that stay unread after a step."""
        self._waiting: deque[tuple[Tensor, torch.cuda.Event | None, TakenStep]] = deque()

    def add(self, loss: Tensor, taken: TakenStep) -> None:
        """Queues the copy of a loss to the host.

        Args:
            loss: a scalar; its memory may change in the next step, as in a graph.
            taken: the step, which comes back with the value.
        """
        if not loss.is_cuda:
            self._waiting.append((loss.detach().clone(), None, taken))
            return
        value = torch.empty((), dtype=loss.dtype, pin_memory=True)
        value.copy_(loss.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._waiting.append((value, copied, taken))

    def read(self, most: int = 0) -> Iterator[tuple[float, TakenStep]]:
        """Yields losses in the order of their steps.

        Args:
            most: losses that stay unread.
        """
        while len(self._waiting) > most:
            value, copied, taken = self._waiting.popleft()
            with phase("the device", BLOCKED):
                if copied is not None:
                    copied.synchronize()
            yield value.item(), taken
