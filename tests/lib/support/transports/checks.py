"""What checks of transports share: how they are listed, and the values that they send."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pydist.comm import Transport

Check = Callable[[Transport], None]


class Checks(list[Check]):
    """Functions that all ranks call."""

    def add(self, function: Check) -> Check:
        """Adds a function; a decorator."""
        self.append(function)
        return function


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)


def numbers(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns small integers that differ by rank and position, exact in every dtype."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    values = (torch.arange(count) * 3 + rank * 5 + 1) % 7
    return (values % 2 if dtype == torch.bool else values).to(dtype).reshape(shape)


def normal(generator: torch.Generator, count: int) -> Tensor:
    """Draws random numbers that are equal on every device."""
    values = torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(torch.get_default_device())


def equal(actual: Tensor, expected: Tensor) -> None:
    """Asserts that two tensors are equal, NaN included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def same_on_all_ranks(t: Transport, tensor: Tensor) -> None:
    """Asserts that all ranks have the same bits."""
    rows = t.all_gather_bytes(
        tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    )
    assert all(row == rows[0] for row in rows)
