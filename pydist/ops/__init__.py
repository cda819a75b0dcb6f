"""Handles torch calls on sharded tensors, in one package per family of operators.

A new operator goes into the module of its family: a function with torch's signature, decorated
with `pydist.tensor.implements`. Modules that register handlers are imported here, and gradients are
connected to sharded tensors. Code that families share (windows, channels, coarsening) is in the
modules of this package.
"""

# ruff: noqa: F401  imported for the handlers that they register
import pydist.ops.conv.conv  # not `from`, whose name would hide the package
import pydist.ops.pool.pool
from pydist.gradients import registration
from pydist.ops import activations, attributes, gradients, hooks
from pydist.ops.attention import multi_head, neighborhood, scaled
from pydist.ops.conv import conv_transpose
from pydist.ops.norm import batch_norm, channel_norm, instance_norm, layer_norm
from pydist.ops.pointwise import creation, dropout, elementwise, initial, random
from pydist.ops.pool import adaptive, unpool
from pydist.ops.products import distances, einsum, matmul, matrices, recurrent
from pydist.ops.reduction import along, extremes, loss, order, powers, reduce, written_losses
from pydist.ops.resampling import columns, grid, pad, periodic, pixel_shuffle, resample
from pydist.ops.shaping import (
    assignment,
    diagonal,
    gathered,
    indexing,
    joining,
    nonzero,
    reshape,
    scatter,
    shape,
    slicing,
)
from pydist.ops.spectral import fft
from pydist.tensor.handlers import observe_with

observe_with(registration)
