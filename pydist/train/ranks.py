"""The ranks that a configuration describes: their number, and which descriptions are possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydist.errors import UsageError
from pydist.grid import CHANNEL_AXIS, OTHER_AXES
from pydist.partition import divide
from pydist.train import reduction
from pydist.train.config import MeshConfig

if TYPE_CHECKING:
    from pydist.train.config import Config

_OF_STAGES = (
    "micro_batches", "schedule", "balance", "cuts", "recompute", "order", "running_statistics",
)  # fmt: skip
"""Settings that only a network in stages has."""
_OF_EACH = ("spatial", *OTHER_AXES)
"""Settings that a list of stages gives for each."""


def check_settings(config: Config) -> None:
    """Checks that the settings of mesh, stages and gradients suit each other.

    Raises:
        UsageError: they do not; it names the setting, and what is possible.
    """
    if found := [*_mistakes(config), *reduction.mistakes(config)]:
        raise UsageError("; ".join(found))


def check_ranks(config: Config, ranks: int) -> None:
    """Checks that a number of ranks suits the description of a mesh or of stages.

    Raises:
        UsageError: it does not.
    """
    mesh = config.mesh
    each, groups = ranks_a_sample(mesh), mesh.data
    if mesh.stages is None:
        _check_mesh(config, ranks, each)
        return
    if ranks % each or (groups is not None and ranks != groups * each):
        sizes = " + ".join(str(ranks_a_sample(stage)) for stage in meshes_of(mesh))
        possible = f"multiples of {each}" if groups is None else str(groups * each)
        times = "" if groups in (None, 1) else f" for each of mesh.data = {groups} sample groups"
        raise UsageError(
            f"mesh.stages needs {sizes} ranks{times}, and there are {ranks}: possible are "
            f"{possible}"
        )
    if found := [*_mistakes_in_batch(config, ranks // each)]:
        raise UsageError(found[0])


def _check_mesh(config: Config, ranks: int, each: int) -> None:
    """Checks that ranks fill a mesh of one stage, and a batch its sample groups."""
    mesh = config.mesh
    if ranks < 1:
        return  # the launcher says what is possible
    possible_groups = [mesh.data or max(1, ranks // each)]
    if mesh.spatial == "auto":  # the ranks choose the mesh
        divisors = (n for n in range(1, ranks + 1) if ranks % n == 0)
        possible_groups = [n for n in divisors if mesh.data in (None, n)]
    elif (needed := possible_groups[0] * each) != ranks:
        parts = " × ".join(f"{axis} {n}" for axis, n in mesh.parts().items() if n > 1) or "1 rank"
        possible = f"{needed}" if mesh.data else f"multiples of {each}"
        raise UsageError(
            f"the mesh of the configuration ({parts}) and {ranks} "
            f"rank{'s' if ranks > 1 else ''}: possible are {possible}"
        )
    found = [[*mistakes_with_groups(config, groups, ranks)] for groups in possible_groups]
    if found and all(found):
        raise UsageError(found[0][0])


def mistakes_with_groups(config: Config, groups: int, ranks: int) -> Iterator[str]:
    """Yields what does not suit a number of sample groups in a mesh of all ranks."""
    train, planned = config.train, config.train.batch_schedule
    if train.batch < groups:
        yield (
            f"train.batch = {train.batch} with {groups} sample groups: at least one sample for "
            f"each is possible, {groups} or more"
        )
        return
    if any(size < groups for _, size in planned.milestones):
        yield (
            f"train.batch_schedule.milestones = {[list(each) for each in planned.milestones]} with "
            f"{groups} sample groups: batches of {groups} or more are possible"
        )
    if train.batch // train.accumulate < groups:
        yield (
            f"train.accumulate = {train.accumulate} with train.batch = {train.batch} and {groups} "
            "sample groups: a pass needs a sample for each; possible are up to "
            f"{train.batch // groups}"
        )
    if planned.noise_scale and groups == train.accumulate == 1:
        yield (
            "train.batch_schedule.noise_scale compares parts of a step, which is one pass of one "
            "sample group: several groups are possible, and train.accumulate = 2 or more"
        )
    yield from reduction.mistakes_on(config, groups, ranks)


def least_samples(batch: int, groups: int, shares: Sequence[float] | None) -> int:
    """Returns the samples of the sample group with fewest.

    Args:
        batch: samples of all groups, at least one for each.
        groups: number of groups.
        shares: of the groups; equal by default.
    """
    points = divide(batch, shares or (1.0,) * groups).points
    return min(b - a for a, b in pairwise(points))


def meshes_of(mesh: MeshConfig) -> tuple[MeshConfig, ...]:
    """Returns the grid of each stage; without stages the only one."""
    if not isinstance(mesh.stages, tuple):
        return (replace(mesh, stages=None),) * (mesh.stages or 1)
    of_data = mesh.shares.data
    return tuple(
        MeshConfig(
            data=mesh.data,
            spatial=each.spatial,
            shares=replace(each.shares, data=of_data),
            **each.axes,
        )
        for each in mesh.stages
    )


def ranks_a_sample(mesh: MeshConfig) -> int:
    """Returns the number of ranks, in all stages, through which a sample goes."""
    return sum(
        math.prod(n for axis, n in each.parts().items() if axis != "data")
        for each in meshes_of(mesh)
    )


def stage_arguments(mesh: MeshConfig, ranks: int) -> list[Mapping[str, Any]]:
    """Returns the meshes of stages as `pydist.init_stages` takes them.

    Args:
        mesh: the configuration, with stages.
        ranks: number of ranks, which `check_ranks` has accepted.
    """
    groups = ranks // ranks_a_sample(mesh)
    return [
        {
            "data": groups,
            "spatial": stage.spatial,
            **stage.axes,
            "shares": stage.shares.given,
        }
        for stage in meshes_of(mesh)
    ]


def _mistakes(config: Config) -> Iterator[str]:
    train, mesh = config.train, config.mesh
    passes = train.accumulate
    if mesh.stages is not None and passes == 1:
        passes = min(mesh.micro_batches, train.batch)
    yield from train.batch_schedule.mistakes(train.batch, passes)
    if train.cuda_graph == "always" and (train.accumulate > 1 or train.batch_schedule.changes):
        yield (
            'train.cuda_graph = "always" with train.accumulate or train.batch_schedule: a graph '
            'holds a step of one pass and one size; "auto" and "never" are possible'
        )
    if mesh.stages == ():
        yield "mesh.stages = []: expected a mesh for each stage, as in [{spatial = [2, 1, 1]}, {}]"
        return
    default = {each.name: each.default for each in fields(MeshConfig)}
    if mesh.stages is None:
        for name in _OF_STAGES:
            if (given := getattr(mesh, name)) != default[name]:
                yield f"mesh.{name} = {_shown(given)}: it is for stages, and mesh.stages is not set"
    yield from _mistakes_in_slices(config)
    yield from _mistakes_in_auto(mesh)
    if isinstance(mesh.stages, tuple):
        yield from _mistakes_in_list(mesh, default)
    for number, stage in enumerate(meshes_of(mesh)):
        of_each = isinstance(mesh.stages, tuple)
        where = f"mesh.stages.{number}.shares" if of_each else "mesh.shares"
        parts = stage.parts()
        for axis, shares in stage.shares.given.items():
            if len(shares) != (expected := parts.get(axis, len(shares))):
                place = "mesh.shares" if axis == "data" else where
                yield (
                    f"{place}.{axis} = {list(shares)}: expected one number per part, and the mesh "
                    f"has {expected} along it"
                )
    if mesh.stages is not None:
        yield from _mistakes_in_stages(config)
        if mesh.data is not None:
            yield from _mistakes_in_batch(config, mesh.data)


def _mistakes_in_slices(config: Config) -> Iterator[str]:
    mesh = config.mesh
    if not mesh.sharded_weights:
        return
    if all(each.axes[CHANNEL_AXIS] == 1 for each in meshes_of(mesh)):
        yield "mesh.sharded_weights: weights are sharded along mesh.channel, which is 1"


def _mistakes_in_auto(mesh: MeshConfig) -> Iterator[str]:
    if mesh.spatial != "auto":
        return
    if mesh.stages is not None:
        yield (
            'mesh.spatial = "auto" with mesh.stages: it chooses one mesh; `pydist plan` compares '
            "stages"
        )
    for axis in mesh.shares.given:
        yield f'mesh.shares.{axis} with mesh.spatial = "auto": give mesh.spatial as numbers'


def _mistakes_in_list(mesh: MeshConfig, default: Mapping[str, Any]) -> Iterator[str]:
    assert isinstance(mesh.stages, tuple)
    for name in _OF_EACH:
        if (given := getattr(mesh, name)) != default[name]:
            yield (
                f"mesh.{name} = {_shown(given)} beside a list mesh.stages: give it to each stage, "
                f"as in mesh.stages = [{{{name} = {_shown(given)}}}, {{}}]"
            )
    for axis in mesh.shares.given:
        if axis != "data":
            yield f"mesh.shares.{axis} beside a list mesh.stages: give it to the shares of a stage"
    for number, stage in enumerate(mesh.stages):
        if stage.shares.data is not None:
            yield (
                f"mesh.stages.{number}.shares.data: all stages have the same samples; give it to "
                "mesh.shares"
            )


def _mistakes_in_stages(config: Config) -> Iterator[str]:
    mesh, meshes = config.mesh, len(meshes_of(config.mesh))
    if config.data.on_bad_sample == "skip":
        yield (
            'data.on_bad_sample = "skip" with mesh.stages: the stages read their blocks '
            'independently; "stop" is possible'
        )
    if mesh.rebalance is not None:
        yield (
            f'mesh.rebalance = "{mesh.rebalance}" with mesh.stages: it changes the parts of one '
            "mesh; mesh.balance divides the network"
        )
    if mesh.order is not None and {*mesh.order} != {*range(meshes)}:
        yield (
            f"mesh.order = {_shown(mesh.order)}: expected the mesh of each stage, each of 0 to "
            f"{meshes - 1} at least once"
        )
    count = meshes if mesh.order is None else len(mesh.order)
    if mesh.schedule == "gems":
        line = tuple(range(meshes))
        if (mesh.order or line) != line or len({str(each) for each in meshes_of(mesh)}) > 1:
            yield (
                'mesh.schedule = "gems" runs one stage on each mesh, and its meshes are equal: '
                "leave out mesh.order, and give mesh.stages as a number"
            )
    if mesh.cuts is not None and len(mesh.cuts) != count - 1:
        yield (
            f"mesh.cuts = {_shown(mesh.cuts)}: {count} stages begin at the input and at "
            f"{count - 1} modules"
        )
    if config.train.accumulate > 1:
        yield (
            f"train.accumulate = {config.train.accumulate} with mesh.stages: stages accumulate the "
            "gradient over mesh.micro_batches; set that instead"
        )
    if config.train.batch_schedule.noise_scale:
        yield (
            "train.batch_schedule.noise_scale with mesh.stages: no stage has the gradient of the "
            "whole network; milestones are possible"
        )
    if config.train.cuda_graph == "always":
        yield (
            'train.cuda_graph = "always" with mesh.stages: stages exchange messages through their '
            'hosts in each step, which no graph holds; "auto" and "never" are possible'
        )


def _mistakes_in_batch(config: Config, groups: int) -> Iterator[str]:
    batch, count = config.train.batch, config.mesh.micro_batches
    if batch < groups:
        return  # the loader says so, with or without stages
    least = least_samples(batch, groups, config.mesh.shares.data)
    if least < count:
        yield (
            f"mesh.micro_batches = {count}: of train.batch = {batch} a sample group has {least} "
            f"sample{'s' if least > 1 else ''}; possible are 1 to {least}, or a larger batch"
        )


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)
