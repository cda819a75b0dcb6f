"""Defines tasks: a network with its loss, its validation measures and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydist.check.factory import load_object
from pydist.errors import UsageError, in_words
from pydist.registry import imported
from pydist.train.tasks.base import Task, Validation

if TYPE_CHECKING:
    from pydist.train.config import Config

__all__ = ["Task", "Validation", "task_of"]


def task_of(config: Config) -> Task:
    """Returns the task of a configuration, as its table "model" names it.

    Raises:
        UsageError: the network does not support the loss or an option of it, or the task can't be
            imported or made, lacks a part, or has a `loss`, which nothing would call.
    """
    model = config.model
    if model.task.partition(":")[0].endswith(".py"):
        made = load_object(model.task)
    else:
        made = imported(model.path_of_task, f"the task of model '{model.name}'")
    try:
        task: Task = made(model, config.train)
    except TypeError as error:
        raise UsageError(
            f"{model.task}: a task is made with the tables model and train: {in_words(error)}"
        ) from error
    if missing := [name for name in vars(Task) if name[0] != "_" and not hasattr(task, name)]:
        raise UsageError(f"{model.task}: a task needs {', '.join(missing)}")
    if hasattr(task, "loss"):
        raise UsageError(
            f"{type(task).__name__}.loss: nothing calls it; a task's loss is what its `criterion` "
            "returns"
        )
    return task
