"""Describes a checkpoint's network, for prediction."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydist.data import Manifest
from pydist.data.store.options import StoreOptions
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.parsing import parse_json
from pydist.train import checkpoint, config_io
from pydist.train.config import Config, FactoryConfig, OptimizerConfig
from pydist.train.config.gradients import effective
from pydist.train.config.model import TASKS
from pydist.train.tasks import Task, task_of


@dataclass(frozen=True)
class CheckpointMetadata:
    """Description that a checkpoint has of its network and of the training data.

    Attributes:
        config: the run's configuration; checkpoints keep its tables "model" and "data" (without the
            path and the store) and, for comparison, "optimizer" and the settings of "train" that
            define the loss and the order of the samples.
        manifest: the manifest of the training set, without files.
    """

    config: Config
    manifest: Manifest

    def task(self, factory: str = "", task: str = "") -> Task:
        """Returns the task that the network was trained for.

        Args:
            factory: of a network that is not pydist's own: a checkpoint may be a stranger's, so
                that code runs only which the caller names. Its file may have moved.
            task: the same for a task that is not pydist's own.

        Raises:
            UsageError: the network has another factory or task, or is pydist's own.
        """
        model = self.config.model
        if not isinstance(model, FactoryConfig):
            for option, given in (("--factory", factory), ("--task", task)):
                if given:
                    raise UsageError(
                        f"{option} {given}: the checkpoint has pydist's own network "
                        f'"{model.name}"; leave the option out'
                    )
            return task_of(self.config)
        own = "" if model.task in TASKS else model.task
        named = task or ("" if own else model.task)
        if not (_same_code(factory, model.factory) and _same_code(named, model.task)):
            given = f"--factory {model.factory}{f' --task {own}' if own else ''}"
            raise UsageError(
                f"the network was made by {model.factory}{f' for {own}' if own else ''}, code "
                f"that the checkpoint names: if you trust it, name it with {given}"
            )
        return task_of(replace(self.config, model=replace(model, factory=factory, task=named)))

    def dump(self) -> dict[str, str]:
        """Encodes the description as texts, for a checkpoint."""
        places = {"path": Path("data"), **vars(StoreOptions())}
        files = self.manifest.table.digest_of_content
        kept = Config(model=self.config.model, data=replace(self.config.data, **places))
        return {
            "config": config_io.dumps(kept),
            "manifest": self.manifest.dumps(),
            "files": json.dumps({"samples and checksums (SHA-256)": files}),
            "optimizer": json.dumps(_effective(self.config.optimizer)),
            "train": json.dumps(_objective(self.config)),
        }


def _same_code(given: str, saved: str) -> bool:
    """Returns whether FILE.py:NAME or MODULE:NAME is another name of the same, from any folder."""
    (where, _, name), (there, _, saved_name) = given.rpartition(":"), saved.rpartition(":")
    if where.endswith(".py") or there.endswith(".py"):
        where, there = _stem(where), _stem(there)
    return (where, name) == (there, saved_name)


def _stem(where: str) -> str:
    """Returns the last part of a file's or a module's name."""
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]


def _effective(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Returns the settings that affect the result of a step, unlike `sharded` and `log_every`."""
    others = ("sharded", "log_every")
    return {name: value for name, value in asdict(optimizer).items() if name not in others}


def _objective(config: Config) -> dict[str, Any]:
    """Returns the settings that define the samples of each step, the loss and its precision."""
    train = config.train
    return {
        "loss": config.model.loss(train),
        "class_weights": train.class_weights and list(train.class_weights),
        "ignore_label": train.ignore_label,
        "clip_norm": train.clip_norm,
        "amp": train.amp,
        "gradients": effective(train.gradients),
        "batch": train.batch,
        "seed": train.seed,
    }


def differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Describes differing settings of network, data, loss and optimizer.

    Args:
        saved: texts of `CheckpointMetadata.dump` from a checkpoint; some may be missing.
        wanted: texts of `CheckpointMetadata.dump` of this run.

    Returns:
        Each with both values, such as "optimizer.lr is 0.1 there and 0.2 here"; "" if none differs.
    """
    there, here = _settings(saved), _settings(wanted)
    return "; ".join(
        f"{name} is {value!r} there and {here[name]!r} here"
        for name, value in there.items()
        if name in here and here[name] != value
    )


def _settings(metadata: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(KeyError, UsageError, TypeError):
        config = config_io.loads(metadata["config"], "checkpoint")
        found |= {f"model.{name}": value for name, value in asdict(config.model).items()}
        found |= {f"data.{name}": getattr(config.data, name) for name in ("normalize", "window")}
    tables = {
        "optimizer": "optimizer.",
        "train": "train.",
        "manifest": "dataset.json: ",
        "files": "dataset.json: ",
    }
    for table, prefix in tables.items():
        with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):
            settings = parse_json(metadata[table])
            found |= {f"{prefix}{name}": value for name, value in settings.items()}
    return found


def load_trained(path: str | Path) -> tuple[CheckpointMetadata, dict[str, Any]]:
    """Loads the description and the weights of a checkpoint's network.

    Args:
        path: a checkpoint (`RUN/ckpt/step-000120` or `RUN/ckpt/last`), or the folder of a run for
            its last one.

    Raises:
        CheckpointError: there is none, it is damaged, or does not describe its network.
    """
    folder = _checkpoint_in(Path(path))
    parts = checkpoint.read(folder)
    texts: Mapping[str, str] = parts.get("about", {})
    if not texts:
        raise CheckpointError(
            f"checkpoint {folder} does not describe its network: a loop of its user's own has "
            "written it"
        )
    try:
        config = config_io.loads(texts["config"], f"checkpoint {folder}")
        manifest = Manifest.loads(texts["manifest"], f"checkpoint {folder}")
    except (KeyError, UsageError, DataError) as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    return CheckpointMetadata(config, manifest), parts["model"]


def _checkpoint_in(path: Path) -> Path:
    if (path / "manifest.json").is_file():
        return path.resolve()  # the current target of a link
    for folder in (path / "ckpt", path):
        found = checkpoint.complete(folder)
        if found:
            return found[-1]
    raise CheckpointError(f"{path}: no checkpoint here, nor in its folder ckpt")
