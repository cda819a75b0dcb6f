"""A folder and its pack for all tests, which need Linux."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.mounts import Case, make_case


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if sys.platform != "linux" else None


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("posix"))
