"""`torch.utils.swap_tensors` for parameters that the reducer knows.

Modules also call it for their parameters, after
`torch.__future__.set_swap_module_params_on_conversion(True)`.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from pydist.exchange.link import links_to
from pydist.gradients.leaf import leaf_of
from pydist.gradients.leaf_hooks import remove_own

_function: Any = torch.utils.swap_tensors
_torchs: Any = getattr(_function, "torchs", None) or FunctionType(
    _function.__code__, _function.__globals__, _function.__name__
)
"""torch's original function, also after `install`."""


def swap(t1: Tensor, t2: Tensor) -> None:
    """Swaps the contents of two tensors; a parameter stays a member of the reducer.

    torch swaps the hooks with the contents. So users' hooks change places, but the reducer's hooks
    stay with the object, which the model and the optimizer hold.
    """
    pair: list[Any] = [t1, t2]
    links = [links_to(tensor) for tensor in pair]
    for link in (*links[0], *links[1]):
        link.undo()
    # A tensor without storage, such as a sharded one, is never a member.
    leaves = [leaf_of(t) if _has_storage(t) else None for t in pair]
    known = leaves != [None, None]
    hooks = [(t._backward_hooks, t._post_accumulate_grad_hooks) for t in pair] if known else []
    try:
        _torchs(t1, t2)
    finally:
        for tensor, its in zip(pair, links, strict=True):
            for link in its:
                link.restore(tensor)
    if not known:
        return
    for tensor, leaf, others in zip(pair, leaves, reversed(hooks), strict=True):
        if leaf is None:
            remove_own(tensor, *others)
        else:
            leaf.attach(tensor, *others)


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def install() -> None:
    """Makes torch's function call `swap`.

    The function object stays, as scripts may have imported it; only its code is replaced.
    """

    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        from pydist.gradients.swap import swap  # it runs among the globals of torch.utils

        swap(t1, t2)

    _function.__code__, _function.torchs = swap_tensors.__code__, _torchs
