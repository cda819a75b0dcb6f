"""What a checkpoint says of the network in it, so that others can predict with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydist.data import Manifest
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.train import checkpoint, config_io
from pydist.train.config import Config
from pydist.train.tasks import Task, task_of


@dataclass(frozen=True)
class About:
    """A network and the data that it was trained on.

    Attributes:
        config: the run's configuration; its tables "model" and "data" are kept (not the path).
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
        }


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
