"""The forms of gradients that suit the other settings of a configuration."""

from __future__ import annotations

from collections.abc import Iterator

from pydist.train.config import Config
from pydist.train.config.gradients import (
    NAMES,
    STATEFUL,
    DgcConfig,
    PostLocalConfig,
    StatefulConfig,
    TorusConfig,
    name_of,
)  # fmt: skip
from pydist.train.config.optimizers import LayerwiseConfig


def mistakes(config: Config) -> Iterator[str]:
    """Yields how a form of gradients does not suit the other settings."""
    form, name = config.train.gradients, name_of(config.train.gradients)
    given = f'train.gradients = "{name}"'
    if name == "dense":
        return
    if config.optimizer.sharded == "always":
        yield (
            f'{given} with optimizer.sharded = "always": steps are divided for gradients that are '
            '"dense" only; optimizer.sharded = "auto" and "never" are possible'
        )
    if isinstance(form, StatefulConfig):
        if config.train.batch_schedule.noise_scale:
            yield (
                f"{given} with train.batch_schedule.noise_scale: it compares the gradients of "
                "sample groups with their mean, and this form does not give the mean of a step; "
                f"possible are {', '.join(_without_state())}, and milestones"
            )
        if config.mesh.stages is not None:
            yield f"{given} with mesh.stages: possible are {', '.join(_without_state())}"
        if config.mesh.sharded_weights:
            yield f"{given} with mesh.sharded_weights: possible are {', '.join(_without_state())}"
        if config.train.cuda_graph == "always":
            yield (
                f'{given} with train.cuda_graph = "always": the form decides in each step on the '
                'host, which no graph holds; "auto" and "never" are possible'
            )
    if isinstance(form, PostLocalConfig) and config.train.amp == "fp16":
        yield f'{given} with train.amp = "fp16": groups would skip other steps; bf16 is possible'
    if isinstance(form, DgcConfig):
        yield from _mistakes_in_dgc(config, form)


def mistakes_on(config: Config, groups: int, ranks: int) -> Iterator[str]:
    """Yields how a form of gradients does not suit a mesh of all ranks with some sample groups."""
    form = config.train.gradients
    if isinstance(form, TorusConfig) and form.row is not None and ranks % form.row:
        possible = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield (
            f"train.gradients.row = {form.row}: {ranks} ranks have no rows of {form.row}; possible "
            f"are {possible}"
        )
    if isinstance(form, DgcConfig) and groups == 1 and _needs_groups(form):
        yield (
            f'train.gradients = "dgc" with one sample group on {ranks} '
            f'rank{"s" if ranks > 1 else ""}: nothing is sent between groups; "dense" is possible'
        )


def _needs_groups(form: DgcConfig) -> bool:
    """Returns whether a run with one group, which sends dense gradients, would be another one."""
    return bool(form.momentum) or form.clip_norm is not None


def _mistakes_in_dgc(config: Config, form: DgcConfig) -> Iterator[str]:
    given, optimizer = 'train.gradients = "dgc"', config.optimizer
    momentum = getattr(optimizer, "momentum", None)
    if isinstance(optimizer, LayerwiseConfig):
        yield f'{given} with optimizer.name = "{optimizer.name}": its norms need whole gradients'
    elif form.momentum and (momentum is None or momentum):
        what = f'name = "{optimizer.name}"' if momentum is None else f"momentum = {momentum:g}"
        yield (
            f"{given} has momentum of its own, {form.momentum:g}: with optimizer.{what} there "
            'would be two; possible are optimizer.name = "sgd" with momentum = 0.0, and '
            'gradients = {name = "dgc", momentum = 0.0}'
        )
    if config.train.clip_norm is not None:
        yield (
            f"{given} with train.clip_norm: gradients are sums of several steps when they arrive, "
            "and each sample group clips its own before; instead of train.clip_norm set gradients "
            f'= {{name = "dgc", clip_norm = {config.train.clip_norm:g}}}'
        )
    if form.nesterov and not form.momentum:
        yield "train.gradients.nesterov = true needs train.gradients.momentum > 0"
    if config.mesh.data == 1 and _needs_groups(form):
        yield f'{given} with mesh.data = 1: nothing is sent between groups; "dense" is possible'


def _without_state() -> list[str]:
    return [name for name in NAMES if name not in STATEFUL]
