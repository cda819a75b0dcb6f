"""The recorder, compiled once."""

from __future__ import annotations

import pytest
from recorder import Recorder, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The library of the recorder; what it was told is undone by who told it."""
    return Recorder(build(tmp_path_factory.mktemp("recorder")))
