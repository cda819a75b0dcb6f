"""Defines tasks: a network with its loss, its validation measures and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydist.registry import imported
from pydist.train.tasks.base import Task, Validation

if TYPE_CHECKING:
    from pydist.train.config import Config

__all__ = ["Task", "Validation", "task_of"]


def task_of(config: Config) -> Task:
    """Returns the task of a configuration, as its table "model" names it.

    Raises:
        UsageError: the network does not support the loss or an option of it, or the task can't be
            imported.
    """
    model = config.model
    task: Task = imported(model.task, f"the task of model '{model.name}'")(model, config.train)
    return task
