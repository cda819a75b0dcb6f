"""Writes DICOM series."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VALUES = np.random.default_rng(0).integers(-1000, 1000, (5, 6, 7)).astype("int16")  # [k, row, col]
AXIAL = (1, 0, 0, 0, 1, 0)


def write_series(
    folder: Path,
    values: np.ndarray = VALUES,
    directions: tuple[float, ...] = AXIAL,
    spacing: tuple[float, float] = (2.0, 3.0),
    step: float = 2.5,
    slope: float = 1,
    change: Callable[[int, Any], object] | None = None,
) -> Path:
    """Writes a series, in files whose names and numbers say nothing about the order."""
    import pydicom
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    folder.mkdir(parents=True)
    series = generate_uid()
    normal = np.cross(directions[:3], directions[3:])
    for k, pixels in enumerate(values):
        data = pydicom.Dataset()
        data.file_meta = FileMetaDataset()
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = CTImageStorage
        data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = generate_uid()
        data.SeriesInstanceUID, data.PatientName = series, "Someone^Named"
        data.Rows, data.Columns = pixels.shape
        data.PixelSpacing = [f"{mm:.8g}" for mm in spacing]
        data.ImageOrientationPatient = list(directions)
        position = np.array([-10, 20, -30]) + normal * step * k
        data.ImagePositionPatient = [f"{mm:.10g}" for mm in position]
        data.InstanceNumber = (7 * k) % len(values) + 1
        data.BitsAllocated = data.BitsStored = 16
        data.HighBit, data.PixelRepresentation, data.SamplesPerPixel = 15, 1, 1
        data.PhotometricInterpretation = "MONOCHROME2"
        data.RescaleSlope, data.RescaleIntercept = slope, -24
        data.PixelData = ((pixels + 24) / slope).round().astype("<i2").tobytes()
        if change is not None:
            change(k, data)
        name = f"{(3 * k + 1) % len(values):03}.dcm"
        data.save_as(folder / name, enforce_file_format=True)
    return folder
