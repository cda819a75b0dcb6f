"""Fourier transforms over split dims, and complex numbers, split against whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import parallelize
from pydist.errors import NotSupported
from support.equivalence import (
    Task,
    check_function,
    check_network,
    on_ranks,
    randn,
)

SHAPE = (1, 3, 6, 5, 4)
POINTS = {
    "2x1x1": [[0, 4, 6], None, None],
    "2x2x2, half of them empty": [[0, 2, 6], [0, 1, 5], [0, 0, 4]],
    "1x3x1": [None, [0, 1, 3, 5], None],
}


def _magnitude(x):
    return torch.view_as_real(x.resolve_conj()).square().sum(-1)


CALLS = {
    "fft": lambda x: _magnitude(torch.fft.fft(x, dim=2)),
    "ifft, longer": lambda x: _magnitude(torch.fft.ifft(x, 9, 2, norm="ortho")),
    "there and back": lambda x: torch.fft.irfftn(
        torch.fft.rfftn(x, dim=(2, 3, 4)) * torch.fft.rfftn(x.flip(2), dim=(2, 3, 4)),
        s=(6, 5, 4), dim=(2, 3, 4),
    ),
    "fft2": lambda x: torch.fft.ifft2(torch.fft.fft2(x) ** 2).real,
    "all dims, cropped": lambda x: torch.fft.fftn(x, s=(3, 7, -1)).abs().square(),
    "irfft": lambda x: torch.fft.irfft(x, dim=3) * torch.fft.hfft(x, dim=3),
    "ihfft": lambda x: _magnitude(torch.fft.ihfft(x, dim=4)),
    "dims and extents that are numbers": lambda x: torch.fft.fftn(x, 7, 2).abs() + (
        torch.fft.rfft2(x, dim=2).abs().mean()
    ),
    "shifts": lambda x: torch.fft.fftshift(x, (2, 3)) * torch.fft.ifftshift(x, 2) + (
        torch.fft.fftshift(x)
    ),
    "parts": lambda x: torch.complex(x, x * 2).conj().imag * torch.polar(x.abs(), x).real,
    "as complex": lambda x: torch.view_as_complex(x.unflatten(4, (2, 2))).prod(3).real,
    "sums of complex numbers": lambda x: (torch.complex(x, x + 1).sum((2, 3, 4)) ** 2).imag,
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(call, randn(*SHAPE), (), points, second_order=True)


class SpectralLayer(nn.Module):
    """The layer of a Fourier neural operator, with complex weights for the low frequencies."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (4, channels, channels, modes, modes, modes)
        self.weight = nn.Parameter(torch.complex(randn(*shape), randn(*shape, seed=1)) / channels)

    def forward(self, x):
        spectrum = torch.fft.rfftn(x, dim=(-3, -2, -1))
        out = torch.zeros_like(spectrum)
        low, high = slice(None, self.modes), slice(-self.modes, None)
        for weight, (d, h) in zip(
            self.weight, ((low, low), (high, low), (low, high), (high, high)), strict=True
        ):
            part = spectrum[:, :, d, h, low]
            out[:, :, d, h, low] = torch.einsum("bixyz,ioxyz->boxyz", part, weight)
        return torch.fft.irfftn(out, s=x.shape[-3:], dim=(-3, -2, -1))


class FourierOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv3d(1, 3, 1)
        self.spectral, self.skip = SpectralLayer(3, 2), nn.Conv3d(3, 3, 1)
        self.project = nn.Conv3d(3, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        return self.project(F.gelu(self.spectral(x) + self.skip(x)))


@pytest.mark.parametrize(("spatial", "data"), [((2, 2, 1), 1), ((1, 1, 2), 2)])
def test_fourier_neural_operator(spatial, data):
    """MONAI's and neuraloperator's layer has the same calls."""
    torch.manual_seed(0)
    task = Task(
        FourierOperator().double(), randn(2, 1, 8, 6, 8), randn(2, 1, 8, 6, 8, seed=1), F.mse_loss
    )
    check_network(task, spatial, data)


def test_compressed_gradients_of_complex_parameters_are_refused():
    def body(mesh):
        with pytest.raises(NotSupported, match=r'gradients="bf16" of the parameter .*complex'):
            parallelize(FourierOperator().double(), mesh, gradients="bf16")

    on_ranks((1, 1, 1), body, data=2)
