"""pydist trains 3D convolutional networks on samples that are too large for one device.

    import pydist

    mesh = pydist.init(data=2, spatial=(2, 1, 1))
    model = pydist.parallelize(network, mesh)

See the README for a start, `docs/library.md` for loops of your own, and `docs/architecture.md` for
how pydist works.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydist import (
        check,
        checkpoint,
        data,
        gradients,
        inference,
        models,
        optim,
        packs,
        plan,
        profile,
        slices,
        stages,
        tensor,
    )
    from pydist.comm import run_local
    from pydist.global_loss import gather_over_groups, sum_over_groups
    from pydist.layout import Layout, Split, layout_for_sample
    from pydist.mesh import Mesh
    from pydist.parallel import parallelize
    from pydist.partition import Partition
    from pydist.setup import init
    from pydist.stages.division import pipeline
    from pydist.stages.ranks import init_stages
    from pydist.tensor import ShardedTensor
    from pydist.tensor.operands import distribute_tensor

# Imported on first use: `pydist --help` must not wait for torch.
_HOMES = {
    "Layout": "pydist.layout",
    "Mesh": "pydist.mesh",
    "Partition": "pydist.partition",
    "ShardedTensor": "pydist.tensor",
    "Split": "pydist.layout",
    "distribute_tensor": "pydist.tensor.operands",
    "init": "pydist.setup",
    "init_stages": "pydist.stages.ranks",
    "layout_for_sample": "pydist.layout",
    "parallelize": "pydist.parallel",
    "pipeline": "pydist.stages.division",
    "run_local": "pydist.comm",
    "sum_over_groups": "pydist.global_loss",
    "gather_over_groups": "pydist.global_loss",
}

__all__ = [  # noqa: RUF022  the order of use
    "init", "Mesh", "parallelize", "distribute_tensor", "ShardedTensor", "sum_over_groups",
    "gather_over_groups",
    "init_stages", "pipeline",
    "Layout", "Split", "Partition", "layout_for_sample", "run_local", "data", "models",
    "optim", "gradients", "packs", "slices", "inference", "plan", "profile", "check", "checkpoint",
    "stages", "tensor",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("pydist._loader").native.__version__
    if name in _HOMES:
        # Sharded tensors need the handlers of torch's calls.
        importlib.import_module("pydist.ops")
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "tensor":
        importlib.import_module("pydist.ops")  # users' handlers are registered after pydist's own
    if name in __all__:  # the modules
        return importlib.import_module(f"pydist.{name}")
    raise AttributeError(f"module 'pydist' has no attribute {name!r}")
