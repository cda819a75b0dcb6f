"""The settings of forms, as users give them; and the forms that they describe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from pydist.errors import NotSupported, UsageError
from pydist.gradients.forms.form import Form
from pydist.gradients.forms.levels import HierarchicalForm, NarrowForm, TorusForm, messages_of
from pydist.gradients.forms.local import LocalForm
from pydist.gradients.forms.low_rank import LowRankForm
from pydist.gradients.forms.sparse import SparseForm
from pydist.gradients.forms.topology import hosts_of, rows_of, split_rows

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.forms.messages import Messages
    from pydist.gradients.leaf import Leaf
    from pydist.mesh import Mesh

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Dense:
    """Gradients as they are, in one all-reduce over all ranks for each bucket."""

    name: ClassVar[str] = "dense"
    keeps: ClassVar[bool] = False
    """Whether the form keeps state between steps."""


@dataclass(frozen=True)
class Narrow:
    """Gradients that are rounded to 16 bits between sample groups; sums are in fp32.

    Args:
        dtype: "bf16", with the range of fp32, or "fp16", in which more than 65504 is infinite.

    Raises:
        UsageError: the dtype is none of these.
    """

    dtype: Literal["fp16", "bf16"] = "bf16"
    keeps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise UsageError(f"Narrow(dtype={self.dtype!r}): possible are {', '.join(_DTYPES)}")

    @property
    def name(self) -> str:
        """Name that the form has in settings and logs."""
        return self.dtype


@dataclass(frozen=True)
class Torus:
    """Gradients as they are, along the rows and the columns of a grid of all ranks.

    Args:
        row: number of ranks in a row, the direction with the faster connections; by default the
            ranks of a host, or the nearest to a square if there is one host, or hosts have
            different numbers of ranks. It is that of all ranks: for the slices of a weight, which
            fewer ranks hold, the default counts where they have no such rows.

    Raises:
        UsageError: the row is not a count.
    """

    row: int | None = None
    name: ClassVar[str] = "torus"
    keeps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.row is not None:
            _check_count("Torus(row=", self.row, 1)


@dataclass(frozen=True)
class Hierarchical:
    """Gradients as they are: summed on each host, then between hosts, of any numbers of ranks.

    Hosts are those on which the ranks run. On one host it is the dense form.
    """

    name: ClassVar[str] = "hierarchical"
    keeps: ClassVar[bool] = False


@dataclass(frozen=True)
class PowerSGD:
    """PowerSGD, which sends gradients between sample groups as products of two thin matrices.

    Error feedback adds what a step did not send to the gradient of the next step.

    Args:
        rank: columns of the two matrices.
        start: number of first steps that send gradients as they are.
        least_saving: how many times smaller the matrices are at least; a gradient [n, ...] with
            n·m elements whose r (n + m) are not so much smaller is sent as it is.

    Raises:
        UsageError: a setting is out of range.
    """

    rank: int = 4
    start: int = 100
    least_saving: float = 2.0
    name: ClassVar[str] = "powersgd"
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_count("PowerSGD(rank=", self.rank, 1)
        _check_count("PowerSGD(start=", self.start, 0)
        _check_number("PowerSGD(least_saving=", self.least_saving, float("inf"))


@dataclass(frozen=True)
class DGC:
    """Deep Gradient Compression, which sends only the largest elements between sample groups.

    The gradients have momentum already: give the optimizer none, as in SGD(momentum=0). Each
    backward pass outside of `no_sync` is a step.

    Args:
        density: fraction of the elements that each group sends.
        momentum: fraction of the velocity that each step repeats.
        nesterov: whether momentum has Nesterov's form.
        masking: whether sending an element resets its velocity.
        warmup: number of first steps with higher densities.
        densities: one for each of the warm-up's equal parts.
        sample: fraction of the elements on which a threshold is estimated.
        clip_norm: threshold of the norm of the mean gradient of N sample groups, over all
            parameters of the model, as in `torch.nn.utils.clip_grad_norm_`. Each group clips its
            share of the mean, its own gradient over N, to clip_norm / √N before it adds it to its
            velocity ("local gradient clipping" of arXiv:1712.01887). None: no clipping. With it,
            messages between groups start after backward.

    Raises:
        UsageError: a setting is out of range.
    """

    density: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    warmup: int = 0
    densities: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004)
    sample: float = 0.01
    clip_norm: float | None = None
    name: ClassVar[str] = "dgc"
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_number("DGC(density=", self.density, 1)
        _check_number("DGC(sample=", self.sample, 1)
        for each in self.densities:
            _check_number("DGC(densities=", each, 1)
        _check_count("DGC(warmup=", self.warmup, 0)
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise UsageError(f"DGC(momentum={self.momentum!r}): expected 0 or more, below 1")
        if self.nesterov and not self.momentum:
            raise UsageError("DGC(nesterov=True) needs momentum > 0")
        if self.clip_norm is not None:
            _check_number("DGC(clip_norm=", self.clip_norm, float("inf"))


@dataclass(frozen=True)
class PostLocal:
    """Post-local SGD, which averages parameters instead of gradients after the first steps.

    The sample groups then use their own gradients alone.

    Relaxed: from its first local step on a split run no longer computes what one device computes.
    Call `pydist.optim.average_parameters(model, optimizer)` after each step. A backward pass
    outside of `no_sync` counts as a step.

    Args:
        every: number of steps between two averages of the groups' parameters.
        start: number of first steps with the gradients of all groups.

    Raises:
        UsageError: a setting is out of range.
    """

    every: int = 8
    start: int = 0
    name: ClassVar[str] = "post_local"
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_count("PostLocal(every=", self.every, 1)
        _check_count("PostLocal(start=", self.start, 0)


Gradients: TypeAlias = "Dense | Narrow | Torus | Hierarchical | PowerSGD | DGC | PostLocal"

NAMES = ("dense", "fp16", "bf16", "torus", "hierarchical", "powersgd", "dgc", "post_local")
"""The names of all forms."""


def settings_of(given: str | Gradients) -> Gradients:
    """Returns the settings of a form, given by name or as they are.

    Raises:
        UsageError: there is no such form.
    """
    if isinstance(given, Dense | Narrow | Torus | Hierarchical | PowerSGD | DGC | PostLocal):
        return given
    plain = {each.name: each for each in (Dense, Torus, Hierarchical, PowerSGD, DGC, PostLocal)}
    if isinstance(given, str) and given in NAMES:
        return plain[given]() if given in plain else Narrow(given)  # type: ignore[arg-type]
    raise UsageError(
        f"gradients={given!r}; possible are {', '.join(NAMES)}, and settings such as "
        "pydist.gradients.PowerSGD(rank=4)"
    )


def check_groups(settings: Gradients, groups: int) -> None:
    """Checks that a form suits a number of sample groups.

    Raises:
        UsageError: it does not.
    """
    if groups == 1 and isinstance(settings, DGC) and settings.momentum:
        raise UsageError(
            'gradients="dgc" with one sample group: nothing is compressed, and its momentum would '
            'be missing; possible are gradients="dense" with an optimizer that has momentum, more '
            "groups (data=2), and DGC(momentum=0)"
        )
    if groups == 1 and isinstance(settings, DGC) and settings.clip_norm is not None:
        raise UsageError(
            f"DGC(clip_norm={settings.clip_norm!r}) with one sample group: gradients are dense and "
            "not clipped; possible are torch.nn.utils.clip_grad_norm_, and more groups (data=2)"
        )


def check_form(settings: Gradients, mesh: Mesh, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Checks that a form suits a mesh and named parameters, before a model changes. Collective.

    Raises:
        UsageError: the ranks have no such rows.
        NotSupported: a parameter is complex, and the form is not the dense one.
    """
    if isinstance(settings, Torus):
        rows_of([range(mesh.size)], settings.row)
    for name, p in parameters:
        if p.requires_grad and p.is_complex() and not _is_dense(settings, mesh):
            raise NotSupported(
                f'gradients="{settings.name}" of the parameter {name!r}, of {p.dtype}: '
                'gradients="dense" is possible'
            )


def _is_dense(settings: Gradients, mesh: Mesh) -> bool:
    """Returns whether all ranks of a mesh average by the dense form. Collective."""
    if isinstance(settings, Hierarchical):
        return len(hosts_of(mesh.world)) in (1, mesh.size)
    if isinstance(settings, Torus):
        return mesh.size == 1
    return isinstance(settings, Dense) or mesh.data_size == 1


def make_form(
    settings: Gradients,
    mesh: Mesh,
    axes: tuple[str, ...],
    group: Transport,
    leaves: Sequence[Leaf],
    levels: tuple[Messages, Messages] | None = None,
) -> Form | None:
    """Makes the form of a lane. Collective over the mesh.

    Args:
        settings: of the form.
        mesh: the mesh.
        axes: those along which the ranks of the lane differ.
        group: these ranks.
        leaves: the parameters of the lane.
        levels: the groups of an earlier form of these settings and axes, for this one; by default
            new groups are made.

    Returns:
        The form; None for the dense one: as compressed ones are with one sample group, and the
        hierarchical one is on one host, or with one rank on each.
    """
    if isinstance(settings, Dense) or group.size == 1:
        return None
    if isinstance(settings, Torus):
        row = settings.row
        if group is not mesh.world and row is not None and group.size % row:
            row = None  # it describes all ranks, and fewer hold a slice
        return TorusForm(*(levels or _levels(*split_rows(group, rows_of(hosts_of(group), row)))))
    if isinstance(settings, Hierarchical):
        hosts = hosts_of(group)
        if len(hosts) in (1, group.size):
            return None
        return HierarchicalForm(*(levels or _levels(*split_rows(group, hosts))), group.size)
    return _compressed(settings, mesh, axes, leaves, levels)


def _compressed(
    settings: Narrow | PowerSGD | DGC | PostLocal,
    mesh: Mesh,
    axes: tuple[str, ...],
    leaves: Sequence[Leaf],
    levels: tuple[Messages, Messages] | None,
) -> Form | None:
    """Makes a form that sends less between sample groups, if there are several."""
    if mesh.data_size == 1:
        return None
    # Of their own: a rank without work starts its buckets after exchanges that others start later.
    inside = mesh.group(tuple(axis for axis in axes if axis != "data"))
    if levels is None:
        levels = _levels(inside.split(0, inside.rank), mesh.data.split(0, mesh.data.rank))
    within, between = levels
    if isinstance(settings, Narrow):
        return NarrowForm(settings.name, _DTYPES[settings.dtype], within, between)
    if isinstance(settings, PowerSGD):
        return LowRankForm(
            within, between, leaves, mesh.seed,
            rank=settings.rank, start=settings.start, least_saving=settings.least_saving,
        )  # fmt: skip
    if isinstance(settings, PostLocal):
        return LocalForm(within, between, every=settings.every, start=settings.start)
    warmup = [each for each in settings.densities if each > settings.density]
    return SparseForm(
        within, between, leaves, mesh.seed,
        densities=[*warmup, settings.density], warmup=settings.warmup if warmup else 0,
        momentum=settings.momentum, nesterov=settings.nesterov, masking=settings.masking,
        sample=settings.sample, clip_norm=settings.clip_norm,
    )  # fmt: skip


def _levels(within: Transport, between: Transport) -> tuple[Messages, Messages]:
    return messages_of(within), messages_of(between)


def _check_count(call: str, given: object, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise UsageError(f"{call}{given!r}): expected a count >= {least}")


def _check_number(call: str, given: object, most: float) -> None:
    if not _is_number(given) or not 0 < given <= most:  # type: ignore[operator]
        raise UsageError(f"{call}{given!r}): expected more than 0, at most {most:g}")


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)
