"""Compares split runs on a mesh of ranks with the one-device run.

`core` runs functions and networks on rank-threads and on plain tensors; its names are here. The
other modules compare bit by bit (`exact`), in narrow types (`narrow`), with a bound from float64
(`one_device`), for sample groups of unequal size (`groups`) and for full training scripts
(`scripts`). `splits` has the splits of most tests of operators; `strategies` draws windows and
cuts for hypothesis.
"""

from __future__ import annotations

from support.equivalence.core import (
    FP64_BOUND,
    Answer,
    Cut,
    Points,
    Task,
    assert_equal,
    assert_same,
    bounds_of,
    check_function,
    check_network,
    error,
    even_points,
    group_slice,
    jittered,
    layout_at,
    noise_like,
    on_one_core,
    on_ranks,
    on_shards,
    randint,
    randn,
    shard,
    spatial_of,
    train_split,
    whole_answer,
    whole_of,
    whole_step,
)

__all__ = [
    "FP64_BOUND",
    "Answer",
    "Cut",
    "Points",
    "Task",
    "assert_equal",
    "assert_same",
    "bounds_of",
    "check_function",
    "check_network",
    "error",
    "even_points",
    "group_slice",
    "jittered",
    "layout_at",
    "noise_like",
    "on_one_core",
    "on_ranks",
    "on_shards",
    "randint",
    "randn",
    "shard",
    "spatial_of",
    "train_split",
    "whole_answer",
    "whole_of",
    "whole_step",
]
