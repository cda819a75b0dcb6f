"""Assignment of parameters to buckets, and the order in which buckets are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydist.gradients.bucket import Bucket
from pydist.gradients.forms.form import DenseForm
from pydist.gradients.partitioned_bucket import PartitionedBucket

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.forms.form import Form
    from pydist.gradients.leaf import Leaf

# Large enough that latency is negligible, small enough that the first bucket is sent early in
# backward.
BUCKET_BYTES = 8 << 20
# From this size on, a gradient is sent alone from its own memory: a copy costs more than a message.
ALONE_BYTES = 256 << 10


def make_buckets(
    leaves: Sequence[Leaf], transport: Transport, holders: Transport, form: Form
) -> list[Bucket]:
    """Makes buckets, in the order in which backward completes them: last parameters first.

    Small parameters share buckets, even across large ones, which are sent alone.

    Args:
        leaves: the parameters of a lane, in the order of the model.
        transport: the ranks over which partitioned buckets are cut, if there are several.
        holders: see `Lane`.
        form: says how the gradients are averaged.
    """
    made: list[tuple[int, bool, list[Leaf]]] = []  # when complete, kind, contents
    open_: dict[tuple[object, ...], tuple[list[Leaf], list[int]]] = {}
    for index, leaf in enumerate(reversed(leaves)):
        # Equal on all ranks: those with other slices add up norms in the order of the buckets.
        nbytes = leaf.even * leaf.kind.dtype.itemsize
        partitioned = leaf.is_partitioned and leaf.has_parts and transport.size > 1
        if nbytes >= ALONE_BYTES:
            made.append((index, partitioned, [leaf]))
            continue
        kind = (leaf.kind.dtype, leaf.kind.device, partitioned)
        contents, state = open_.get(kind, ([], [0, 0]))
        if contents and state[0] + nbytes > BUCKET_BYTES:
            made.append((state[1], partitioned, contents))
            contents, state = [], [0, 0]
        contents.append(leaf)
        open_[kind] = contents, [state[0] + nbytes, index]
    made += [(state[1], bool(kind[2]), contents) for kind, (contents, state) in open_.items()]
    made.sort(key=lambda each: each[0])
    return [
        PartitionedBucket(contents, form, transport, holders)
        if partitioned and isinstance(form, DenseForm)
        else Bucket(form.arrange(contents), form)
        for _, partitioned, contents in made
    ]
