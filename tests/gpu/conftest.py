"""Tests that need a CUDA device: skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_contract import connected

from pydist import _native as native
from pydist.comm import Transport


def _reason() -> str | None:
    if not native.has_cuda:
        return "pydist was built without CUDA kernels"
    if native.cuda_device_count() == 0:
        return "no CUDA device"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} has no CUDA"
    return None


@pytest.fixture(scope="class")
def devices(request: pytest.FixtureRequest) -> Transport:
    """Two ranks with a device each, or that share one; a test class names their `transport`."""
    return connected(getattr(request.cls, "transport", "nccl"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason()
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
