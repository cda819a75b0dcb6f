"""Defines the blocks of randomly composed networks, besides torch's own layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


class Expression(nn.Module):
    """A function of x, given as text, so that a failing network prints what it computes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.function = eval(f"lambda x: {text}", {"torch": torch, "F": F})

    def __deepcopy__(self, memo: dict[int, Any]) -> Expression:
        return Expression(self.text)

    def extra_repr(self) -> str:
        return self.text

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Joined(nn.Module):
    """Block that adds x to its body's result, in place or not, multiplies or concatenates both."""

    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body, self.how = body, how

    def extra_repr(self) -> str:
        return self.how

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.how == "cat":
            return torch.cat([fitted(y, x, "pad"), x], 1)
        if self.how == "in place":
            y += x
            return y
        return y * x if self.how == "times" else x + y


def fitted(x: Tensor, like: Tensor, how: str) -> Tensor:
    """Returns x with the extents of another: padded and cropped as in U-Nets, or resized."""
    size = like.shape[2:]
    if how == "resize":
        return F.interpolate(x, size=size, mode="nearest")
    if how == "linear":
        mode = ("linear", "bilinear", "trilinear")[x.dim() - 3]
        return F.interpolate(x, size=size, mode=mode, align_corners=True)
    missing = [b - a for a, b in zip(x.shape[2:], size, strict=True)]
    if how == "crop":
        first: list[Any] = [slice(max(0, -m) // 2, None) for m in missing]
        last: list[Any] = [slice(n) for n in size]
        x = x[tuple([..., *first])][tuple([..., *last])]
        missing = [b - a for a, b in zip(x.shape[2:], size, strict=True)]
    return F.pad(x, [p for m in reversed(missing) for p in (m // 2, m - m // 2)])


class UShape(nn.Module):
    """Block that goes down, through a body and up, and concatenates the result with its input."""

    def __init__(
        self, down: nn.Module, body: nn.Module, up: nn.Module, gate: nn.Module | None, fit: str
    ) -> None:
        super().__init__()
        self.down, self.body, self.up, self.gate, self.fit = down, body, up, gate, fit

    def extra_repr(self) -> str:
        return self.fit

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.body(self.down(x)))
        y = fitted(y, x, self.fit)
        return torch.cat([y, x if self.gate is None else self.gate(x, y)], 1)


class Gate(nn.Module):
    """Attention gate that scales x by factors computed from x and y at half the resolution."""

    def __init__(self, conv: type[nn.Module], channels: int, below: int, linear: bool) -> None:
        super().__init__()
        self.theta = conv(channels, 2, 2, stride=2, bias=False)
        self.phi = conv(below, 2, 1)
        self.psi = conv(2, 1, 1)
        self.how = "linear" if linear else "resize"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = self.theta(x)
        mask = F.relu(seen + fitted(self.phi(y), seen, self.how), inplace=True)
        return x * fitted(torch.sigmoid(self.psi(mask)), x, self.how)


class SqueezeExcite(nn.Module):
    """Squeeze and excitation, which scales channels by factors from the means of all channels."""

    def __init__(self, channels: int, dims: int, how: str) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, 2)
        self.excite = nn.Linear(2, channels)
        self.dims, self.how = dims, how

    def extra_repr(self) -> str:
        return self.how

    def forward(self, x: Tensor) -> Tensor:
        n, c = x.shape[:2]
        if self.how == "mean":
            pooled = x.mean(tuple(range(2, x.dim())))
        elif self.how == "flat":
            pooled = x.view(n, c, -1).mean(2)
        else:
            pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
            pooled = pool[self.dims - 1](x, 1).flatten(1)
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(pooled))))
        return x * gate.view(n, c, *[1] * self.dims)


class SpatialGate(nn.Module):
    """Gate that scales each voxel by a factor from the mean and maximum over all channels."""

    def __init__(self, conv: type[nn.Module]) -> None:
        super().__init__()
        self.conv = conv(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        return x * torch.sigmoid(self.conv(seen))


class ChannelAttention(nn.Module):
    """Channel attention: every channel becomes a mixture of all channels that resemble it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def extra_repr(self) -> str:
        return self.how

    def forward(self, x: Tensor) -> Tensor:
        scale = x[0, 0].numel() ** -0.5
        if self.how == "einsum":
            letters = "dhw"[: x.dim() - 2]
            alike = torch.einsum(f"nc{letters},ne{letters}->nce", x, x).mul(scale).softmax(-1)
            return x + torch.einsum(f"nce,ne{letters}->nc{letters}", alike, x)
        flat = x.flatten(2)
        if self.how == "bmm":
            alike = torch.bmm(flat, flat.transpose(1, 2)).mul(scale).softmax(-1)
            return x + torch.bmm(alike, flat).view(x.shape)
        alike = (flat @ flat.mT * scale).softmax(-1)
        return x + (alike @ flat).reshape(x.shape)


class VoxelAttention(nn.Module):
    """Attention between voxels: each becomes a mixture of all that resemble it."""

    def __init__(self, channels: int, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "layer":
            self.layer = nn.MultiheadAttention(channels, 1, batch_first=True)

    def extra_repr(self) -> str:
        return self.how

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        if self.how == "matmul":
            y = (tokens @ tokens.mT / x.shape[1]).softmax(-1) @ tokens
        elif self.how == "bmm":
            weights = torch.bmm(tokens, x.flatten(2) / x.shape[1]).softmax(2)
            return x + torch.bmm(x.flatten(2), weights.permute(0, 2, 1)).reshape(x.shape)
        elif self.how == "layer":
            y = self.layer(tokens, tokens, tokens, need_weights=False)[0]
        else:
            q = tokens.unsqueeze(1)
            y = F.scaled_dot_product_attention(q, q, q, is_causal=self.how == "causal").squeeze(1)
        return x + y.mT.reshape(x.shape)


class ChannelLinear(nn.Module):
    """A linear layer on the channels, which are moved to the end and back."""

    def __init__(self, channels: int, features: int, norm: bool, flat: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels) if norm else nn.Identity()
        self.linear = nn.Linear(channels, features)
        self.flat = flat

    def extra_repr(self) -> str:
        return "flat" if self.flat else ""

    def forward(self, x: Tensor) -> Tensor:
        if self.flat:
            y = F.gelu(self.linear(self.norm(x.flatten(2).transpose(1, 2))))
            return y.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])
        return F.gelu(self.linear(self.norm(x.movedim(1, -1)))).movedim(-1, 1)


class Positions(nn.Module):
    """Block that adds a learned value to each voxel, or the voxels' coordinates as channels."""

    def __init__(self, extents: Sequence[int], learned: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, 1, *extents)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is not None:
            return x + self.table
        axes = [torch.linspace(-1, 1, n, dtype=x.dtype) for n in x.shape[2:]]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))
        return torch.cat([x, grid.expand(x.shape[0], *grid.shape)], 1)


class Subpixels(nn.Module):
    """Pixel shuffle by reshaping and permuting, as MONAI does it in three dims."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, *extents = x.shape
        dims = len(extents)
        y = x.reshape(n, c // 2**dims, *[2] * dims, *extents)
        order = [0, 1, *(d for i in range(dims) for d in (2 + dims + i, 2 + i))]
        return y.permute(order).reshape(n, c // 2**dims, *(2 * e for e in extents))


class Unpooled(nn.Module):
    """Block that pools to maxima and unpools them, times two, to the same positions."""

    def __init__(self, dims: int, kernel: int) -> None:
        super().__init__()
        self.pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1](
            kernel, return_indices=True
        )
        self.unpool = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)[dims - 1](kernel)

    def forward(self, x: Tensor) -> Tensor:
        y, indices = self.pool(x)
        return self.unpool(y * 2, indices, output_size=x.shape)


def checkpointed(model: nn.Module, x: Tensor, function: Any = None) -> Tensor:
    """Checkpoints a model; recomputes all of it if instance norms track statistics.

    Else torch updates these once if the norm saves the region's last tensor, and twice if another
    follows. A sharded call after the norm, such as a slice, saves one where torch's does not.
    """
    tracks = any(
        isinstance(m, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d))
        and m.track_running_stats
        for m in model.modules()
    )
    with set_checkpoint_early_stop(not tracks):
        # Nothing draws. Threads that keep torch's random state can wait for each other: one has its
        # lock and waits for the interpreter's, another the reverse.
        return checkpoint(function or model, x, use_reentrant=False, preserve_rng_state=False)


class Checkpointed(nn.Module):
    """A body that is recomputed in backward."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        # A copy: with an in-place first layer, torch itself would recompute from its result.
        return checkpointed(self.body, x, lambda x: self.body(x * 1.0))


class Twice(nn.Module):
    """Block that applies the same layers twice: one after the other, or at two resolutions."""

    def __init__(self, body: nn.Module, scales: bool) -> None:
        super().__init__()
        self.body, self.scales = body, scales

    def extra_repr(self) -> str:
        return "on two scales" if self.scales else "in a row"

    def forward(self, x: Tensor) -> Tensor:
        if not self.scales:
            return self.body(self.body(x))
        coarse = self.body(F.interpolate(x, scale_factor=0.5, mode="nearest"))
        fine = self.body(x)
        return fine + fitted(coarse, fine, "resize")


class Branches(nn.Module):
    """Block that runs several bodies, as in Inception, and sums or concatenates their results."""

    def __init__(self, bodies: Sequence[nn.Module], how: str) -> None:
        super().__init__()
        self.bodies, self.how = nn.ModuleList(bodies), how

    def extra_repr(self) -> str:
        return self.how

    def forward(self, x: Tensor) -> Tensor:
        found = [body(x) for body in self.bodies]
        if self.how == "stack":
            return torch.stack([fitted(y[:, :1], x, "pad") for y in found]).sum(0)
        return torch.cat([fitted(y, x, "crop") for y in found], dim=1)


def make(source: str) -> nn.Module:
    """Creates the module that a source describes, in the names of torch and of this file."""
    return eval(source, globals())
