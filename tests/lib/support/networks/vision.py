"""Support for `import torchvision` where its compiled operators can't load.

The wheels on PyPI are built for CUDA. With a CPU build of torch their library can't load, and the
import fails at the first declared operator. The video networks need none of these operators.
Call this before any import of torchvision, or of packages that import it if available
(torchmetrics, Lightning, Accelerate).
"""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache

import torch

_BOXES = ("nms", "qnms")


@cache
def declare_missing_operators() -> torch.library.Library | None:
    """Declares torchvision's operators without their compiled library; returns it to keep them."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    with contextlib.suppress(ImportError, RuntimeError):
        import torchvision  # noqa: F401

        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _BOXES:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # cached, as the declarations end with the library
