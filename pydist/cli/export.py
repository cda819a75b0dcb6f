"""`pydist export`: extracts a network's weights from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from pydist.cli.options import parse


@dataclass(frozen=True)
class _Arguments:
    """Writes the weights of a checkpoint as a safetensors file, for use without pydist."""

    checkpoint: tyro.conf.Positional[Path]
    """Folder of a run, or one of its checkpoints."""
    output: tyro.conf.Positional[Path]
    """File to write, ending in .safetensors."""
    factory: str = ""
    """Factory of a network that is not pydist's own, such as nets.py:make, if you trust it."""
    task: str = ""
    """Task that is not pydist's own, such as mine.py:MyTask, if you trust it."""


def export(arguments: Sequence[str]) -> int:
    """Runs `pydist export`; see `pydist export --help`."""
    options = parse(_Arguments, arguments, "pydist export")
    from pydist.inference.export import export_weights

    network = export_weights(options.checkpoint, options.output, options.factory, options.task)
    print(f"exported   {options.output}")
    print(f'load it    {network}.load_state_dict(safetensors.torch.load_file("{options.output}"))')
    return 0
