"""Networks whose batch norm has no running statistics: it norms by its input, in evaluation too."""

from __future__ import annotations

from torch import nn


def of_samples(in_channels: int, outputs: int) -> nn.Module:
    """Returns a network that predicts values of a sample."""
    return nn.Sequential(
        nn.Conv3d(in_channels, 4, 3, padding=1),
        nn.BatchNorm3d(4, track_running_stats=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, outputs),
    )


def of_voxels(in_channels: int, classes: int) -> nn.Module:
    """Returns a network that predicts the class of each voxel."""
    return nn.Sequential(
        nn.Conv3d(in_channels, 4, 3, padding=1),
        nn.BatchNorm3d(4, track_running_stats=False),
        nn.ReLU(),
        nn.Conv3d(4, classes, 1),
    )


def of_features(in_channels: int, outputs: int) -> nn.Module:
    """Returns a network that norms one value of each channel of a sample."""
    return nn.Sequential(
        nn.Conv3d(in_channels, 4, 3, padding=1),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Linear(4, outputs),
    )
