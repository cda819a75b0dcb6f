"""Draws and lays out arrays for tests of native kernels, and returns what a kernel refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

T = TypeVar("T")


def triples(elements: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, T, T]]:
    return st.tuples(elements, elements, elements)


def grid_tensor(
    shape: Sequence[int], dtype: torch.dtype, generator: np.random.Generator
) -> torch.Tensor:
    """Returns multiples of 1/8: fp16 and bf16 hold them exactly, so only sums are rounded."""
    return torch.from_numpy(generator.integers(-16, 17, shape) / 8).to(dtype)


def strided(tensor: torch.Tensor, order: Sequence[int], gap: int = 3) -> torch.Tensor:
    """Returns the same values in another memory order, with a gap after each row."""
    permuted = tensor.permute(*order)
    padded = tensor.new_zeros(*permuted.shape[:-1], permuted.shape[-1] + gap)
    view = padded[..., : permuted.shape[-1]]
    view.copy_(permuted)
    return view.permute(*np.argsort(order).tolist())


def refusal(function: Callable[..., Any], *args: Any) -> str:
    """Returns the line with which a function refuses its arguments."""
    with pytest.raises(ValueError, match=r".") as info:
        function(*args)
    message = str(info.value)
    assert "\n" not in message
    return message
