"""Converts medical volumes from and to NIfTI, and makes synthetic CT."""

from __future__ import annotations

from pydist.data.medical.convert import NiftiOptions, convert_nifti
from pydist.data.medical.ct import CTOptions
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.grid import GridOptions

__all__ = ["CTOptions", "GridOptions", "NiftiOptions", "convert_nifti", "generate_ct"]
