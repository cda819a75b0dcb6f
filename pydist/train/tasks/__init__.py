"""What can be trained: a network with its loss, what validation measures, and what is reported."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from pydist.train.tasks.base import Task, Validation

if TYPE_CHECKING:
    from pydist.train.config import Config

__all__ = ["Task", "Validation", "task_of"]


def task_of(config: Config) -> Task:
    """The task of a configuration: the table "model" names it.

    Raises:
        UsageError: the loss, or an option of it, is not one of this network's.
    """
    task: Task = resolve_name(config.model.task)(config.model, config.train)
    return task
