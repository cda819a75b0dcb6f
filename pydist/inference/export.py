"""Takes the weights out of a checkpoint, for use without pydist."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import safetensors.torch

from pydist import owner
from pydist.data.publish import publish
from pydist.errors import UsageError
from pydist.train.about import load_trained
from pydist.train.checkpoint import is_checkpoint


def export_weights(checkpoint: str | Path, path: str | Path) -> str:
    """Writes a network's weights as a safetensors file that torch's own loaders read.

    Keys are those of the plain network's `state_dict`. The file's metadata say how the network is
    made, and what was done to its inputs.

    Args:
        checkpoint: see `pydist.train.about.load_trained`.
        path: ends in .safetensors; appears whole or not at all.

    Returns:
        The network, as one writes it in Python.

    Raises:
        CheckpointError: there is none, or it is damaged.
        UsageError: another suffix, or a file within a checkpoint.
        DiskError: the disk is full, or the folder can't be written.
    """
    name = Path(path)
    if name.suffix != ".safetensors":
        raise UsageError(f"{name}: the name of the file ends in .safetensors")
    if is_checkpoint(name.parent):
        raise UsageError(
            f"{name}: its folder is a checkpoint, which it would damage; choose another"
        )
    about, weights = load_trained(checkpoint)
    network = about.task().expression(about.manifest)
    data = about.config.data
    metadata = {
        "format": "pt",
        "network": network,
        "normalize": data.normalize,
        "window": json.dumps(data.window),
        "intensity": json.dumps([asdict(channel) for channel in about.manifest.intensity]),
        "class_names": json.dumps(about.manifest.class_names),
        "target_names": json.dumps(about.manifest.target_names),
    }
    owner.remove_temporaries(name.parent)
    publish(name, safetensors.torch.save(weights, metadata))
    return network
