"""Random numbers of calls, which belong to the call on any stage."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.errors import NotSupported
from pydist.mesh import Mesh
from pydist.ops.pointwise.dropout import UNBATCHED
from pydist.ops.pointwise.keyed import draws_of
from pydist.stages.calls import Call
from pydist.stages.generators import one_at_a_time
from pydist.stages.ranks import device_of
from pydist.tensor import ShardedTensor
from pydist.tensor.aliasing import as_result
from pydist.tensor.operands import distribute_tensor

_T: Any = Tensor
_ALPHA = frozenset({F.alpha_dropout, F.feature_alpha_dropout})
_DROPOUTS = _ALPHA | {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
_NATIVE = frozenset({
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
})  # fmt: skip
DRAWS = _DROPOUTS | _NATIVE | {
    torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal,
    torch.poisson, _T.bernoulli, _T.bernoulli_, _T.uniform_, _T.normal_, _T.exponential_,
    _T.random_, F.rrelu, F.gumbel_softmax, F.multi_head_attention_forward,
    F.scaled_dot_product_attention,
}  # fmt: skip
"""Calls that may draw random numbers."""
_NEEDED: dict[Any, tuple[tuple[int, str, Any], ...]] = {
    **dict.fromkeys(_DROPOUTS - _ALPHA, ((1, "p", 0.5), (2, "training", True))),
    **dict.fromkeys(_ALPHA, ((1, "p", 0.5), (2, "training", False))),
    **dict.fromkeys(_NATIVE, ((1, "p", 0.5), (2, "train", True))),
    F.rrelu: ((3, "training", False),),
    F.scaled_dot_product_attention: ((4, "dropout_p", 0.0),),
    F.multi_head_attention_forward: ((10, "dropout_p", 0.0), (13, "training", True)),
}
"""Arguments that a call draws nothing without: place, name and default."""


def draws(call: Call) -> bool:
    """Returns whether a call draws random numbers: not with p=0, or in evaluation."""

    def given(place: int, name: str, default: Any) -> Any:
        return call.args[place] if place < len(call.args) else call.kwargs.get(name, default)

    needed = _NEEDED.get(call.func, ())
    return call.func in DRAWS and all(given(*each) for each in needed)


def run_drawing(
    call: Call, mesh: Mesh, forward: int, drawn: int, micro_batch: int, samples: range | None
) -> Any:
    """Computes a call that draws random numbers.

    Args:
        call: the call.
        mesh: of this rank's stage.
        forward: number of the forward pass whose random numbers these are.
        drawn: number of such calls that its module has made before, on all stages.
        micro_batch: its index in the batch.
        samples: their indices in the global batch, if it is one of a step.
    """
    module = call.key.module
    sharded = [x.value for x in call.inputs if isinstance(x.value, ShardedTensor)]
    if sharded:
        draws_of(mesh).begin(forward, sharded[0]._origin.sizes.part)[module] = drawn
        return call.run()
    if _drops(call) and (samples is None or _has_rows_of(call, samples)):
        draws_of(mesh).begin(forward, mesh.session.part)[module] = drawn
        return _dropped(call, mesh, samples)
    key = f"{mesh.seed}/{forward}/{module}/{drawn}/{micro_batch}/{mesh.data_index}".encode()
    device = device_of(mesh)
    devices = [device] if device.type == "cuda" else []
    with one_at_a_time(), torch.random.fork_rng(devices):
        torch.manual_seed(int.from_bytes(blake2b(key, digest_size=7).digest(), "little"))
        return call.run()


def _drops(call: Call) -> bool:
    """Returns whether a call is dropout of a batch, whose mask goes by the index of the sample."""
    if call.func not in _DROPOUTS:
        return False
    return bool(call.inputs[0].meta.dim() > UNBATCHED.get(call.func, 1))


def _has_rows_of(call: Call, samples: range) -> bool:
    """Returns whether a plain tensor may have equally many rows for each sample of a step.

    Nothing is exchanged otherwise: groups with other numbers of samples may find something else.
    """
    return len(samples) > 0 and call.inputs[0].meta.shape[0] % len(samples) == 0


def _dropped(call: Call, mesh: Mesh, samples: range | None) -> Tensor:
    """Computes dropout of a plain tensor with the mask of the whole batch.

    As `pydist.batch_layers` does without stages.
    """
    value = call.inputs[0].value
    assert value is not None
    first = None if samples is None else samples.start * (len(value) // len(samples))
    given = {**dict(zip(("input", "p", "training"), call.args, strict=False)), **call.kwargs}
    given |= {"input": distribute_tensor(value, mesh, {}, first_sample=first), "inplace": False}
    result: Tensor = as_result(call._replace(args=(), kwargs=given).run().full_tensor())
    return value.copy_(result) if call.changed else result


def refuse_to_draw_again(call: Call) -> None:
    """Refuses a call on plain tensors that a checkpointed part repeats in backward.

    Raises:
        NotSupported: it draws random numbers, which would be other ones.
    """
    if draws(call) and not any(isinstance(x.value, ShardedTensor) for x in call.inputs):
        raise NotSupported(
            f"{call} on a plain tensor, within a part under torch.utils.checkpoint, in a "
            "network in stages: it would draw other numbers in backward; use recompute=True of "
            "pydist.pipeline instead"
        )
