"""`check`: compares a network partitioned over rank threads with the unpartitioned network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pydist.check.compare import NOISE, Differences, RankRun, WholeRun
from pydist.check.report import Report
from pydist.comm import Transport, run_local
from pydist.errors import UsageError
from pydist.mesh import Mesh, counts_along
from pydist.parallel import obstacle, refuse_kinds
from pydist.stages import Stages

_FLOORS = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Smallest bounds."""
_UNSTEADY = {torch.float64: NOISE, torch.float32: 0.1}
"""If a network's output varies by more on one device, the network is random or chaotic."""
_TIMES = 4.0
"""Allowed difference of a partitioned run, as a multiple of one device's difference from float64
(or from itself, with noise in the last bit)."""

_MOST_RUNS = 16
"""Number of runs on one device, with different noise, before a difference counts as a failure."""
_ROUNDED = 100.0
"""Multiple of the floor above which the network's own casts have affected a tensor."""

_MOST_RANKS = 1024
"""Most ranks that run as threads of one process."""

_Dropout = nn.modules.dropout._DropoutNd


def check(
    factory: Callable[[], nn.Module],
    sample: Sequence[int],
    spatial: Sequence[int] = (2, 1, 1),
    *,
    stages: int = 1,
    micro_batches: int = 1,
    batch: int | None = None,
    dtype: torch.dtype = torch.float64,
    train: bool = True,
    tolerance: float | None = None,
    seed: int = 0,
    timeout: float = 3600.0,
    **axes: int,
) -> Report:
    """Compares forward and backward of a network partitioned and unpartitioned, by layer.

    Ranks are threads of this process: no launcher is needed. Every activation is kept once in
    float64, so the sample should be as small as the network allows.

    Args:
        factory: creates the network.
        sample: shape of one sample: channels, then one to three spatial dims.
        spatial: number of parts along each of the sample's spatial dims (depth, height, width).
        stages: number of stages, each on ranks of its own; see `pydist.stages`.
        micro_batches: number of parts of the batch, which run in sequence on one device.
        batch: number of samples; by default 2 in each micro-batch.
        dtype: torch.float64 or torch.float32; in float32 the partitioned run may differ four times
            as much from float64 as the unpartitioned one.
        train: whether to use training mode, with dropout off, or evaluation mode.
        tolerance: largest difference, relative to the largest value of the tensor; the default is
            max(1e-12, 4 × the effect of noise in the last bit) in float64, as above in float32.
        seed: seed of the sample.
        timeout: time limit in seconds for ranks that wait for each other.
        **axes: numbers of parts along `pydist.grid.OTHER_AXES`: ``channel=2`` divides the layers'
            channels.

    Returns:
        The calls and the differences of all layers; `report.ok` is the verdict.

    Raises:
        UsageError: sample, partition, dtype or tolerance are invalid, or the network can't be
            compared.
        NotSupported: a part of the network is compiled, or reduces gradients itself.
        PydistError: a rank failed.
    """
    batch = 2 * micro_batches if batch is None else batch
    ranks = _check_arguments(sample, spatial, axes, batch, dtype)
    _check_stages(stages, micro_batches, batch, ranks)
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed={seed}: a number of 64 bits")
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"tolerance={tolerance}: 0 or more")
    made = factory()
    _check_network(made)
    model = copy.deepcopy(made).to(dtype).train(train)
    off = [path for path, m in model.named_modules() if isinstance(m, _Dropout) and m.p > 0]
    for path in off:
        model.get_submodule(path).eval()
    x = torch.randn(batch, *sample, generator=torch.Generator().manual_seed(seed)).to(dtype)
    dims = len(sample) - 1
    spatial = (*[1] * (3 - dims), *spatial, *[1] * (dims - len(spatial)))
    whole = WholeRun(model, x, micro_batches)
    scale = _own_differences(whole, model, x, range(2))

    if stages == 1 and micro_batches == 1:
        mesh = partial(Mesh, data=1, spatial=spatial, axes=axes)

        def rank(transport: Transport) -> RankRun:
            return whole.split_differences(model, x, mesh(transport))
    else:
        meshes = [{"spatial": spatial, **axes}] * stages

        def rank(transport: Transport) -> RankRun:
            return whole.staged_differences(model, x, Stages(transport, meshes))

    found, runs = Differences(), run_local(rank, stages * ranks, timeout=timeout)
    for run in runs:
        found.join(run.differences)
    found.gradients.update(whole.without_gradient(found))
    plan = runs[-1].plan
    kinds = {path: type(m).__name__ for path, m in model.named_modules()}
    report = Report(
        sample=tuple(sample), spatial=spatial, axes=axes, batch=batch, dtype=dtype,
        found=found, bounds=_bounds(found, scale, whole, dtype, tolerance),
        calls=[] if plan else [run.calls for run in runs], plan=plan,
        stages=stages, micro_batches=micro_batches,
        kinds=kinds, dropout_off=off if train else [],
        casts=sorted(map(str, whole.casts)), noise=_noise(whole),
        unsteady=tolerance is None
        and scale.outputs.get("", 0.0) > max(_UNSTEADY[dtype], _cast_error(whole)),
    )  # fmt: skip
    for number in range(2, _MOST_RUNS):
        if tolerance is not None or not report.failures:
            break
        # A single run underestimates the noise of a single number, or of a ReLU with an input near
        # zero; more runs do not hide real errors.
        scale.join(_own_differences(whole, model, x, (number,)))
        report.bounds = _bounds(found, scale, whole, dtype, tolerance)
    return report


def _own_differences(
    whole: WholeRun, model: nn.Module, x: Tensor, numbers: Iterable[int]
) -> Differences:
    """Computes one device's differences from the reference: plain (0) or with last-bit noise."""
    found = Differences()
    for number in numbers:
        try:
            found.join(whole.differences(*(_jittered(model, x, number) if number else (model, x))))
        except RuntimeError as error:
            if not whole.casts:
                raise
            casts = ", ".join(sorted(map(str, whole.casts)))
            said = str(error).splitlines()[0]
            raise UsageError(
                f"the network casts to {casts} by itself, and does not run in {x.dtype}: {said}; "
                f"check it in {'float32' if x.dtype == torch.float64 else 'another dtype'}"
            ) from error
    return found


def _cast_error(whole: WholeRun) -> float:
    """Returns the error of values that the network itself rounds to a narrower type."""
    return max((8 * torch.finfo(narrow).eps for narrow in whole.casts), default=0.0)


def _noise(whole: WholeRun) -> float:
    """Returns the bound above which a tensor is only noise."""
    return max(NOISE, _TIMES * _cast_error(whole))


def _check_arguments(
    sample: Sequence[int],
    spatial: Sequence[int],
    axes: Mapping[str, int],
    batch: int,
    dtype: torch.dtype,
) -> int:
    """Checks arguments of `check`; returns the number of ranks that hold a sample."""
    if not 2 <= len(sample) <= 4 or any(not 1 <= n < 1 << 31 for n in (*sample, batch)):
        raise UsageError(
            f"sample={tuple(sample)}, batch={batch}: expected channels and one to three extents, "
            "all at least 1 and below 2**31"
        )
    if not 1 <= len(spatial) < len(sample) or any(n < 1 for n in spatial):
        raise UsageError(
            f"spatial={tuple(spatial)}: expected at most {len(sample) - 1} counts of at least 1, "
            "one for each spatial dim of the sample"
        )
    counts = counts_along(axes)
    ranks = math.prod((*counts.values(), *spatial))
    if ranks > _MOST_RANKS:
        others = "".join(f", {axis}={count}" for axis, count in counts.items())
        raise UsageError(
            f"spatial={tuple(spatial)}{others}: {ranks} ranks; at most {_MOST_RANKS} run as "
            "threads of one process"
        )
    if dtype not in _FLOORS:
        raise UsageError(f"dtype {dtype}: possible are torch.float64 and torch.float32")
    return ranks


def _check_stages(stages: int, micro_batches: int, batch: int, ranks: int) -> None:
    if stages < 1 or not 1 <= micro_batches <= batch:
        raise UsageError(
            f"stages={stages}, micro_batches={micro_batches}: expected at least 1, and at most as "
            f"many micro-batches as samples ({batch})"
        )
    if stages * ranks > _MOST_RANKS:
        raise UsageError(
            f"{stages} stages of {ranks} ranks; at most {_MOST_RANKS} run as threads of one process"
        )


def _check_network(model: nn.Module) -> None:
    refuse_kinds(model)
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "the network's parameters have no shape yet (lazy modules): call it once, on a plain"
            " tensor, where it is made"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        why = obstacle(tensor)
        if why is None and tensor.is_complex():
            why = f"holds {tensor.dtype}, which the check does not round; real ones are possible"
        if why is not None:
            raise UsageError(f"{name!r} of this {type(model).__name__} {why}")


def _jittered(model: nn.Module, x: Tensor, seed: int) -> tuple[nn.Module, Tensor]:
    """Returns network and sample with noise of one unit in the last place."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)

    def jitter(t: Tensor) -> Tensor:
        sign = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
        return t * (1 + torch.finfo(t.dtype).eps * sign.to(t.dtype))

    with torch.no_grad():
        for p in noisy.parameters():
            p.copy_(jitter(p))
        return noisy, jitter(x)


def _bounds(
    found: Differences,
    scale: Differences,
    whole: WholeRun,
    dtype: torch.dtype,
    tolerance: float | None,
) -> Differences:
    floor = _FLOORS[dtype]
    cast = max(floor, _cast_error(whole))

    def bound(
        names: dict[str, float], noise: dict[str, float], own: dict[str, float], largest: float
    ) -> dict[str, float]:
        if tolerance is not None:
            return dict.fromkeys(names, tolerance)
        limits = {}
        for name in names:
            seen = noise.get(name, 0.0)
            lowest = cast if seen > _ROUNDED * floor else floor
            limits[name] = max(lowest, _TIMES * seen)
            size = own.get(name, 0.0)
            if limits[name] > _noise(whole) or size <= _FLOORS[torch.float64] * largest:
                # A tensor that cancels to zero consists of rounding errors of a sum of terms as
                # large as the other tensors. So its bound is relative to those, not to itself.
                limits[name] = max(limits[name], lowest * largest / (size or 1.0))
        return limits

    own, value = whole.scales, whole.largest_value
    gradient = max(own.gradients.values(), default=0.0)
    return Differences(
        bound(found.outputs, scale.outputs, own.outputs, value),
        bound(found.gradients, scale.gradients, own.gradients, gradient),
        bound(found.buffers, scale.buffers, own.buffers, value),
    )
