"""State that a forward pass may change: attributes of modules, and random numbers."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pydist.stages.generators import Generators

_TORCHS = nn.Module().__dict__.keys() - {"_parameters", "_buffers", "_modules"}
"""Names of attributes that every module has, and no forward pass changes."""
_DEEPEST = 8
_OWN = ("_parameters", "_buffers", "_modules")


class ProgramState:
    """The attributes of modules at one time, with what they contained, and the generators' states.

    Contents are numbers, tensors, and containers of them (lists, dicts, sets, deques, and their
    subclasses), and which buffers there were; not the values of buffers and parameters, nor what
    other objects contain.

    Args:
        modules: the modules.
        device: where they compute.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._generators = Generators(device)
        self._kept = []
        for module in modules:
            held = module.__dict__
            contents = {
                name: (value, dict(value) if name in _OWN else _content(value))
                for name, value in held.items()
                if name not in _TORCHS
            }
            self._kept.append((held, contents))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the state after the `with` block."""
        try:
            yield
        finally:
            self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Restores generators, and the modules' attributes; new ones are deleted."""
        self._generators.restore()
        for held, contents in self._kept:
            for name in held.keys() - contents.keys() - _TORCHS:
                del held[name]
            for name, (value, content) in contents.items():
                held[name] = value
                if name in _OWN:
                    value.clear()
                    value.update(content)
                else:
                    _restore(value, content)


def _content(value: Any, depth: int = 0) -> Any:
    """Returns what a value contains, for `_restore`; `None` for other objects."""
    if depth > _DEEPEST:  # perhaps a container of itself
        return None
    if isinstance(value, dict):
        return [(key, each, _content(each, depth + 1)) for key, each in value.items()]
    if isinstance(value, list | deque):
        return [(each, _content(each, depth + 1)) for each in value]
    if isinstance(value, set):
        return set(value)
    if type(value) is Tensor and not value.requires_grad:
        return value.clone()
    return None


def _restore(value: Any, content: Any) -> None:
    """Restores what a value contained."""
    if content is None:
        return
    if isinstance(value, dict):
        value.clear()
        # Not a subclass's own way, which may do more; an OrderedDict keeps its order by itself.
        plain: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        for key, each, inner in content:
            plain.__setitem__(value, key, each)
            _restore(each, inner)
    elif isinstance(value, list | deque):
        value.clear()
        for each, inner in content:
            value.append(each)
            _restore(each, inner)
    elif isinstance(value, set):
        value.clear()
        value.update(content)
    elif not torch.equal(value, content):
        value.copy_(content)
