"""A small network, its batches and its gradients, for scripts of one step or a few."""

from __future__ import annotations

from equivalence import randn
from scripts import copy_of
from torch import nn


def network(width=4):
    return copy_of(
        nn.Sequential(
            nn.Conv3d(2, width, 3, padding=1), nn.Tanh(), nn.Conv3d(width, 3, 3, padding=1)
        )
    )


def batch(seed=0, channels=2):
    return randn(2, channels, 5, 4, 3, seed=seed)


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gradients(*modules):
    return [p.grad for m in modules for p in m.parameters()]


def step_of(model, cut, seed=0):
    model.zero_grad()
    model(cut(batch(seed))).square().mean().backward()
    return [None if g is None else g.clone() for g in gradients(model)]
