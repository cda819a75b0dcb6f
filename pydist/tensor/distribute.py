"""`distribute_tensor`, which cuts plain tensors into sharded ones."""

from __future__ import annotations

from collections.abc import Mapping

from pydist.interop import ArrayLike, as_tensor
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.tensor.aliasing import remember_plain
from pydist.tensor.operands import shard_of_plain
from pydist.tensor.sharded import ShardedTensor
from pydist.tensor.wrapper import plain


def distribute_tensor(
    tensor: ArrayLike,
    mesh: Mesh,
    dims: Mapping[int, str] | None = None,
    first_sample: int | None = None,
) -> ShardedTensor:
    """Cuts a tensor that is equal on all ranks of the sample group.

    Differentiable: the gradient that reaches `tensor` is the true one, equal on all ranks.

    Args:
        tensor: the full tensor, or an array of another library (see `pydist.interop`), equal on
            all ranks of the group; checksums verify it in every step.
        mesh: the mesh.
        dims: which dim is cut along which mesh axis; by default that of its name, of
            [N, C, D, H, W], images [N, C, H, W] and lines [N, C, W]; {} cuts none.
        first_sample: as of `ShardedTensor.from_local`.

    Raises:
        UsageError: the ranks of the group hold different tensors, or `dims` does not fit.
    """
    tensor = as_tensor(tensor)
    layout = layout_for_sample(mesh, tensor.shape, dims)
    own = plain(tensor)
    x = ShardedTensor.of_shard(shard_of_plain(own, layout), layout, first_sample)
    if x._shard is not own:
        remember_plain(x, tensor)
    return x
