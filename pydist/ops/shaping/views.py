"""Results that torch gives as views: here they may be copies, and what is done to those is lost."""

from __future__ import annotations

import weakref

from torch import Tensor

from pydist.layout import Layout
from pydist.tensor import ShardedTensor, wrap


def view_of(x: ShardedTensor, local: Tensor, layout: Layout) -> ShardedTensor:
    """A result of `x` that shares its memory, as torch's would.

    Where it is a copy (blocks had to move between ranks, or the shard's strides do not allow the
    view) it remembers that, so that a call in place on it is refused while `x` is in use.
    """
    y = wrap(local, layout, x)
    if local.untyped_storage().data_ptr() == x._local.untyped_storage().data_ptr():
        y._copied_from = x._copied_from
    else:
        y._copied_from = weakref.ref(x)
    return y


def apart(x: ShardedTensor, local: Tensor) -> Tensor:
    """A copy where `local`, a result of `x` in other strides, may share memory by chance.

    Extents of 0 or 1 hide in which order a shard's dims lie: there is nothing to move, though there
    would be in the whole. In place on what ranks with more to hold copied, `x` must not change.
    """
    shard = x._local
    hidden = any(n < 2 <= whole for n, whole in zip(shard.shape, x._layout.shape, strict=True))
    if hidden and local.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr():
        return local.clone()
    return local
