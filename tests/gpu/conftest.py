"""Fixtures of tests that need a CUDA device, and the skip, with its reason, if there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pydist import _native as native
from pydist.comm import Transport
from support.transports.device_contract import connected


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
    """Returns a transport of two ranks on one or two devices; a test class names `transport`."""
    return connected(getattr(request.cls, "transport", None))


@pytest.fixture
def exact() -> Iterator[None]:
    """Disables TF32: float32 convolutions and products stay in float32."""
    settings = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [each.allow_tf32 for each in settings]
    for each in settings:
        each.allow_tf32 = False
    yield
    for each, value in zip(settings, before, strict=True):
        each.allow_tf32 = value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason()
    simulated = reason is None and torch.cuda.get_device_name() == "simulated"
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
            elif simulated and item.get_closest_marker("behind_the_host") is not None:
                item.add_marker(pytest.mark.skip(reason="a simulated device is the host"))
