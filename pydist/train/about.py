"""What a checkpoint says of the network in it, so that others can predict with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydist.data import Manifest
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.parsing import parse_json
from pydist.train import checkpoint, config_io
from pydist.train.config import Config, OptimizerConfig
from pydist.train.tasks import Task, task_of


@dataclass(frozen=True)
class About:
    """A network and the data that it was trained on.

    Attributes:
        config: the run's configuration; its tables "model" and "data" are kept (not the path), and
            "optimizer" and what of "train" says what is minimized for comparison.
        manifest: of the training set, without files.
    """

    config: Config
    manifest: Manifest

    def task(self) -> Task:
        """The task that the network was trained for."""
        return task_of(self.config)

    def dump(self) -> dict[str, str]:
        """As texts, for a checkpoint."""
        kept = Config(model=self.config.model, data=replace(self.config.data, path=Path("data")))
        return {
            "config": config_io.dumps(kept),
            "manifest": replace(self.manifest, files=()).dumps(),
            "files": json.dumps({"files (SHA-256)": self.manifest.digest_of_files}),
            "optimizer": json.dumps(_effective(self.config.optimizer)),
            "train": json.dumps(_objective(self.config)),
        }


def _effective(optimizer: OptimizerConfig) -> dict[str, Any]:
    """The settings that decide what a step does; where it is done (`sharded`) does not."""
    return {name: value for name, value in asdict(optimizer).items() if name != "sharded"}


def _objective(config: Config) -> dict[str, Any]:
    """The settings that decide what is minimized, and how exactly, by their names."""
    train = config.train
    return {
        "loss": config.model.loss(train),
        "class_weights": train.class_weights and list(train.class_weights),
        "ignore_label": train.ignore_label,
        "clip_norm": train.clip_norm,
        "amp": train.amp,
    }


def differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """The settings of network, data, loss and optimizer that a checkpoint and a run do not share.

    Args:
        saved: what `About.dump` made, from a checkpoint; an older one may lack settings.
        wanted: the run's own.

    Returns:
        Each with both values, such as "optimizer.lr is 0.1 there and 0.2 here"; "" if none differs.
    """
    there, here = _settings(saved), _settings(wanted)
    return "; ".join(
        f"{name} is {value!r} there and {here[name]!r} here"
        for name, value in there.items()
        if name in here and here[name] != value
    )


def _settings(about: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(KeyError, UsageError, TypeError):
        config = config_io.loads(about["config"], "checkpoint")
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
            settings = parse_json(about[table])
            found |= {f"{prefix}{name}": value for name, value in settings.items()}
    return found


def load_trained(path: str | Path) -> tuple[About, dict[str, Any]]:
    """What a checkpoint says of its network, and the network's weights.

    Args:
        path: a checkpoint (`RUN/ckpt/step-000120` or `RUN/ckpt/last`), or the folder of a run,
            which means its last one.

    Raises:
        CheckpointError: there is none, it is damaged, or an older pydist has written it.
    """
    folder = _checkpoint_in(Path(path))
    parts = checkpoint.read(folder)
    texts: Mapping[str, str] = parts.get("about", {})
    if not texts:
        raise CheckpointError(
            f"checkpoint {folder} does not say what its network is: an older pydist has written it"
        )
    try:
        config = config_io.loads(texts["config"], f"checkpoint {folder}")
        manifest = Manifest.loads(texts["manifest"], f"checkpoint {folder}")
    except (KeyError, UsageError, DataError) as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    return About(config, manifest), parts["model"]


def _checkpoint_in(path: Path) -> Path:
    if (path / "manifest.json").is_file():
        return path.resolve()  # of a link, where it leads now
    for folder in (path / "ckpt", path):
        found = checkpoint.complete(folder)
        if found:
            return found[-1]
    raise CheckpointError(f"{path}: no checkpoint here, nor in its folder ckpt")
