"""Fixtures of the recorder: compiled once, and reset for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.stand_ins.recorder import Recorder, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(build(tmp_path_factory.mktemp("recorder")))


@pytest.fixture
def recorder(built: Recorder) -> Iterator[Recorder]:
    built.notes()
    yield built
    built.delay(0)
    built.capture(False)
    built.abort_takes(0)
    built.hold_graphs(False)
    built.version(23203)
