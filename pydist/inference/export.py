"""Extracts the weights from a checkpoint, for use without pydist."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import safetensors.torch

from pydist import owner
from pydist.data.axes import without_flat
from pydist.data.publish import publish
from pydist.errors import UsageError
from pydist.train.checkpoint import is_checkpoint
from pydist.train.metadata import load_trained


def export_weights(
    checkpoint: str | Path, path: str | Path, factory: str = "", task: str = ""
) -> str:
    """Writes a network's weights to a safetensors file for use with plain torch.

    The keys are those of the plain network's `state_dict`. The file's metadata contain the Python
    expression of the network and, as JSON, what its inputs depend on: the normalization with its
    statistics (see `pydist.data.Manifest`), the stored type, the shape of a sample [C, ...] and the
    grid that NIfTI files are resampled to.

    Args:
        checkpoint: see `pydist.train.metadata.load_trained`.
        path: file ending in .safetensors; written atomically.
        factory: of a network that is not pydist's own, such as "nets.py:make"; it runs only if
            it is named, as a checkpoint may be a stranger's.
        task: the same for a task that is not pydist's own.

    Returns:
        The Python expression that creates the network.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        UsageError: another suffix or factory, or a file within a checkpoint.
        DiskError: the disk is full, or the folder can't be written.
    """
    name = Path(path)
    if name.suffix != ".safetensors":
        raise UsageError(f"{name}: the name of the file ends in .safetensors")
    if is_checkpoint(name.parent):
        raise UsageError(
            f"{name}: its folder is a checkpoint, which it would damage; choose another"
        )
    trained, weights = load_trained(checkpoint)
    network = trained.task(factory, task).expression(trained.manifest)
    data, manifest = trained.config.data, trained.manifest
    metadata = {"format": "pt", "network": network, "normalize": data.normalize}
    described = {
        "window": data.window,
        "intensity": [asdict(channel) for channel in manifest.intensity],
        "log1p_mean": manifest.log1p_mean,
        "log1p_std": manifest.log1p_std,
        "dtype": manifest.dtype,
        "sample_shape": without_flat(manifest.sample_shape, manifest.dims),
        "grid": manifest.origin.get("grid"),
        "channel_names": manifest.channel_names,
        "class_names": manifest.class_names,
        "target_names": manifest.target_names,
    }
    metadata |= {name: json.dumps(value) for name, value in described.items()}
    owner.remove_temporaries(name.parent)
    publish(name, safetensors.torch.save(weights, metadata))
    return network
