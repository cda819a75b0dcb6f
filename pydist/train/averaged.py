"""The average of gradients over the sample groups of a run, by the form that it has chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from pydist.entry_hook import entry_hook_of
from pydist.gradients.forms.settings import Gradients
from pydist.optim import (
    average_parameters,
    gradient_state,
    load_gradient_state,
    set_loss_scale,
)


class Averaged:
    """Averages a network's gradients over the sample groups, with collective methods.

    Args:
        model: the parallelized network, or the network in stages.
        form: how its gradients are averaged.

    Attributes:
        obstacle: why a step can't be captured as a CUDA graph, if that is so.
    """

    def __init__(self, model: nn.Module, form: Gradients) -> None:
        self._model, self._has_state = model, form.keeps
        self.obstacle = (
            f'gradients = "{form.name}" decides on the host in each step' if form.keeps else None
        )

    def before_backward(self, scaler: GradScaler) -> None:
        """Tells the form the scale of the loss."""
        if self._has_state:
            set_loss_scale(self._model, scaler.get_scale())

    def after_step(self, optimizer: Optimizer) -> None:
        """Averages the groups' parameters, if the form is post-local SGD and it is due."""
        if self._has_state:
            average_parameters(self._model, optimizer)

    def equalize(self, optimizer: Optimizer) -> None:
        """Makes parameters, and the optimizer's state, equal on all groups, if they differ."""
        if self._has_state:
            average_parameters(self._model, optimizer, always=True)

    def sent(self) -> dict[str, int]:
        """Returns the bytes that this rank has sent for gradients, by the kind of group."""
        total: dict[str, int] = {}
        for form in entry_hook_of(self._model).forms:
            for kind, count in form.sent().items():
                total[kind] = total.get(kind, 0) + count
        return total

    def state(self) -> dict[str, Any]:
        """Returns what groups have not sent yet, on rank 0; nothing for forms without state."""
        return gradient_state(self._model)

    def load(self, state: Mapping[str, Any], step: int) -> str:
        """Loads `state` of a run that has done `step` steps.

        Returns:
            A line about what could not be restored as it was, if that is so.
        """
        return load_gradient_state(self._model, state, step)
