"""`pydist check`: compares a partitioned network with the unpartitioned one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
from pydist.train.settings import counts_of_axes, with_axes


@dataclass(frozen=True)
@with_axes("Number of parts of {}.", int, 1)
class _Check:
    """Compares a network partitioned over ranks (threads) with itself unpartitioned, by layer.

    Exits with 0 if no call is refused and all differences are within their bounds, else with 1.
    """

    factory: tyro.conf.Positional[str]
    """FILE.py:NAME or MODULE:NAME of a function without arguments that creates the network."""
    sample: str
    """Shape of one sample: channels and one to three extents, as in 1,32,32,32."""
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

    from pydist.check import check, format_report, load_factory

    factory = load_factory(options.factory)
    sample, default = _counts("--sample", options.sample), "2,1,1"
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
        raise kind(f"{options.factory} failed on {options.sample}: {why}") from error
    print(format_report(report))
    return 0 if report.ok else 1


def _counts(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace("x", ",").replace("×", ",").split(",")]
    except ValueError:
        raise UsageError(
            f"{option} {text!r}: expected numbers with commas, as in 1,32,32"
        ) from None
