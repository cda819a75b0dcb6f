"""Extends `torch.nn.utils.vector_to_parameters` to models with sharded weights."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from pydist.exchange.own_slice import own_slice
from pydist.tensor.sharded import ShardedTensor, whole_of

_function: Any = torch.nn.utils.vector_to_parameters
_torchs: Any = getattr(_function, "torchs", None) or FunctionType(
    _function.__code__, _function.__globals__, _function.__name__
)
"""torch's original function, also after `install`."""


def set_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Sets parameters to the values of a vector, as made by `parameters_to_vector`.

    That vector is sharded if a weight is. torch would make pieces of it the memory of plain
    parameters, which they do not have: the process would crash.
    """
    parameters = list(parameters)
    _torchs(whole_of(vec), parameters)
    if isinstance(vec, ShardedTensor):  # the whole vector is a copy, which nothing is to keep
        for own in map(own_slice, parameters):
            own.data = own.data.clone()


def install() -> None:
    """Makes torch's function call `set_parameters`.

    The function object stays, as scripts may have imported it; only its code is replaced.
    """

    def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
        from pydist.slices.vectors import set_parameters  # it runs among the globals of torch.nn

        set_parameters(vec, parameters)

    _function.__code__, _function.torchs = vector_to_parameters.__code__, _torchs
