"""Which parameters share a bucket, and the order in which buckets leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from pydist.comm.gradients.bucket import Bucket
from pydist.comm.gradients.rows import is_dense
from pydist.comm.gradients.scattered_bucket import ScatteredBucket

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport

# Large enough that latency is nothing beside the transfer, small enough that the first bucket
# leaves while most of backward is still to run.
BUCKET_BYTES = 8 << 20
# From here on a gradient travels alone, out of its own memory: copying costs more than a message.
ALONE_BYTES = 256 << 10


def make_buckets(
    parameters: Sequence[nn.Parameter],
    transport: Transport,
    is_scattered: Callable[[nn.Parameter], bool],
) -> list[Bucket]:
    """Buckets, in the order in which backward completes them: last parameters first.

    Small parameters share buckets, even across large ones, which travel alone.
    """
    made: list[tuple[int, bool, list[nn.Parameter]]] = []  # when complete, kind, contents
    open_: dict[tuple[object, ...], tuple[list[nn.Parameter], list[int]]] = {}
    for index, parameter in enumerate(reversed(parameters)):
        nbytes = parameter.numel() * parameter.element_size()
        scattered = is_scattered(parameter) and is_dense(parameter)
        if nbytes >= ALONE_BYTES:
            made.append((index, scattered, [parameter]))
            continue
        kind = (parameter.dtype, parameter.device, scattered)
        contents, state = open_.get(kind, ([], [0, 0]))
        if contents and state[0] + nbytes > BUCKET_BYTES:
            made.append((state[1], scattered, contents))
            contents, state = [], [0, 0]
        contents.append(parameter)
        open_[kind] = contents, [state[0] + nbytes, index]
    made += [(state[1], bool(kind[2]), contents) for kind, (contents, state) in open_.items()]
    made.sort(key=lambda each: each[0])
    return [
        ScatteredBucket(contents, transport) if scattered else Bucket(contents)
        for _, scattered, contents in made
    ]
