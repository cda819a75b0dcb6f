"""What each torch call does on sharded tensors, one module a family.

A new operator goes into the module of its family: a function with torch's signature, decorated
with `pydist.tensor.implements`.
"""

from pydist.ops import (  # noqa: F401
    attributes,
    conv,
    dropout,
    elementwise,
    hooks,
    loss,
    norm,
    pool,
    reduce,
    shape,
)
