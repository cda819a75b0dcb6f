"""The sharded tensor: a torch.Tensor with the global shape, of which each rank holds a shard.

==============  ==================================================================================
module          what it holds
==============  ==================================================================================
`sharded`       `ShardedTensor`, and `implements`, by which handlers take torch's calls
`wrapper`       torch's own calls on the wrapper subclass, and guards of its gradient
`operands`      how plain tensors, parameters and tensors in other layouts enter a call
`distribute`    `distribute_tensor`, which cuts a plain tensor
`aliasing`      which tensors share memory in torch, and which are stale here
`deferred`      work on a shard that is put off until the shard is used
`refusals`      what a refused call says
==============  ==================================================================================
"""

from pydist.tensor.refusals import module_path, refusal
from pydist.tensor.sharded import (
    HANDLERS,
    Origin,
    ShardedTensor,
    adopt_local,
    implements,
    local_of,
    view_of,
    wrap,
    wrap_new,
)

__all__ = [
    "HANDLERS", "Origin", "ShardedTensor", "adopt_local", "implements",
    "local_of", "module_path", "refusal", "view_of", "wrap", "wrap_new",
]  # fmt: skip
