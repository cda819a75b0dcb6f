"""Reference networks: plain `torch.nn`, no word of parallelism."""

from __future__ import annotations

from pydist.models.cosmoflow import CosmoFlow

__all__ = ["CosmoFlow"]
