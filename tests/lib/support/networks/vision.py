"""Makes `import torchvision` work where its compiled operators can't load.

The wheels on PyPI are built for CUDA; beside a CPU build of torch their library finds no CUDA, and
the import ends at the first operator that it describes. The video networks need none of them.
Called before any import of torchvision, or of what imports it where it is there (torchmetrics,
Lightning, Accelerate).
"""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache

import torch

_BOXES = ("nms", "qnms")


@cache
def declare_missing_operators() -> torch.library.Library | None:
    """Declares the operators that torchvision only describes, if their own library is missing."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    with contextlib.suppress(ImportError, RuntimeError):
        import torchvision  # noqa: F401

        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _BOXES:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # the cache keeps it: with the library its operators would go
