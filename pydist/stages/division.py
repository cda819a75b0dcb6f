"""`pipeline`, which divides an unmodified network into stages."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from pydist.batches import refuse_pickling
from pydist.comm.consensus import require_same, together
from pydist.entry_hook import broadcast_state, entry_hook_of
from pydist.errors import NotSupported, UsageError
from pydist.gradients.forms.settings import Gradients, settings_of
from pydist.parallel import parallelize
from pydist.stages.parts import check_count
from pydist.stages.pipelines import Pipeline
from pydist.stages.plan import StagePlan, make_plan, plan_of_json, plan_to_json
from pydist.stages.ranks import Stages
from pydist.stages.record import RecordedPass, record
from pydist.stages.schedule import Schedule
from pydist.structure import facts_of
from pydist.watchdog import MODULE_PATH

SKIPS = ("direct", "relay")
RUNNING_STATISTICS = ("micro_batch", "batch")


def pipeline(
    model: nn.Module,
    stages: Stages,
    sample: Any,
    *,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    balance: str = "time",
    state: float = 3.0,
    cuts: Sequence[str] | None = None,
    skips: str = "direct",
    recompute: bool = False,
    batch_norm: str = "global",
    running_statistics: str = "micro_batch",
    group_weight: str = "samples",
    sharded_weights: bool = False,
    gradients: str | Gradients = "dense",
) -> Pipeline:
    """Divides an unmodified network into stages, which run on different ranks.

    Every rank has the whole network and runs its forward pass; a call is computed by the ranks of
    the stage that it belongs to. So stages may begin at any call, also within a block, and every
    tensor is sent from the stage that computes it to those that use it. All ranks start from the
    parameters and buffers of rank 0. On its stage the network is parallelized, see `parallelize`:
    a stage may split samples and reduces gradients over its own ranks.

    Args:
        model: any `nn.Module` that makes the same calls on every rank, whatever the values.
        stages: the ranks of each stage, from `init_stages`.
        sample: an argument of the network, or a tuple of them, of a size at which every rank can
            run the whole network, with the gradients of one call at a time. Its calls are measured
            for the plan, without other ranks.
        micro_batches: number of parts of a batch.
        schedule: "gpipe", "1f1b", "gems" or "zero-bubble"; see `pydist.stages.schedule`.
        balance: what the largest mesh has least of: "time" of a forward and backward pass, or
            "memory" of a rank: of the micro-batches that its schedule keeps at once, and `state`.
            The ranks that a mesh has for a sample divide time and micro-batches. Both are summed
            over the stages of a mesh.
        state: bytes that stay from step to step for each byte of a stage's parameters, for
            `balance`: 3 for gradients and Adam's two moments, 2 for gradients and momentum.
        cuts: paths of the modules at which the stages from the second on begin; overrides
            `balance`.
        skips: "direct" sends a tensor from the stage that computes it to those that use it;
            "relay" sends it through all stages between, for comparison.
        recompute: whether backward computes a stage's activations again, so that of the
            micro-batches in flight only what a stage has received is kept.
        batch_norm: as of `parallelize`, for each stage.
        running_statistics: how those of batch norms change in a step: "micro_batch", by each
            micro-batch in sequence; or "batch", once, by the statistics of all micro-batches.
        group_weight: as of `parallelize`.
        sharded_weights: as of `parallelize`, on the stages with a channel axis.
        gradients: as of `parallelize`, for the ranks of each stage; a form without state.

    Returns:
        The pipeline, with the plan as `plan`.

    Raises:
        UsageError: an argument is none of these, ranks have different models, or the network makes
            different calls in two passes.
        NotSupported: the network reads values in its forward pass, or the form of gradients keeps
            state.
    """
    form = settings_of(gradients)
    _check_network(model, stages, form)
    orders = Schedule(schedule, stages.order)
    collects = running_statistics == "batch"
    _check_settings(stages, orders, micro_batches, skips, running_statistics, batch_norm)
    if not 0 <= state < math.inf:
        raise UsageError(f"state={state}: bytes for each byte of parameters, from 0 on")
    given = {
        "micro_batches": micro_batches, "schedule": schedule, "skips": skips, "cuts": str(cuts),
        "recompute": recompute, "batch_norm": batch_norm, "group_weight": group_weight,
        "running_statistics": running_statistics, "gradients": str(form),
        "sharded_weights": sharded_weights,
    }  # fmt: skip
    require_same(stages.world, {**given, **facts_of(model, devices=not stages.world.mixes)})
    if any(MODULE_PATH in module.__dict__ for module in model.modules()):
        raise UsageError(
            f"this {type(model).__name__}, or a part of it, is parallelized already: give "
            "pipeline() the network itself"
        )
    _refuse_shared(model, stages)
    kept = 1 if recompute else micro_batches
    recorded, plan = _plan_together(model, stages, sample, orders, kept, balance, state, cuts)
    uses = plan.uses(recorded, model, orders)
    broadcast_state(model, stages.world)
    parallelize(model, stages.mesh, batch_norm, group_weight, sharded_weights, form)
    elsewhere = [p for n, p in model.named_parameters() if stages.index not in uses.meshes_of(n)]
    entry_hook_of(model).release(elsewhere)
    routes = plan.routes(recorded, orders, relays=skips == "relay")
    made = Pipeline(
        model, stages, plan, uses, routes, micro_batches, orders, skips,
        recompute=recompute, collects=collects,
    )  # fmt: skip
    model.register_forward_pre_hook(_PipelineHook(made), with_kwargs=True)
    stages.networks.add(model)
    return made


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Returns the pipeline that `pipeline` has made of a network, or `None`."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _PipelineHook):
            return hook.made
    return None


def _check_network(model: nn.Module, stages: Stages, form: Gradients) -> None:
    if form.keeps:
        raise NotSupported(
            f'gradients="{form.name}" in stages: a mesh reduces gradients several times in a step, '
            'and the form counts steps; possible are "dense", "fp16", "bf16", "torus" and '
            '"hierarchical"'
        )
    if not isinstance(model, nn.Module) or not isinstance(stages, Stages):
        raise UsageError(
            f"pipeline({type(model).__name__}, {type(stages).__name__}); possible are a "
            "torch.nn.Module and stages, from pydist.init_stages()"
        )


def _refuse_shared(model: nn.Module, stages: Stages) -> None:
    """Refuses trained parameters of another network in the same stages. Collective.

    Neither network knows the meshes on which the other one trains them.
    """
    if len(stages.meshes) == 1:
        return
    shared = _shared(model, stages)
    if shared is not None:
        gc.collect()  # a network that a script has dropped refers to itself
        shared = _shared(model, stages)
    # One rank alone may keep a network.
    shared = next(filter(None, stages.world.all_gather_json(shared)), None)
    if shared is not None:
        raise UsageError(
            f"the parameter {shared} is also one of another network in these stages: each would "
            "train copies of its own; put both networks into one module, and that into pipeline()"
        )


def _shared(model: nn.Module, stages: Stages) -> str | None:
    """Returns the name of a trained parameter that another network in the stages has, too."""
    known = {id(p) for other in list(stages.networks) for p in other.parameters()}
    trained = (name for name, p in model.named_parameters() if p.requires_grad and id(p) in known)
    return next(trained, None)


def _check_settings(
    stages: Stages,
    orders: Schedule,
    micro_batches: int,
    skips: str,
    running_statistics: str,
    batch_norm: str,
) -> None:
    if orders.returns and len({(mesh.grid, str(mesh.shares)) for mesh in stages.meshes}) > 1:
        raise UsageError(
            "schedule='gems' needs stages on equal meshes, as each mesh runs two of them"
        )
    if skips not in SKIPS:
        raise UsageError(f"skips={skips!r}; possible are {', '.join(SKIPS)}")
    if running_statistics not in RUNNING_STATISTICS:
        raise UsageError(
            f"running_statistics={running_statistics!r}; possible are "
            f"{', '.join(RUNNING_STATISTICS)}"
        )
    if running_statistics == "batch" and batch_norm != "global":
        raise UsageError(
            f'running_statistics="batch" with batch_norm={batch_norm!r}: possible is "global", as '
            "they are those of all samples"
        )
    check_count(micro_batches)


def _plan_together(
    model: nn.Module,
    stages: Stages,
    sample: Any,
    orders: Schedule,
    kept: int,
    balance: str,
    state: float,
    cuts: Sequence[str] | None,
) -> tuple[RecordedPass, StagePlan]:
    """Records the network's calls on each rank; returns them, and the plan of rank 0. Collective.

    Args:
        model: the network.
        stages: the ranks of each stage.
        sample: as for `pipeline`.
        orders: the schedule.
        kept: micro-batches whose activations are kept.
        balance: as for `pipeline`.
        state: as for `pipeline`.
        cuts: as for `pipeline`.
    """
    with together(stages.world, "planning stages"):
        recorded = record(model, sample if isinstance(sample, tuple) else (sample,))
        ranks = [stages.meshes[mesh].sample_size for mesh in stages.order]
        alive = [orders.most_alive(stage, kept) for stage in range(stages.count)]
        mine = make_plan(recorded, ranks, balance, cuts, alive, stages.order, state)
    require_same(stages.world, {"the network's forward pass on the sample": str(recorded)})
    return recorded, plan_of_json(stages.world.broadcast_json(plan_to_json(mine)))


class _PipelineHook:
    """The hook at the network's entry; a copy of the network, such as an average, has none."""

    def __init__(self, made: Pipeline | None) -> None:
        self.made = made

    def __deepcopy__(self, memo: dict[int, Any]) -> _PipelineHook:
        return _PipelineHook(None)

    __reduce_ex__ = refuse_pickling

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        running = None if self.made is None else self.made.running
        if running is None:
            return None
        return running.adopt((args, kwargs), entry_hook_of(module).batches.running)
