"""Keeps the state of each rank in a checkpoint, and chooses one when the ranks are others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import safetensors.torch

from pydist import nested_state
from pydist.comm.consensus import together
from pydist.parsing import parse_json
from pydist.train.job import Job


def gather_rank_states(job: Job, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states of all ranks, equal ones once, for `own_state`. Collective.

    Only the rank that writes gets the states themselves.

    Args:
        job: the ranks.
        own: the state of this rank, for `nested_state.flatten_state`.

    Raises:
        CheckpointError: a state of some rank holds a value that can't be stored.
    """
    with together(job.world, "packing the state of each rank"):
        mine = _pack(own)
    everyones = job.world.all_gather_bytes(mine)
    distinct = list(dict.fromkeys(everyones))
    return {
        "states": [_unpack(each) for each in distinct] if job.writes else [],
        "of": [distinct.index(each) for each in everyones],
        "places": job.world.all_gather_json(_place(job)),
    }


def own_state(job: Job, ranks: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state from which this rank continues.

    It is that of the same place in the same sample group. On other meshes the saved groups take
    turns, and the places in them.
    """
    places = ranks["places"]
    sizes = [1 + max(numbers) for numbers in zip(*places, strict=True)]
    wanted = [number % size for number, size in zip(_place(job), sizes, strict=True)]
    found: Mapping[str, Any] = ranks["states"][ranks["of"][places.index(wanted)]]
    return found


def _place(job: Job) -> list[int]:
    """Returns the number of this rank's sample group, and of the rank in it."""
    before = [] if job.stages is None else job.stages.meshes[: job.stages.index]
    place = sum(mesh.sample_size for mesh in before) + job.mesh.sample_index
    return [job.mesh.data_index, place]


def _pack(state: object) -> bytes:
    skeleton, tensors = nested_state.flatten_state(state)
    return nested_state.dumps(skeleton) + b"\0" + nested_state.encode(tensors)


def _unpack(message: bytes) -> Mapping[str, Any]:
    skeleton, _, tensors = message.partition(b"\0")
    found: Mapping[str, Any] = nested_state.unflatten_state(
        parse_json(skeleton), safetensors.torch.load(tensors)
    )
    return found
