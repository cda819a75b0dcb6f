"""Test that a service which ends in order after a signal has succeeded, and another program not."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pydist.launch.supervisor import launch

PROGRAM = """
import signal, sys, time, pathlib
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path({ready!r}).touch()
time.sleep(60)
"""


def ended(folder: Path, is_service: bool) -> int:
    ready, script = folder / "ready", folder / "program.py"
    script.write_text(PROGRAM.format(ready=str(ready)))

    def ask():
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    return launch(1, [str(script)], "gloo", patience=20, is_service=is_service)


@pytest.mark.parametrize(("is_service", "expected"), [(True, 0), (False, 72)])
def test_the_end_after_a_signal(is_service, expected, tmp_path, capfd):
    assert ended(tmp_path, is_service) == expected
    assert ("SIGTERM ended the job" in capfd.readouterr().err) == (expected == 72)
