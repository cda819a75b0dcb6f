"""`pydist check`: compares a partitioned network with the unpartitioned one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from pydist.cli.options import parse
from pydist.errors import (
    DoesNotFit,
    PydistError,
    UsageError,
    exit_code_of,
    in_words,
    out_of_memory,
)
from pydist.launch.failures import describe
from pydist.train.config.settings import counts_of_axes, with_axes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
@with_axes("Number of parts of {}.", int, 1)
class _Check:
    """Compares a network partitioned over ranks (threads) with itself unpartitioned, by layer.

    Exits with 0 if no call is refused and all differences are within their bounds, else with 1.
    """

    network: tyro.conf.Positional[str]
    """FILE.py:NAME or MODULE:NAME of a function without arguments that creates the network; or
    CONFIG.toml, as for `pydist train`, with the network and the data set that it is for."""
    sample: str | None = None
    """Shape of one sample: channels and one to three extents, as in 1,32,32,32; by default that
    which CONFIG.toml trains."""
    spatial: str | None = None
    """Number of parts along depth, height and width; by default 2,1,1, or 1 in several stages."""
    stages: int = 1
    """Number of stages, each on ranks of its own."""
    micro_batches: int = 1
    """Number of parts of the batch, which go through the stages one after the other."""
    batch: int | None = None
    """Number of samples; by default 2 in each micro-batch."""
    dtype: Literal["float64", "float32"] = "float64"
    """Precision of the partitioned run; the reference is float64."""
    eval: bool = False
    """Use evaluation mode instead of training mode (which has dropout off for the comparison)."""
    tolerance: float | None = None
    """Largest relative difference; by default 4 times the difference on one device."""
    seed: int = 0
    """Seed of the sample."""


def check(arguments: Sequence[str]) -> int:
    """Runs `pydist check`; see `pydist check --help`."""
    options = parse(_Check, arguments, "pydist check")
    import torch

    from pydist.check import check, format_report

    factory, trained = _factory_of(options.network)
    sample = trained if options.sample is None else _counts("--sample", options.sample)
    if sample is None:
        raise UsageError("--sample is required without CONFIG.toml; pydist check --help tells more")
    default = "2,1,1"
    if max(options.stages, options.micro_batches) > 1:
        default = "1,1,1"
    spatial = _counts("--spatial", default if options.spatial is None else options.spatial)
    while len(spatial) >= len(sample) and spatial[-1] == 1:
        spatial.pop()  # the default is for three dims
    try:
        report = check(
            factory, sample, spatial, stages=options.stages,
            micro_batches=options.micro_batches, batch=options.batch,
            dtype=getattr(torch, options.dtype), train=not options.eval,
            tolerance=options.tolerance, seed=options.seed, **counts_of_axes(options),
        )  # fmt: skip
    except PydistError:
        raise
    except KeyboardInterrupt as error:
        # Ranks are threads that still compute, so the interpreter can't end in an orderly way.
        sys.stderr.write(describe(error))
        sys.stderr.flush()
        os._exit(exit_code_of(error))
    except (Exception, SystemExit) as error:
        kind = DoesNotFit if out_of_memory(error) else PydistError
        why = in_words(error)
        shape = ",".join(map(str, sample))
        raise kind(f"{options.network} failed on {shape}: {why}") from error
    print(format_report(report))
    return 0 if report.ok else 1


def _factory_of(name: str) -> tuple[Callable[[], nn.Module], list[int] | None]:
    """Returns what creates the network, and the shape of a sample in training if it is known."""
    from pydist.check import load_factory

    if not name.endswith(".toml"):
        return load_factory(name), None
    from pydist.data import Manifest
    from pydist.data.axes import without_flat
    from pydist.train import config_io
    from pydist.train.datasets import shape_in_training
    from pydist.train.tasks import task_of

    config = config_io.load(Path(name))
    task, manifest = task_of(config), Manifest.load(config.data.path)
    shape = shape_in_training(config, task, manifest)
    return lambda: task.network(manifest), [*without_flat(shape, manifest.dims)]


def _counts(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace("x", ",").replace("×", ",").split(",")]
    except ValueError:
        raise UsageError(
            f"{option} {text!r}: expected numbers with commas, as in 1,32,32"
        ) from None
