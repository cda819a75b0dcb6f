"""Random numbers of calls, which belong to the call on any stage."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.errors import NotSupported
from pydist.mesh import Mesh
from pydist.ops.pointwise.keyed import draws_of
from pydist.stages.calls import Call
from pydist.stages.generators import one_at_a_time
from pydist.stages.ranks import device_of
from pydist.tensor import ShardedTensor

_T: Any = Tensor
DRAWS = frozenset({
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
    torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal,
    torch.poisson, _T.bernoulli, _T.bernoulli_, _T.uniform_, _T.normal_, _T.exponential_,
    _T.random_, F.rrelu, F.gumbel_softmax, F.multi_head_attention_forward,
    F.scaled_dot_product_attention,
})  # fmt: skip
"""Calls that may draw random numbers."""


def run_drawing(call: Call, mesh: Mesh, forward: int, drawn: int, micro_batch: int) -> Any:
    """Computes a call that draws random numbers.

    Args:
        call: the call.
        mesh: of this rank's stage.
        forward: number of the forward pass whose random numbers these are.
        drawn: number of such calls that its module has made before, on all stages.
        micro_batch: its index in the batch.
    """
    module = call.key.module
    if any(isinstance(x.value, ShardedTensor) for x in call.inputs):
        draws_of(mesh).begin(forward)[module] = drawn
        return call.run()
    key = f"{mesh.seed}/{forward}/{module}/{drawn}/{micro_batch}/{mesh.data_index}".encode()
    device = device_of(mesh)
    devices = [device] if device.type == "cuda" else []
    with one_at_a_time(), torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(blake2b(key, digest_size=7).digest(), "little"))
        return call.run()


def refuse_to_draw_again(call: Call) -> None:
    """Refuses a call on plain tensors that a checkpointed part repeats in backward.

    Raises:
        NotSupported: it draws random numbers, which would be other ones.
    """
    draws = call.func in DRAWS and call.draws
    if draws and not any(isinstance(x.value, ShardedTensor) for x in call.inputs):
        raise NotSupported(
            f"{call} on a plain tensor, within a part under torch.utils.checkpoint, in a "
            "network in stages: it would draw other numbers in backward; use recompute=True of "
            "pydist.pipeline instead"
        )
