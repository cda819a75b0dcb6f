"""Runs recurrent layers over unsplit sequences; the batch may be split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.empty import with_elements, without_added
from pydist.ops.transposition import scaled_layout, whole_along
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap
from pydist.tensor.operands import operand_in, parameter_for, redistribute


def _recurrent(
    func: Callable[..., Any],
    input: Tensor,
    hx: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    """Runs a layer whose sequences and features are gathered, or moved to a rank of their own."""
    if not isinstance(input, ShardedTensor) or not isinstance(weights, Sequence):
        raise refusal(func, (input,), {}, "the input is a packed sequence or plain")
    if dropout and train:
        raise refusal(func, (input,), {}, "dropout between its layers: use one layer each")
    of_batch = 0 if batch_first else 1
    if input.shape[1 - of_batch] == 0:  # padded below, it would have a step
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    sequence = [d for d in range(3) if d != of_batch]
    moved = redistribute(input, whole_along(input.layout, sequence))
    work = moved.layout
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    split = work.splits[of_batch]
    initial = [
        with_elements(operand_in(h, Layout(work.mesh, tuple(h.shape), (None, split, None)), work))
        for h in states
    ]
    own = [parameter_for(weight, work) for weight in weights]
    results = func(
        with_elements(local_of(moved)),
        initial[0] if isinstance(hx, Tensor) else initial,
        own, has_biases, num_layers, dropout, train, bidirectional, batch_first,
    )  # fmt: skip
    out = scaled_layout(work, (*input.shape[:2], results[0].shape[2]))
    first = redistribute(
        wrap(without_added(results[0], out.local_shape), out, input),
        scaled_layout(input.layout, out.shape),
    )
    last = []
    for state in results[1:]:
        shape = (state.shape[0], input.shape[of_batch], state.shape[2])
        layout = Layout(work.mesh, shape, (None, split, None))
        last.append(
            redistribute(
                wrap(without_added(state, layout.local_shape), layout, input),
                Layout(work.mesh, shape, (None, input.layout.splits[of_batch], None)),
            )
        )
    return first, *last


def _register(name: str) -> None:
    func = getattr(torch._VF, name)

    @implements(func)
    def handler(*args: Any) -> Any:
        return _recurrent(func, *args)


for _name in ("rnn_tanh", "rnn_relu", "gru", "lstm"):
    _register(_name)
