"""From stored numbers to the network's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pydist.data.manifest import Manifest
from pydist.errors import DataError, UsageError

Normalization = Literal["none", "log1p", "mean", "standardize", "window", "ct"]

Volume = npt.NDArray[Any]

_TABLE_SIZE = 1 << 16


class Normalizer:
    """Maps stored values x to the input, voxel by voxel.

    A voxel's input depends on its value and its sample alone, not on the block it was read with:
    a split changes no bit. For 8 and 16 bit integers (the counts of CosmoFlow) the map is a table:
    vectorised logarithms may differ in the last bit with alignment and machine.

    Args:
        kind: "none" x; "log1p" log(1 + x), which MLPerf's CosmoFlow uses; "mean" x over the mean of
            the sample, its alternative; "standardize" (log(1 + x) - m_c) / s_c, with mean and
            standard deviation of the training samples' channel c; "window" clips to a window of
            intensities and maps it to [0, 1]; "ct" clips to the 0.5th and 99.5th percentile of the
            labelled voxels in training, less their mean over their standard deviation, by channel
            (nnU-Net's scheme for CT).
        manifest: gives the statistics.
        dtype: of the input, float32 or float64.
        window: (lower, upper) for "window", in the units of the data (Hounsfield units).

    Raises:
        UsageError: no such normalisation; no window, or one that is empty or not asked for.
        DataError: the manifest lacks the statistics, or a standard deviation is 0.
    """

    def __init__(
        self,
        kind: str,
        manifest: Manifest,
        dtype: npt.DTypeLike,
        window: tuple[float, float] | None = None,
    ) -> None:
        if kind not in get_args(Normalization):
            possible = ", ".join(get_args(Normalization))
            raise UsageError(f"normalize={kind!r}; possible are {possible}")
        self.kind = kind
        self.dtype = np.dtype(dtype)
        self._channels = manifest.sample_shape[0]
        self._shift, self._scale = np.zeros(self._channels), np.ones(self._channels)
        self._lower, self._upper = np.zeros(self._channels), np.zeros(self._channels)
        self.window = _checked_window(kind, window)
        if kind == "standardize":
            self._shift, self._scale = self._statistics(manifest)
        elif kind == "window":
            assert window is not None
            self._lower[:], self._upper[:] = window
            self._shift, self._scale = self._lower, self._upper - self._lower
        elif kind == "ct":
            self._ct_scheme(manifest)
        if kind == "mean" and not all(file.means for file in manifest.files):
            raise DataError('normalize="mean": the manifest has no means of the samples')
        self._tables: dict[np.dtype[Any], npt.NDArray[Any]] = {}

    def __call__(self, block: Volume, first_channel: int, sample_mean: float, out: Volume) -> None:
        """Writes the input for a block.

        Args:
            block: stored values, [C, D, H, W], any strides.
            first_channel: the channel of the sample at index 0.
            sample_mean: mean of the whole sample, for "mean".
            out: the input, of the block's shape, contiguous.
        """
        if self.kind in ("none", "mean"):
            out[...] = block
            if self.kind == "mean":
                out /= np.asarray(sample_mean, dtype=self.dtype)
            return
        table = self._table(block.dtype)
        for c in range(block.shape[0]):
            if table is not None:
                _look_up(table[first_channel + c], block[c], out[c])
            else:
                out[c] = block[c]
                self._map(out[c], first_channel + c)

    def _map(self, values: Volume, channel: int) -> None:
        """Log1p or clipping, then shift and scale, in place."""
        if self.kind in ("window", "ct"):
            np.clip(values, self._lower[channel], self._upper[channel], out=values)
        else:
            with np.errstate(invalid="ignore", divide="ignore"):  # the caller looks for NaN and Inf
                np.log1p(values, out=values)
        if self.kind != "log1p":
            values -= self._shift[channel]
            values /= self._scale[channel]

    def _table(self, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """The map of every value of a small integer type, [C, 65536], by its bits."""
        if dtype.kind not in "iu" or dtype.itemsize > 2:
            return None
        if dtype not in self._tables:
            bits = np.arange(_TABLE_SIZE, dtype=np.uint16)
            values = bits.astype(np.uint8).view(dtype) if dtype.itemsize == 1 else bits.view(dtype)
            table = np.tile(values.astype(np.float64), (self._channels, 1))
            for channel in range(self._channels):
                self._map(table[channel], channel)
            self._tables[dtype] = table.astype(self.dtype)
        return self._tables[dtype]

    def _statistics(self, manifest: Manifest) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        mean, std = manifest.log1p_mean, manifest.log1p_std
        if len(mean) != self._channels or len(std) != self._channels or min(std) <= 0:
            raise DataError(
                f'normalize="standardize": the manifest has mean {_short(mean)} and standard '
                f"deviation {_short(std)} for {self._channels} channels"
            )
        return np.array(mean), np.array(std)

    def _ct_scheme(self, manifest: Manifest) -> None:
        found = manifest.intensity
        if len(found) != self._channels or min(channel.std for channel in found) <= 0:
            raise DataError(
                f'normalize="ct": the manifest has statistics of the labelled voxels for '
                f"{len(found)} of {self._channels} channels, or a standard deviation of 0"
            )
        self._lower = np.array([channel.lower for channel in found])
        self._upper = np.array([channel.upper for channel in found])
        self._shift = np.array([channel.mean for channel in found])
        self._scale = np.array([channel.std for channel in found])


def _checked_window(kind: str, window: tuple[float, float] | None) -> tuple[float, float] | None:
    if kind != "window":
        if window is not None:
            raise UsageError(f'a window of {window} with normalize={kind!r}: choose "window"')
        return None
    if window is None or not window[0] < window[1]:
        raise UsageError(f'normalize="window" needs a window (lower, upper), got {window}')
    return window


def _look_up(table: Volume, values: Volume, out: Volume) -> None:
    """Writes table[values], a few planes at a time: `take` makes 8-byte indices of all it gets."""
    unsigned = np.dtype(f"u{values.itemsize}")
    planes = max(1, (1 << 18) // max(values[0].size, 1)) if values.size else 1
    for start in range(0, values.shape[0], planes):
        part = np.ascontiguousarray(values[start : start + planes]).view(unsigned)
        np.take(table, part, out=out[start : start + planes], mode="clip")


def _short(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{v:.4g}" for v in values) + ")"
