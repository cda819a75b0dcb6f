"""The parameters that passes of a network in stages train: its own, and those of its criterion."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from pydist.exchange.link import Link


class StagedParameters:
    """Parameters with names: the network's, and others that its passes compute with.

    Others are those of a criterion, or that a network keeps outside of its modules. Passes note
    them; all ranks run all calls, so they have the same order on all.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._others: list[tuple[str, Link]] = []
        self._place: dict[int, int] = {}  # in `_others`, by ids

    def note(self, x: Tensor) -> str | None:
        """Returns the name of a parameter that is not the network's; `None` of another tensor."""
        if type(x) is not nn.Parameter or not x.requires_grad:
            return None
        place = self._place.get(id(x))
        if place is None or not self._others[place][1].leads_to(x):
            place = self._place[id(x)] = len(self._others)
            name = f"parameter {place} of shape {list(x.shape)} that is not the network's"
            self._others.append((name, Link(x)))
        return self._others[place][0]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all parameters with their names."""
        yield from self._model.named_parameters()
        for name, link in self._others:
            x = link()
            # One that was freed keeps its place, as another rank may still have it.
            yield name, nn.Parameter(requires_grad=False) if x is None else x
