"""Normalizes stored values to the network's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pydist._loader import native
from pydist.data.manifest import Manifest
from pydist.errors import DataError, UsageError
from pydist.interop import ArrayLike

Normalization = Literal["none", "log1p", "mean", "standardize", "window", "ct"]

Volume = npt.NDArray[Any]

Block = ArrayLike
"""An array in host memory, or a tensor on any device."""

_Kind = np.dtype[Any]


class Normalizer:
    """Map that turns stored values x into the network's input, voxel by voxel.

    A voxel's input depends only on its value and its sample, not on the block it was read with: a
    split changes no bit. For 8 and 16 bit integers (the counts of CosmoFlow) the map is a table,
    made on the host, so that a device computes the same bits; for other types, the logarithm on a
    device may differ in the last bit. One native pass does it all, on the device of the block.

    Args:
        kind: "none" x; "log1p" log(1 + x), which MLPerf's CosmoFlow uses; "mean" x over the mean of
            the sample, its alternative; "standardize" (log(1 + x) - m_c) / s_c, with mean and
            standard deviation of the training samples' channel c; "window" clips to a window of
            intensities and maps it to [0, 1]; "ct" clips to the 0.5th and 99.5th percentile of the
            labeled voxels in training, subtracts their mean and divides by their standard
            deviation, per channel (nnU-Net's scheme for CT).
        manifest: has the statistics.
        dtype: of the input, float32 or float64.
        window: (lower, upper) for "window", in the units of the data (Hounsfield units).

    Raises:
        UsageError: no such normalization; or a window that is missing, empty or not used.
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
        if kind == "mean" and not manifest.table.has_means:
            raise DataError('normalize="mean": the manifest has no means of the samples')
        self._constants: dict[tuple[_Kind, torch.device | None], Block] = {}

    def __call__(self, block: Volume, first_channel: int, sample_mean: float, out: Volume) -> bool:
        """Writes the input for a block.

        Args:
            block: stored values, [C, D, H, W], any strides.
            first_channel: the channel of the sample at index 0.
            sample_mean: mean of the full sample, for "mean".
            out: the input, of the block's shape.

        Returns:
            Whether all of the input is finite.
        """
        found = np.zeros(1, dtype=np.int32)
        block = block.astype(staged_dtype(block.dtype), copy=False)
        self.launch(block, block.dtype, first_channel, sample_mean, out, found)
        return not found[0]

    @property
    def value_range(self) -> tuple[Volume, Volume] | None:
        """Least and largest input of each channel, [C] each; None where nothing is clipped."""
        if self.kind not in ("window", "ct"):
            return None
        lower, upper = self._lower, self._upper
        return (lower - self._shift) / self._scale, (upper - self._shift) / self._scale

    def launch(
        self,
        block: Block,
        dtype: _Kind,
        first_channel: int,
        sample_mean: float,
        out: Block,
        found: Block,
    ) -> None:
        """Does the same as a call, on the tensors' device (on CUDA, on its current stream).

        Args:
            block: as in the call; its values are of a `staged_dtype`.
            dtype: of the values.
            first_channel: as in the call.
            sample_mean: as in the call.
            out: as in the call, on the same device.
            found: one int32 on that device; becomes 1 if a value is not finite.
        """
        channels = slice(first_channel, first_channel + block.shape[0])
        device = out.device if isinstance(out, Tensor) else None
        constants = self._on(device, dtype)[channels]
        divisor = sample_mean if self.kind == "mean" else 1.0
        if _is_small(dtype):
            bits = f"int{8 * dtype.itemsize}"  # the native border has no uint16
            if isinstance(block, Tensor):
                block = block.view(getattr(torch, bits))
            else:
                block = block.view(bits)
            native.look_up(block, constants, divisor, out, found)
        else:
            log = self.kind in ("log1p", "standardize")
            native.rescale(block, constants, log, divisor, out, found)

    def _map(self, values: Volume, channel: int) -> None:
        """Applies log1p or clipping, then shift and scale, in place."""
        if self.kind in ("none", "mean"):
            return
        if self.kind in ("window", "ct"):
            np.clip(values, self._lower[channel], self._upper[channel], out=values)
        else:
            with np.errstate(invalid="ignore", divide="ignore"):  # the caller looks for NaN and Inf
                np.log1p(values, out=values)
        if self.kind != "log1p":
            values -= self._shift[channel]
            values /= self._scale[channel]

    def _on(self, device: torch.device | None, dtype: _Kind) -> Block:
        """Returns the table or the maps per channel for a stored type, on the device."""
        key = (dtype, device)
        if key not in self._constants:
            host = self._table(dtype) if _is_small(dtype) else self._channel_maps()
            self._constants[key] = host if device is None else torch.from_numpy(host).to(device)
        return self._constants[key]

    def _table(self, dtype: _Kind) -> Volume:
        """Returns the input for each value of a small integer type, [C, 256 or 65536], by bits."""
        bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"uint{8 * dtype.itemsize}")
        table = np.tile(bits.view(dtype).astype(np.float64), (self._channels, 1))
        for channel in range(self._channels):
            self._map(table[channel], channel)
        return table.astype(self.dtype)

    def _channel_maps(self) -> Volume:
        """Returns lower and upper bound, shift and scale per channel, [C, 4]."""
        clips = self.kind in ("window", "ct")
        lower = self._lower if clips else np.full(self._channels, -np.inf)
        upper = self._upper if clips else np.full(self._channels, np.inf)
        return np.stack([lower, upper, self._shift, self._scale], axis=1)

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
                f'normalize="ct": the manifest has statistics of the labeled voxels for '
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


def staged_dtype(dtype: npt.DTypeLike) -> _Kind:
    """Returns the type for the native pass: the stored type, or a wider one that it supports."""
    wider = {"uint32": "int64", "uint64": "float64"}
    name = np.dtype(dtype).newbyteorder("=").name
    return np.dtype(wider.get(name, name))


def _is_small(dtype: _Kind) -> bool:
    """Returns whether the type is small enough for a table of all values."""
    return dtype.kind in "iu" and dtype.itemsize <= 2


def _short(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{v:.4g}" for v in values) + ")"
