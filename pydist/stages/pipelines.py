"""`pipeline`, which trains an unmodified network in stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pydist.arguments import leaves, mapped
from pydist.batches import refuse_pickling
from pydist.comm.consensus import require_same, together
from pydist.errors import NotSupported, RankFailed, RankLost, UsageError
from pydist.exchange.left_weights import LeftWeights
from pydist.gradients.forms.settings import Gradients, settings_of
from pydist.parallel import broadcast_state, entry_hook_of, parallelize
from pydist.stages.messages import PassMark, StageStopped
from pydist.stages.micro_batch import NO_STAGE, MicroBatch
from pydist.stages.parts import BatchPart, batch_checksum, split_batch
from pydist.stages.pass_state import PassState
from pydist.stages.plan import StagePlan, make_plan, plan_of_json, plan_to_json
from pydist.stages.ranks import Stages, device_of
from pydist.stages.record import RecordedPass, record
from pydist.stages.schedule import Pass, Schedule
from pydist.stages.shapes import Shapes
from pydist.stages.state import StagedState
from pydist.stages.statistics import BatchStatistics
from pydist.stages.transfer import Transfers
from pydist.stages.uses import Uses
from pydist.structure import facts_of
from pydist.tensor import ShardedTensor, local_of
from pydist.tensor.stage import StageTensor

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
        balance: what the largest stage has least of: "time" of a forward and backward pass, or
            "memory" of the micro-batches that its schedule keeps at once. Both are divided by the
            ranks that a stage has for a sample. Stages that share a mesh count each by itself.
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
    given = {
        "micro_batches": micro_batches, "schedule": schedule, "skips": skips, "cuts": str(cuts),
        "recompute": recompute, "batch_norm": batch_norm, "group_weight": group_weight,
        "running_statistics": running_statistics, "gradients": str(form),
        "sharded_weights": sharded_weights,
    }  # fmt: skip
    require_same(stages.world, {**given, **facts_of(model, devices=not stages.world.mixes)})
    if any("_pydist_path" in module.__dict__ for module in model.modules()):
        raise UsageError(
            f"this {type(model).__name__}, or a part of it, is parallelized already: give "
            "pipeline() the network itself"
        )
    kept = 1 if recompute else micro_batches
    recorded, plan = _plan_together(model, stages, sample, orders, kept, balance, cuts)
    uses = plan.uses(recorded, model, orders)
    broadcast_state(model, stages.world)
    parallelize(model, stages.mesh, batch_norm, group_weight, sharded_weights, form)
    elsewhere = [p for n, p in model.named_parameters() if stages.index not in uses.meshes_of(n, p)]
    entry_hook_of(model).release(elsewhere)
    made = Pipeline(
        model, stages, plan, uses, micro_batches, orders, skips,
        recompute=recompute, collects=collects,
    )  # fmt: skip
    model.register_forward_pre_hook(_PipelineHook(made), with_kwargs=True)
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
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise UsageError(f"micro_batches={micro_batches!r}: expected a count >= 1")


def _plan_together(
    model: nn.Module,
    stages: Stages,
    sample: Any,
    orders: Schedule,
    kept: int,
    balance: str,
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
        cuts: as for `pipeline`.
    """
    with together(stages.world, "planning stages"):
        recorded = record(model, sample if isinstance(sample, tuple) else (sample,))
        ranks = [stages.meshes[mesh].sample_size for mesh in stages.order]
        alive = [orders.most_alive(stage, kept) for stage in range(stages.count)]
        mine = make_plan(recorded, ranks, balance, cuts, alive)
    require_same(stages.world, {"the network's forward pass on the sample": str(recorded)})
    message = stages.world.broadcast_bytes(json.dumps(plan_to_json(mine)).encode())
    return recorded, plan_of_json(json.loads(message))


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


class Pipeline:
    """Network that `pipeline` has divided into stages.

    Attributes:
        model: the network. Parameters have gradients on the ranks of the stages that use them; an
            optimizer of all parameters changes those, and skips the others.
        stages: the ranks of each stage.
        plan: where the stages begin; `print(pipeline.plan)` shows it as a table.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        plan: StagePlan,
        uses: Uses,
        micro_batches: int,
        schedule: Schedule,
        skips: str,
        *,
        recompute: bool = False,
        collects: bool = False,
    ) -> None:
        self.model, self.stages, self.plan = model, stages, plan
        self._micro_batches, self._schedule = micro_batches, schedule
        self._relays, self._recomputes = skips == "relay", recompute
        self._transfers, self._shapes = Transfers(stages), Shapes()
        self._state = StagedState(model, stages, uses)
        self._statistics = BatchStatistics(stages) if collects else None
        self.running: MicroBatch | None = None
        """The micro-batch whose forward pass runs."""
        self._own = [s for s, mesh in enumerate(stages.order) if mesh == stages.index]
        self._lends = recompute or len(self._own) > 1  # there are several passes over a micro-batch
        self._number = self._next = 0  # of micro-batches before this batch, and with it
        self._batch = 0  # checksum
        self._left_weights = stages.mesh.session.service(LeftWeights, LeftWeights)
        self._state_of = PassState(model, stages, lends=self._lends, collects=collects)
        self._made: list[MicroBatch] = []  # passes over the batch that may be owed gradients

    def step(
        self,
        inputs: Any,
        target: Any,
        criterion: Callable[..., Any],
        micro_batches: int | None = None,
    ) -> Tensor:
        """Runs the forward and backward passes of a batch, in micro-batches.

        Args:
            inputs: an argument of the network, or a tuple of them; tensors whose dim 0 counts the
                samples are cut into micro-batches. Inputs and target are the same on all ranks
                with one data index.
            target: the second argument of the criterion, cut in the same way.
            criterion: called as criterion(output, target); a mean over samples. A rank calls it in
                each pass over a micro-batch, so several times with several stages on a mesh or
                recompute; the state of a module is as if it were called once.
            micro_batches: their number, the same on all ranks; by default the pipeline's. A short
                batch needs fewer.

        Returns:
            The loss, the mean over the sample group's samples; a scalar without a graph, equal on
            all ranks with one data index.

        Raises:
            UsageError: there are fewer samples than micro-batches, ranks have different batches
                or make different calls, or a stage of the plan does not begin.
        """
        weighs = entry_hook_of(self.model).batches.weighs
        count, draws = micro_batches or self._micro_batches, self.model.training
        found = split_batch(inputs, target, count, self.stages.mesh, weighs=weighs, draws=draws)
        parts = list(found)
        passes = self._schedule.passes(len(parts))[self.stages.index]
        before = self._state.shared_gradients()
        with self._over((inputs, target), len(parts)):
            try:
                losses, factors = self._run(passes, parts, criterion)
            except StageStopped:
                # A criterion that raises for a micro-batch raises on all ranks; let it, here, too.
                for part in parts:
                    if not self._state_of.has_begun(part.number):
                        self._forward_of(part, NO_STAGE, criterion)
                raise
        self._state.compare_factors(factors)
        self._state.reduce_shared(before)
        if self._statistics is not None:
            self._statistics.update()
        return self._everywhere(losses, len(parts))

    def _run(
        self, passes: Sequence[Pass], parts: Sequence[BatchPart], criterion: Callable[..., Any]
    ) -> tuple[list[Tensor], list[float]]:
        """Runs passes of this rank's mesh.

        Returns:
            The parts of the loss, and the numbers by which the criterion scales it.
        """
        alive: dict[tuple[int, int], MicroBatch] = {}
        losses, factors = list[Tensor](), list[float]()
        mesh = self.stages.mesh
        for i, each in enumerate(passes):
            kind, stage, m = each
            with mesh.session.timers.measure("pass", each.label(mesh.data_index)):
                if kind == "forward":
                    running = alive[stage, m] = self._forward_of(parts[m], stage, criterion)
                    losses += [] if running.shown is None else [running.shown]
                    factors = factors or running.factors
                    if self._recomputes and passes[i + 1] != Pass("backward", stage, m):
                        running.forget()
                    continue
                if kind == "weight":
                    with entry_hook_of(self.model).no_sync():
                        alive.pop((stage, m)).finish_weights()
                    continue
                running = alive.pop((stage, m))
                if running.is_forgotten:
                    running = self._forward_of(parts[m], stage, criterion, repeats=running)
                # The last one of each stage reduces: that of another stage may need no gradient.
                is_last = all(later[:2] != (kind, stage) for later in passes[i + 1 :])
                is_last &= not self._schedule.splits
                with nullcontext() if is_last else entry_hook_of(self.model).no_sync():
                    running.backward()
                if self._schedule.splits:
                    alive[stage, m] = running
        if self._schedule.splits:
            entry_hook_of(self.model).reduce()
        return losses, factors

    def __call__(self, *inputs: Any) -> Any:
        """Runs a forward pass without gradients on the whole batch.

        Returns:
            The output on the mesh of the last stage, as of a parallelized model; `None` on others.
        """
        found = None
        with torch.no_grad(), self._over(inputs, 1):
            for stage in self._own:
                running = self._micro_batch(stage)
                with self._state_of.begun(running):
                    out = self._forward(running, inputs)
                for x in leaves((out,)):
                    if isinstance(x, StageTensor):
                        running.bring(x, self.stages.count - 1, "the output")
                if stage == self.stages.count - 1:
                    found = mapped(lambda x: x.value if isinstance(x, StageTensor) else x, out)
        return found

    def gather(self) -> None:
        """Makes the parameters and buffers of the network up to date on all ranks. Collective.

        Each is sent from a stage that uses it. Then `model.state_dict()` is that of the network.
        """
        self._state.gather()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state of an optimizer of the whole network, on all ranks. Collective.

        On each rank an optimizer has state for the parameters of the rank's stage. The state of
        each parameter is sent from a stage that uses it. `optimizer.load_state_dict` takes the
        result on one device, and on any number of stages.

        Args:
            optimizer: of parameters of the network, the same on all ranks.
        """
        return self._state.optimizer_state(optimizer)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their 2-norm over all stages is at most `max_norm`.

        Collective. As `torch.nn.utils.clip_grad_norm_` of the whole network.

        Returns:
            The norm before.
        """
        return self._state.clip_grad_norm_(max_norm)

    def unscale_(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Unscales an optimizer's gradients, before `scaler.step(optimizer)`. Collective.

        As `scaler.unscale_(optimizer)`. If a gradient of the optimizer has overflowed on any stage,
        all stages skip the step and back off the scale. The criterion must scale the loss.

        Args:
            scaler: the scaler, the same on all ranks.
            optimizer: of parameters of the network, the same on all ranks.
        """
        self._state.unscale_(scaler, optimizer)

    @contextmanager
    def _over(self, batch: Any, micro_batches: int) -> Iterator[None]:
        """Runs the passes over a batch in the `with` block."""
        self._number, self._next = self._next, self._next + micro_batches
        self._batch = batch_checksum(batch)
        self._state_of.begin_batch()
        self._made.clear()
        self._transfers.forget()
        if self._statistics is not None:
            self._statistics.forget()
        try:
            yield
        except BaseException as error:
            # A script may continue; what other stages have sent belongs to this batch alone.
            owed = [(each.number, t) for each in self._made for t in each.owed]
            self._transfers.drop(self._number + 1, self._next, owed)
            # Another mesh may be about to need passes that come after this one here.
            lost = isinstance(error, RankFailed | RankLost) and not isinstance(error, StageStopped)
            if isinstance(error, Exception) and not lost:
                self._transfers.stop(self._next, f"{type(error).__name__}: {error}")
            raise

    def _forward_of(
        self,
        part: BatchPart,
        stage: int,
        criterion: Callable[..., Any],
        *,
        repeats: MicroBatch | None = None,
    ) -> MicroBatch:
        """Runs the forward pass of a micro-batch through a stage, and its criterion."""
        running = self._micro_batch(stage, part, repeats)
        if self._schedule.splits:
            running.left = []
        with (
            self._state_of.begun(running, repeats, criterion),
            self._left_weights.leaving(running.left),
        ):
            out = self._forward(running, part.inputs)
            # The criterion may change its target in place.
            target = mapped(_copied, part.target) if self._lends else part.target
            loss = criterion(out, target)
        if not isinstance(loss, StageTensor) or loss.meta.numel() != 1:
            raise UsageError("criterion: expected a scalar computed from the output")
        loss.refuse_foreign_graph()
        if loss.value is not None:
            if not loss.value.requires_grad:
                raise UsageError("criterion: the loss has no gradient (detached, or no_grad)")
            running.loss = running.of_batch(loss.value * part.weight)
            running.shown = _detached(loss.value) * part.share
        return running

    def _forward(self, running: MicroBatch, inputs: tuple[Any, ...]) -> Any:
        self.running = running
        try:
            out = self.model(*inputs)
        finally:
            self.running = None
        running.end_of_network()
        if self._schedule.returns and running.updaters and running.statistics is None:
            possible = 'running_statistics="batch", gpipe and 1f1b'
            if not torch.is_grad_enabled():
                possible = "model.eval() before pipe(x)"
            raise NotSupported(
                "schedule='gems' of a network with running statistics (batch norm in training), "
                f"which two meshes would update; possible: {possible}"
            )
        return out

    def _micro_batch(
        self, stage: int, part: BatchPart | None = None, repeats: MicroBatch | None = None
    ) -> MicroBatch:
        """Returns a stage's pass over a part of a batch in training, or over a batch."""
        index = 0 if part is None else part.number
        mode = f"{self.model.training} {torch.is_grad_enabled()}"
        mark = PassMark(self._number + index + 1, self._batch, 0).after(mode)
        made = MicroBatch(
            self.stages, stage, self._schedule.placed(index), self.plan.starts, self._transfers,
            self._shapes, repeats, index=index, mark=mark, relays=self._relays, lends=self._lends,
            keeps=self._recomputes,
        )  # fmt: skip
        entry = entry_hook_of(self.model)
        made.wrapped = None if entry.statistics == "rank" else entry.of_batch
        if part is not None:
            made.statistics, made.of_groups = self._statistics, part.of_groups
        if part is not None and repeats is None:
            self._made = [*(each for each in self._made if each.owed), made]
        return made

    def _everywhere(self, losses: Sequence[Tensor], micro_batches: int) -> Tensor:
        """Returns the sum of the losses of all last stages, on all ranks."""
        stages, mine = self.stages, self.stages.mesh
        last = sorted({self._schedule.placed(m)[-1] for m in range(micro_batches)})
        totals = []
        for index in last:
            if index != stages.index:
                message = stages.receive_bytes(stages.meshes[index].rank(mine.data_index, 0))
                dtype, value = json.loads(message)
                made = {"dtype": getattr(torch, dtype), "device": device_of(mine)}
                totals.append(torch.tensor(value, **made))
                continue
            total = torch.stack(list(losses)).sum()
            totals.append(total)
            if mine.sample_index == 0:
                dtype = str(total.dtype).removeprefix("torch.")
                message = json.dumps([dtype, float(total)]).encode()
                for each in stages.meshes:
                    for rank in range(each.sample_size if each is not stages.own else 0):
                        stages.send_bytes(message, each.rank(mine.data_index, rank))
        return torch.stack(totals).sum() if len(totals) > 1 else totals[0]


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _detached(loss: Tensor) -> Tensor:
    value = local_of(loss) if isinstance(loss, ShardedTensor) else loss
    return value.detach().reshape(())
