"""The parameters that a step of a network in stages trains: its own, and its criterion's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

_CRITERION = "the criterion's "


class StagedParameters:
    """Parameters that a step trains, with names that are the same on all ranks.

    Args:
        model: the network.

    Attributes:
        criterion: the module that computed the loss of the latest step, if it was one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.criterion: nn.Module | None = None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all parameters with their names."""
        own = dict(self._model.named_parameters())
        yield from own.items()
        if self.criterion is not None:
            ids = {id(p) for p in own.values()}
            for name, p in self.criterion.named_parameters():
                if id(p) not in ids:
                    yield f"{_CRITERION}{name}", p

    def of_criterion(self) -> str:
        """Describes the criterion's parameters."""
        own = [(n.removeprefix(_CRITERION), p) for n, p in self.named() if is_of_criterion(n)]
        shown = ", ".join(f"{name} {list(p.shape)}" for name, p in own)
        return f"a criterion with {f'the parameters {shown}' if own else 'no parameters'}"


def is_of_criterion(name: str) -> bool:
    """Returns whether a name is that of a parameter which the criterion alone has."""
    return name.startswith(_CRITERION)


def module_of(criterion: Callable[..., Any]) -> nn.Module | None:
    """Returns the module that a criterion is, or whose method it is; `None` of a function."""
    owner = getattr(criterion, "__self__", criterion)
    return owner if isinstance(owner, nn.Module) else None
