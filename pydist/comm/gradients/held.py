"""Which gradients exist on any rank: said in every backward, read only where it matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pydist.comm.interface.handles import Work
from pydist.errors import NotSupported

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport


class HeldGradients:
    """Which of a model's gradients any rank has.

    The flags travel where the gradients do, so that on a device no host waits for another one. A
    rank that has a gradient knows the answer; only one that has not reads it.

    While a step is captured nothing is sent. The answer is that of the step before, as each rank
    has proved for itself that it has the same gradients again; one that has not refuses, and the
    ranks agree afterwards that there is no graph.

    Args:
        transport: over all ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._own: list[bool] = []
        self._flags = self._any = torch.empty(0, dtype=torch.int32)
        self._read: list[int] | None = None

    def start(self, own: Sequence[bool], device: torch.device) -> Work:
        """Starts to ask all ranks; to be waited for before `anywhere`. Collective.

        Args:
            own: of every parameter, whether this rank has a gradient.
            device: of the gradients.

        Raises:
            NotSupported: a step is captured that has other gradients than the one before.
        """
        same = self._own == list(own) and self._flags.device == device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if not same:
                raise NotSupported("a CUDA graph of a step with other gradients than the last one")
            return Work()
        if not same:
            self._own = list(own)
            self._flags = torch.tensor(self._own, dtype=torch.int32, device=device)
        self._any, self._read = self._flags.clone(), None
        return self._transport.all_reduce_async(self._any, "max")

    def anywhere(self, index: int) -> bool:
        """Whether any rank has the gradient of a parameter."""
        if self._own[index]:
            return True
        if self._read is None:
            self._read = self._any.tolist()
        return bool(self._read[index])
