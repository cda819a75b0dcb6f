"""Predicts volumes with trained networks across ranks, answers requests, and exports networks."""

from __future__ import annotations

from pydist.inference.export import export_weights
from pydist.inference.predictor import Predictor
from pydist.inference.resident import Resident
from pydist.inference.service import Service
from pydist.inference.windows import Sliding

__all__ = ["Predictor", "Resident", "Service", "Sliding", "export_weights"]
