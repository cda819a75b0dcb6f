"""Predicts volumes with trained networks across ranks, and exports networks to plain torch."""

from __future__ import annotations

from pydist.inference.export import export_weights
from pydist.inference.predictor import Predictor
from pydist.inference.windows import Sliding

__all__ = ["Predictor", "Sliding", "export_weights"]
