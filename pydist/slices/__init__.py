"""Weights in slices: each rank along the channel axis stores the filters that it computes with.

`pydist.parallelize(..., sharded_weights=True)` makes them. A sharded weight keeps its identity and
shows its global shape. It is a `ShardedTensor` and a `torch.nn.Parameter`; this rank's slice of it
is a plain parameter with its own gradient, which the reducer averages over the ranks with the same
slice only. `to_local()` returns the slice, and `full_tensor()` the whole on all ranks.

=============  ====================================================================================
module         contents
=============  ====================================================================================
`cut`          the choice of the weights, and their replacement by slices
`state`        `state_dict()` of the whole network, and `state_on_rank_0`
`steps`        steps of torch's optimizers on the slices, and their whole state
`vectors`      `torch.nn.utils.vector_to_parameters`
`whole_state`  the tensors of `state_dict()`, whose changes reach the slices
=============  ====================================================================================
"""

from pydist.slices.state import state_on_rank_0

__all__ = ["state_on_rank_0"]
