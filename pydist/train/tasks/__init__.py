"""Defines tasks: a network with its loss, its validation measures and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydist.check.factory import load_object
from pydist.errors import UsageError
from pydist.registry import imported
from pydist.train.tasks.base import Task, Validation

if TYPE_CHECKING:
    from pydist.train.config import Config

__all__ = ["Task", "Validation", "task_of"]


def task_of(config: Config) -> Task:
    """Returns the task of a configuration, as its table "model" names it.

    Raises:
        UsageError: the network does not support the loss or an option of it, or the task can't be
            imported, or its class changes one of `loss` and `criterion` alone.
    """
    model = config.model
    if model.task.partition(":")[0].endswith(".py"):
        made = load_object(model.task)
    else:
        made = imported(model.path_of_task, f"the task of model '{model.name}'")
    task: Task = made(model, config.train)
    changed = {name: _class_with(task, name) for name in ("loss", "criterion")}
    if changed["loss"] is not changed["criterion"]:
        raise UsageError(
            f"{type(task).__name__} inherits one of `loss` (of a whole step) and `criterion` (of "
            "several passes, or stages): define both, so that runs train with the same loss"
        )
    return task


def _class_with(task: Task, name: str) -> type | None:
    """Returns the class that defines an attribute."""
    return next((each for each in type(task).__mro__ if name in vars(each)), None)
