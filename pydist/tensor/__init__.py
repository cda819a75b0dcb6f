"""The sharded tensor: a torch.Tensor with the global shape, whose shards the ranks hold.

==============  ==================================================================================
module          contents
==============  ==================================================================================
`sharded`       `ShardedTensor`
`handlers`      `implements`, which registers handlers of torch calls, and the observer of gradients
`wrapper`       torch's own calls on the wrapper subclass, and guards of its gradient
`operands`      conversion of plain tensors, parameters and other layouts to a call's operands;
                `distribute_tensor`, which cuts a plain tensor
`aliasing`      a record of tensors that share memory in torch, and of those that are stale here
`deferred`      work on a shard that is deferred until the shard is used
`refusals`      error messages of refused calls
==============  ==================================================================================
"""

from pydist.tensor.handlers import HANDLERS, implements
from pydist.tensor.refusals import module_path, refusal
from pydist.tensor.sharded import (
    Origin,
    ShardedTensor,
    local_of,
    plain_result,
    replace_shard_,
    source_among,
    view_of,
    wrap,
    wrap_new,
)

__all__ = [
    "HANDLERS", "Origin", "ShardedTensor", "implements", "local_of",
    "module_path", "plain_result", "refusal", "replace_shard_", "source_among", "view_of", "wrap",
    "wrap_new",
]  # fmt: skip
