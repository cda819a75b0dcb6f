"""Network in stages: the passes of its batches, and what its stages do together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from pydist.arguments import leaves, mapped
from pydist.entry_hook import dims_of_network, entry_hook_of
from pydist.errors import NotSupported, RankFailed, RankLost, UsageError
from pydist.exchange.left_weights import LeftWeights
from pydist.exchange.own_slice import own_slice
from pydist.group_sizes import batches_entering
from pydist.stages.gradient_watch import GradientWatch
from pydist.stages.gradients import StagedGradients
from pydist.stages.messages import PassMark, Route, StageStopped
from pydist.stages.micro_batch import NO_STAGE, MicroBatch
from pydist.stages.parameters import StagedParameters, module_of
from pydist.stages.parts import BatchPart, batch_checksum, check_count, is_count, split_batch
from pydist.stages.pass_state import PassState
from pydist.stages.plan import StagePlan
from pydist.stages.ranks import Stages, device_of
from pydist.stages.schedule import Pass, Schedule
from pydist.stages.shapes import Shapes
from pydist.stages.sources import Followed, Sources, ValueRead, names_of, version_of
from pydist.stages.state import StagedState
from pydist.stages.statistics import BatchStatistics
from pydist.stages.transfers import Transfers
from pydist.stages.uses import Uses
from pydist.tensor import ShardedTensor, local_of
from pydist.tensor.stage import StageTensor


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
        routes: Iterable[Route],
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
        self._dims = dims_of_network(model)
        self._transfers, self._shapes = Transfers(stages, self._dims, routes), Shapes()
        self._uses = uses
        self._parameters = StagedParameters(model)
        ends = schedule.meshes(stages.count - 1)
        self._gradients = StagedGradients(model, stages, uses, self._parameters, ends)
        self._watch = GradientWatch(model, self._parameters, stages)
        self._state = StagedState(model, stages, self._gradients.owner, self._parameters)
        self._statistics = BatchStatistics(stages) if collects else None
        self.running: MicroBatch | None = None
        """The micro-batch whose forward pass runs."""
        self._own = [s for s, mesh in enumerate(stages.order) if mesh == stages.index]
        self._lends = recompute or len(self._own) > 1  # there are several passes over a micro-batch
        self._number = self._next = 0  # of the stages' micro-batches before this batch, and with it
        self._batch = 0  # checksum
        self._left_weights = stages.mesh.session.service(LeftWeights, LeftWeights)
        self._state_of = PassState(model, stages, lends=self._lends, collects=collects)
        self._made: list[MicroBatch] = []  # passes over the batch that may be owed gradients
        self._named = names_of(model)  # in the batch
        self._kept: list[Followed] = []  # what the network keeps of its passes
        self._gathered: list[int] = []  # versions of the weights then

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
                samples are cut into micro-batches. It is that of the first tensor that is sharded
                or has the dims of the network's batches; one with an extent of 1, as of an atlas,
                counts only if all have it. Inputs and target are the same on all ranks with one
                data index.
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
            UsageError: the number of micro-batches is no count >= 1, gradients are off, there are
                fewer samples than micro-batches, or ranks have different batches or make different
                calls.
            NotSupported: inputs that require a gradient are sharded, or results of other calls; or
                gradients were accumulated under `no_sync`, or in a step that raised.
        """
        entry = entry_hook_of(self.model)
        count = self._micro_batches if micro_batches is None else micro_batches
        self._parameters.criterion = module_of(criterion)
        begun = count if is_count(count) else self._micro_batches
        with self._watch.within_step(self._gradients.spoil):
            with self._over((inputs, target), begun, is_step=True):
                self._check_step(count)
                trained = self._gradients.inputs = self._trained_inputs((inputs, target))
                before = self._gradients.of_shared()
                found = split_batch(
                    inputs, target, count, self.stages.mesh, entry.dims, 2 + self._dims,
                    weighs=entry.batches.weighs,
                )  # fmt: skip
                parts = list(found)
                passes = self._schedule.passes(count)[self.stages.index]
                try:
                    with batches_entering():  # each micro-batch, which concerns no closure
                        losses, factors, reads = self._run(passes, parts, criterion)
                except StageStopped:
                    # A criterion that raises for a micro-batch raises on all ranks: here as well.
                    for part in parts:
                        if not self._state_of.has_begun(part.number):
                            self._forward_of(part, NO_STAGE, criterion)
                    raise
                self._transfers.end(self._next)
                self._transfers.await_ends(self._next)
            given = f"{self._parameters.of_criterion()} and {len(trained)} inputs with a gradient"
            self._gradients.compare_values(factors, reads, given)
            self._gradients.reduce_shared(before)
            self._gradients.reduce_inputs()
        self._watch.note()
        if self._statistics is not None:
            self._statistics.update()
        return self._everywhere(losses, len(parts))

    def _check_step(self, micro_batches: int) -> None:
        """Checks what a step needs before its first pass.

        Raises:
            UsageError: the number of micro-batches is no count, or gradients are off.
            NotSupported: gradients accumulate under `no_sync`, or a step that raised has left some.
        """
        check_count(micro_batches)
        if not torch.is_grad_enabled():
            raise UsageError(
                "a step without gradients (torch.no_grad): call the pipeline for its output"
            )
        if entry_hook_of(self.model).accumulates:
            raise NotSupported(
                "a step of stages under no_sync: each step reduces its gradients, and adds to "
                "those that are there"
            )
        self._watch.refuse_partial(p for _, p in self._parameters.named())

    def _run(
        self, passes: Sequence[Pass], parts: Sequence[BatchPart], criterion: Callable[..., Any]
    ) -> tuple[list[Tensor], list[float], list[ValueRead]]:
        """Runs passes of this rank's mesh.

        Returns:
            The parts of the loss, the numbers by which the criterion scales it, and values of
            weights that the network reads.
        """
        alive: dict[tuple[int, int], MicroBatch] = {}
        reads: dict[int, list[ValueRead]] = {}  # of each micro-batch's first pass
        losses, factors = list[Tensor](), list[float]()
        mesh = self.stages.mesh
        for i, each in enumerate(passes):
            kind, stage, m = each
            with mesh.session.timers.measure("pass", each.label(mesh.data_index)):
                if kind == "forward":
                    running = alive[stage, m] = self._forward_of(parts[m], stage, criterion)
                    losses += [] if running.shown is None else [running.shown]
                    factors = factors or running.factors
                    reads.setdefault(m, running.reads)
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
        return losses, factors, [each for m in sorted(reads) for each in reads[m]]

    def _trained_inputs(self, batch: Any) -> list[tuple[Tensor, Tensor | None]]:
        """Returns the inputs that require a gradient, each once, with the one that they have."""
        if len(self.stages.meshes) == 1:
            return []
        own = {id(p) for _, p in self._parameters.named()}
        given = {id(x): x for x in leaves((batch,)) if isinstance(x, Tensor) and id(x) not in own}
        found = [x for x in given.values() if x.requires_grad]
        if any(isinstance(x, ShardedTensor) or not x.is_leaf for x in found):
            raise NotSupported(
                "a step with inputs that require a gradient and are sharded, or were computed by "
                "other calls, whose backward would run on each mesh for its own stages: give plain "
                "leaves, or x.detach()"
            )
        return [(x, None if x.grad is None else x.grad.clone()) for x in found]

    def __call__(self, *inputs: Any) -> Any:
        """Runs a forward pass without gradients on the whole batch.

        Returns:
            The output on the mesh of the last stage, as of a parallelized model; `None` on others.
        """
        found = None
        if self._versions() != self._gathered:
            self._uses.is_gathered = False
        with torch.no_grad(), self._over(inputs, 1, is_step=False):
            for stage in self._own:
                running = self._micro_batch(stage)
                with self._state_of.begun(running), self._sources(running):
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
        So are parameters of the latest step's criterion, if it is a module.
        """
        self._state.gather()
        self._uses.is_gathered = True
        self._gathered = self._versions()

    def _versions(self) -> list[int]:
        return [version_of(own_slice(p)) for p in self.model.parameters()]

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the state of an optimizer of the whole network, on all ranks. Collective.

        On each rank an optimizer has state for the parameters of the rank's stage. The state of
        each parameter is sent from a stage that uses it. `optimizer.load_state_dict` takes the
        result on one device, and on any number of stages.

        Args:
            optimizer: of parameters of the network and of the latest step's criterion, if that is a
                module; the same on all ranks.
        """
        return self._state.optimizer_state(optimizer)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their 2-norm over all stages is at most `max_norm`.

        Collective. As `torch.nn.utils.clip_grad_norm_` of the whole network.

        Returns:
            The norm before.
        """
        norm = self._gradients.clip_norm(max_norm)
        self._watch.note()
        return norm

    def unscale_(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Unscales an optimizer's gradients, before `scaler.step(optimizer)`. Collective.

        As `scaler.unscale_(optimizer)`. If a gradient of the optimizer has overflowed on any stage,
        all stages skip the step and back off the scale. The criterion must scale the loss.

        Args:
            scaler: the scaler, the same on all ranks.
            optimizer: of parameters of the network, the same on all ranks.
        """
        self._gradients.unscale(scaler, optimizer)
        self._watch.note()

    @contextmanager
    def _over(self, batch: Any, micro_batches: int, *, is_step: bool) -> Iterator[None]:
        """Runs the passes over a batch in the `with` block, of a step or an evaluation."""
        self._number = self.stages.passes
        self._next = self.stages.passes = self._number + micro_batches
        self._batch = batch_checksum(batch)
        self._state_of.begin_batch()
        self._made.clear()
        self._named = names_of(self.model, self._parameters)
        self._transfers.forget()
        if self._statistics is not None:
            self._statistics.forget()
        completed = False
        try:
            yield
            if torch.is_grad_enabled():
                self._transfers.has_seen_all()
            completed = True
        except BaseException as error:
            # A script may continue; what other stages have sent belongs to this batch alone.
            owed = [(each.number, t) for each in self._made for t in each.boundary.owed]
            self._transfers.drop(self._number + 1, self._next, owed)
            # Another mesh may be about to need passes that come after this one here.
            lost = isinstance(error, RankFailed | RankLost) and not isinstance(error, StageStopped)
            if isinstance(error, Exception) and not lost:
                reason = f"{type(error).__name__}: {error}"
                self._transfers.stop(self._next, reason)
                if is_step:
                    self._transfers.end(self._next, reason)
            raise
        finally:
            self._uses.end_batch(completed=completed)

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
            self._sources(running),
        ):
            dims = entry_hook_of(self.model).dims
            out = self._forward(running, part.entered(self.stages.mesh, dims))
            # The criterion may change its target in place.
            target = mapped(_copied, part.target) if self._lends else part.target
            loss = criterion(out, target)
        self._refuse_two_updaters(running)
        if not isinstance(loss, StageTensor) or loss.meta.numel() != 1:
            raise UsageError("criterion: expected a scalar computed from the output")
        loss.refuse_foreign_graph()
        if loss.value is not None:
            if not loss.value.requires_grad:
                raise UsageError("criterion: the loss has no gradient (detached, or no_grad)")
            running.loss = running.of_batch(loss.value * part.weight)
            running.shown = _detached(loss.value) * part.share
        return running

    @contextmanager
    def _sources(self, running: MicroBatch) -> Iterator[None]:
        """Follows the network's plain tensors to its weights in the `with` block."""
        # The buffers of a further pass over a micro-batch are copies.
        named = names_of(self.model, self._parameters) if self._lends else self._named
        sources = running.sources = Sources(named, self._kept, running.note_read)
        try:
            with sources:
                yield
            self._uses.note_written(sources.written)
        finally:
            running.sources = None
            self._kept = sources.kept()

    def _forward(self, running: MicroBatch, inputs: tuple[Any, ...]) -> Any:
        self.running = running
        try:
            out = self.model(*inputs)
        finally:
            self.running = None
        running.end_of_network()
        self._refuse_two_updaters(running)
        return out

    def _refuse_two_updaters(self, running: MicroBatch) -> None:
        """Refuses running statistics that two meshes would update, of a network or a criterion."""
        if self._schedule.returns and running.updaters and running.statistics is None:
            possible = 'running_statistics="batch", gpipe and 1f1b'
            if not torch.is_grad_enabled():
                possible = "model.eval() before pipe(x)"
            raise NotSupported(
                "schedule='gems' of a network with running statistics (batch norm in training), "
                f"which two meshes would update; possible: {possible}"
            )

    def _micro_batch(
        self, stage: int, part: BatchPart | None = None, repeats: MicroBatch | None = None
    ) -> MicroBatch:
        """Returns a stage's pass over a part of a batch in training, or over a batch."""
        index = 0 if part is None else part.number
        mode = f"{self.model.training} {torch.is_grad_enabled()}"
        if part is None:
            # A rank sees only its own changes of weights. Meshes must agree on it, as it decides
            # what each computes.
            mode += f" {self._uses.is_gathered}"
        mark = PassMark(self._number + index + 1, self._batch, 0).after(mode)
        made = MicroBatch(
            self.stages, stage, self._schedule.placed(index), self.plan.starts, self._uses,
            self._transfers, self._shapes, repeats, index=index, mark=mark,
            relays=self._relays, lends=self._lends, keeps=self._recomputes,
        )  # fmt: skip
        entry = entry_hook_of(self.model)
        made.wrapped = None if entry.statistics == "rank" else entry.of_batch
        made.begun = self._state_of.forwards, self._state_of.batches
        if part is not None:
            made.statistics, made.of_groups = self._statistics, part.of_groups
            made.samples, made.is_shared = part.samples, self._schedule.returns
        if part is not None and repeats is None:
            self._made = [*(each for each in self._made if each.boundary.owed), made]
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
