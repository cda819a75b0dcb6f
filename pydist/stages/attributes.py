"""Attributes of modules that a forward pass may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set)
_TORCHS = nn.Module().__dict__.keys() - {"_parameters", "_buffers", "_modules"}
"""Names of attributes that every module has, and no forward pass changes."""


class Attributes:
    """The attributes of a network's modules at one time, with what they contained.

    That is numbers, tensors, lists, dicts and sets, and which buffers there were; not the values of
    buffers and parameters, nor what other objects contain.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [(m.__dict__, _contents(m.__dict__)) for m in model.modules()]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the attributes after the `with` block."""
        try:
            yield
        finally:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Gives the modules these attributes; new ones are deleted."""
        for attributes, contents in self._kept:
            for name in attributes.keys() - contents.keys() - _TORCHS:
                del attributes[name]
            for name, (value, content) in contents.items():
                attributes[name] = value
                if content is None:
                    continue
                if isinstance(value, Tensor):
                    if not torch.equal(value, content):
                        value.copy_(content)
                    continue
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)


def _contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns attributes with copies of what they contain; `None` for what is not copied."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, value in attributes.items():
        if name in _TORCHS:
            continue
        content = None
        if type(value) in _CONTAINERS:
            content = value.copy()
        elif type(value) is Tensor and not value.requires_grad:
            content = value.clone()
        found[name] = value, content
    return found
