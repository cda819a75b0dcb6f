"""What can be trained: a network with its loss, what validation measures, and what is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydist.registry import imported
from pydist.train.tasks.base import Task, Validation

if TYPE_CHECKING:
    from pydist.train.config import Config

__all__ = ["Task", "Validation", "task_of"]


def task_of(config: Config) -> Task:
    """The task of a configuration: the table "model" names it.

    Raises:
        UsageError: the loss, or an option of it, is not one of this network's; or its task can't
            be imported.
    """
    model = config.model
    task: Task = imported(model.task, f"the task of model '{model.name}'")(model, config.train)
    return task
