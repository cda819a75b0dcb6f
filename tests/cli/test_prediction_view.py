"""Tests of what `pydist predict` shows."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from pydist.cli.prediction_view import PredictionView

PLACE = {"device": "cpu", "transport": "mpi", "precision": "fp32", "unused_device": ""}


@pytest.mark.parametrize("terminal", [True, False])
def test_volumes_windows_and_dice_are_shown(terminal):
    text = io.StringIO()
    view = PredictionView(Console(file=text, force_terminal=terminal, width=100))
    view({"event": "start", "cases": 2, **PLACE})
    view({"event": "windows", "done": 3, "windows": 4})
    if terminal:
        assert view._bar.tasks[0].percentage == pytest.approx(100 * 0.75 / 2)
    dice = {"liver": 0.5, "tumor": math.nan}
    view({"event": "predicted", "output": "a.nii.gz", "seconds": 1.25, "dice": dice})
    view({"event": "predicted", "output": "b.nii.gz", "seconds": 2.0, "dice": {}})
    view({"event": "of another kind"})
    view.close()
    view.close()
    shown = text.getvalue()
    assert "predict    device cpu, transport mpi" in shown
    assert "predicted  a.nii.gz  1.2 s  Dice liver 0.500\n" in shown.replace("\x1b[0m", "")
    assert "b.nii.gz  2.0 s" in shown
    assert ("volume 2/2" in shown) == terminal
    assert ("\x1b[" in shown) == terminal
