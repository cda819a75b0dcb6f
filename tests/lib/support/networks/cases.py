"""What a network of the zoo is tried with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

BATCH = 2


class Case(NamedTuple):
    """Network that a test makes, with the extents and channels of a sample."""

    make: Callable[[], nn.Module]
    extents: tuple[int, ...]
    channels: int = 1


class Encoded(nn.Module):
    """A network that is called by one of its methods."""

    def __init__(self, network: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.network, self.call = network, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.network, x)
