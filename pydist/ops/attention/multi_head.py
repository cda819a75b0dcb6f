"""Handles `multi_head_attention_forward`, which `torch.nn.MultiheadAttention` calls."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from pydist.tensor import HANDLERS

_torchs: Any = F.multi_head_attention_forward

# torch's own code: linear layers, products and attention, all of which have handlers. Only the
# check that sends the call here is left out.
_composed = FunctionType(
    _torchs.__code__,
    _torchs.__globals__ | {"has_torch_function": lambda _: False},
    _torchs.__name__,
    _torchs.__defaults__,
)
_composed.__kwdefaults__ = _torchs.__kwdefaults__

HANDLERS[_torchs] = _composed


def _is_left_aligned(*_: Any, **__: Any) -> bool:
    """Answers that a mask does not suit nested tensors: encoders then attend as in training."""
    return False


# What `nn.TransformerEncoder` asks in evaluation, before it would take its fast path.
HANDLERS[torch._nested_tensor_from_mask_left_aligned] = _is_left_aligned
