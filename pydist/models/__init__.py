"""Defines reference networks in plain `torch.nn`, without parallelism."""

from __future__ import annotations

from pydist.models.cosmoflow import CosmoFlow
from pydist.models.unet2d import UNet2d
from pydist.models.unet3d import UNet3d

__all__ = ["CosmoFlow", "UNet2d", "UNet3d"]
