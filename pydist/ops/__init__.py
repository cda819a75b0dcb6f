"""What each torch call does on sharded tensors, one module a family.

A new operator goes into the module of its family: a function with torch's signature, decorated
with `pydist.tensor.implements`.
"""

from pydist.ops import (  # noqa: F401
    activation,
    adaptive,
    along,
    assignment,
    attributes,
    batch_norm,
    channel_norm,
    conv,
    conv_transpose,
    creation,
    dropout,
    einsum,
    elementwise,
    extremes,
    hooks,
    indexing,
    instance_norm,
    joining,
    layer_norm,
    loss,
    matmul,
    pad,
    periodic,
    pixel_shuffle,
    pool,
    powers,
    random,
    reduce,
    resample,
    reshape,
    scatter,
    shape,
    slicing,
    unpool,
)
