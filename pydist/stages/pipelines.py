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
from pydist.errors import UsageError
from pydist.parallel import broadcast_state, entry_of, parallelize
from pydist.stages.micro_batch import MicroBatch
from pydist.stages.parts import Part, checksum_of, parts_of
from pydist.stages.plan import Plan, make_plan, plan_of_json, plan_to_json
from pydist.stages.ranks import Stages, device_of
from pydist.stages.record import copied_buffers, record
from pydist.stages.schedule import Pass, most_alive, schedule_of
from pydist.stages.shapes import Shapes
from pydist.stages.state import State
from pydist.stages.transfer import Mark, Transfers
from pydist.stages.uses import Uses
from pydist.structure import facts_of
from pydist.tensor import ShardedTensor, local_of
from pydist.tensor.stage import StageTensor

SKIPS = ("direct", "relay")


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
    group_weight: str = "samples",
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
        schedule: "gpipe" or "1f1b"; see `pydist.stages.schedule`.
        balance: what the largest stage has least of: "time" of a forward and backward pass, or
            "memory" of the micro-batches that its schedule keeps at once. Both are divided by the
            ranks that a stage has for a sample.
        cuts: paths of the modules at which the stages from the second on begin; overrides
            `balance`.
        skips: "direct" sends a tensor from the stage that computes it to those that use it;
            "relay" sends it through all stages between, for comparison.
        recompute: whether backward computes a stage's activations again, so that of the
            micro-batches in flight only what a stage has received is kept.
        batch_norm: as of `parallelize`, for each stage.
        group_weight: as of `parallelize`.

    Returns:
        The pipeline, with the plan as `plan`.

    Raises:
        UsageError: an argument is none of these, ranks have different models, or the network makes
            different calls in two passes.
        NotSupported: the network reads values in its forward pass.
    """
    if not isinstance(model, nn.Module) or not isinstance(stages, Stages):
        raise UsageError(
            f"pipeline({type(model).__name__}, {type(stages).__name__}); possible are a "
            "torch.nn.Module and stages, from pydist.init_stages()"
        )
    schedule_of(schedule)
    if skips not in SKIPS:
        raise UsageError(f"skips={skips!r}; possible are {', '.join(SKIPS)}")
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise UsageError(f"micro_batches={micro_batches!r}: expected a count >= 1")
    given = {
        "micro_batches": micro_batches, "schedule": schedule, "skips": skips, "cuts": str(cuts),
        "recompute": recompute, "batch_norm": batch_norm, "group_weight": group_weight,
    }  # fmt: skip
    require_same(stages.world, {**given, **facts_of(model)})
    if any("_pydist_path" in module.__dict__ for module in model.modules()):
        raise UsageError(
            f"this {type(model).__name__}, or a part of it, is parallelized already: give "
            "pipeline() the network itself"
        )
    arguments = sample if isinstance(sample, tuple) else (sample,)
    with together(stages.world, "planning stages"):
        recorded = record(model, arguments)
        weights = _weights(stages, schedule, micro_batches, balance, recompute)
        mine = make_plan(recorded, weights, balance, cuts)
    require_same(stages.world, {"the network's forward pass on the sample": str(recorded)})
    # Every rank has measured; all take the plan of rank 0.
    message = stages.world.broadcast_bytes(json.dumps(plan_to_json(mine)).encode())
    plan = plan_of_json(json.loads(message))
    uses = plan.uses(recorded, model)
    broadcast_state(model, stages.world)
    parallelize(model, stages.mesh, batch_norm, group_weight)
    elsewhere = [p for n, p in model.named_parameters() if stages.index not in uses.stages_of(n, p)]
    entry_of(model).release(elsewhere)
    made = Pipeline(model, stages, plan, uses, micro_batches, schedule, skips, recompute=recompute)
    model.register_forward_pre_hook(_Enter(made), with_kwargs=True)
    return made


def _weights(
    stages: Stages, schedule: str, micro_batches: int, balance: str, recompute: bool
) -> list[float]:
    """Returns what a unit of time or of memory costs each stage."""
    weights = [1.0 / stage.sample_size for stage in stages.all]
    if balance == "memory" and not recompute:
        make = schedule_of(schedule)
        for stage in range(stages.count):
            weights[stage] *= most_alive(make(stage, stages.count, micro_batches))
    return weights


class _Enter:
    """The hook at the network's entry; a copy of the network, such as an average, has none."""

    def __init__(self, made: Pipeline | None) -> None:
        self._made = made

    def __deepcopy__(self, memo: dict[int, Any]) -> _Enter:
        return _Enter(None)

    __reduce_ex__ = refuse_pickling

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        running = None if self._made is None else self._made.running
        return None if running is None else running.adopt((args, kwargs))


class Pipeline:
    """A network in stages. Made by `pipeline`.

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
        plan: Plan,
        uses: Uses,
        micro_batches: int,
        schedule: str,
        skips: str,
        *,
        recompute: bool = False,
    ) -> None:
        self.model, self.stages, self.plan = model, stages, plan
        self._micro_batches, self._schedule = micro_batches, schedule
        self._relays, self._recomputes = skips == "relay", recompute
        self._transfers, self._shapes = Transfers(stages), Shapes()
        self._state = State(model, stages, uses)
        self.running: MicroBatch | None = None
        """The micro-batch whose forward pass runs."""
        self._passes = 0  # forward, without repeated ones
        self._batch = 0  # checksum

    def step(self, inputs: Any, target: Any, criterion: Callable[..., Any]) -> Tensor:
        """Runs the forward and backward passes of a batch, in micro-batches.

        Args:
            inputs: an argument of the network, or a tuple of them; tensors whose dim 0 counts the
                samples are cut into micro-batches. Inputs and target are the same on all ranks
                with one data index.
            target: the second argument of the criterion, cut in the same way.
            criterion: called as criterion(output, target); a mean over samples.

        Returns:
            The loss, the mean over the sample group's samples; a scalar without a graph, equal on
            all ranks with one data index.

        Raises:
            UsageError: there are fewer samples than micro-batches, ranks have different batches
                or make different calls, or a stage of the plan does not begin.
        """
        weighs = entry_of(self.model).batches.weighs
        count, draws = self._micro_batches, self.model.training
        found = parts_of(inputs, target, count, self.stages.mesh, weighs=weighs, draws=draws)
        parts = list(found)
        self._batch = checksum_of((inputs, target))
        passes = schedule_of(self._schedule)(self.stages.index, self.stages.count, len(parts))
        before = self._state.shared_gradients()
        alive: dict[int, MicroBatch] = {}
        again: dict[int, dict[int, Tensor]] = {}  # buffers before the forward pass
        losses = []
        for i, (kind, m) in enumerate(passes):
            if kind == "forward":
                forgets = self._recomputes and passes[i + 1] != Pass("backward", m)
                if forgets:
                    again[m] = {id(b): b.clone() for b in self.model.buffers()}
                alive[m] = self._forward_of(parts[m], criterion, continues=m > 0)
                losses.append(alive[m].shown)
                if forgets:
                    alive[m].forget()
            else:
                running = alive.pop(m)
                if m in again:
                    with copied_buffers(self.model, again.pop(m)), _drawing_as(running):
                        running = self._forward_of(parts[m], criterion, repeats=running)
                is_last = all(each.kind == "forward" for each in passes[i + 1 :])
                with nullcontext() if is_last else entry_of(self.model).no_sync():
                    running.backward()
        self._state.reduce_shared(before)
        return self._everywhere([loss for loss in losses if loss is not None])

    def __call__(self, *inputs: Any) -> Any:
        """Runs a forward pass without gradients on the whole batch.

        Returns:
            The output on the last stage, as of a parallelized model; `None` on the others.
        """
        with torch.no_grad():
            self._batch = checksum_of(inputs)
            running = self._micro_batch()
            out = self._forward(running, inputs)
            for x in leaves((out,)):
                if isinstance(x, StageTensor):
                    running.bring(x, self.stages.count - 1, "the output")
        if not self.stages.is_last:
            return None
        return mapped(lambda x: x.value if isinstance(x, StageTensor) else x, out)

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

    def _forward_of(
        self,
        part: Part,
        criterion: Callable[..., Any],
        *,
        continues: bool = True,
        repeats: MicroBatch | None = None,
    ) -> MicroBatch:
        """Runs the forward pass of a micro-batch and its criterion."""
        running = self._micro_batch(repeats, part.number)
        running.drew_from = _generators(self.stages)
        entry_of(self.model).continues = continues
        try:
            out = self._forward(running, part.inputs)
        finally:
            entry_of(self.model).continues = False
        loss = criterion(out, part.target)
        if not isinstance(loss, StageTensor) or loss.meta.numel() != 1:
            raise UsageError("criterion: expected a scalar computed from the output")
        loss.refuse_foreign_graph()
        if loss.value is not None:
            if not loss.value.requires_grad:
                raise UsageError("criterion: the loss has no gradient (detached, or no_grad)")
            running.loss = loss.value * part.weight
            running.shown = _detached(loss.value) * part.share
        return running

    def _forward(self, running: MicroBatch, inputs: tuple[Any, ...]) -> Any:
        self.running = running
        try:
            out = self.model(*inputs)
        finally:
            self.running = None
        running.end_of_network()
        return out

    def _micro_batch(self, repeats: MicroBatch | None = None, index: int = 0) -> MicroBatch:
        self._passes += repeats is None
        mode = f"{self.model.training} {torch.is_grad_enabled()}"
        mark = Mark(self._passes, self._batch, 0).after(mode)
        return MicroBatch(
            self.stages, self.plan.starts, self._transfers, self._shapes, repeats,
            index=index, mark=mark, relays=self._relays,
        )  # fmt: skip

    def _everywhere(self, losses: Sequence[Tensor]) -> Tensor:
        """Returns the sum of the last stage's losses on all ranks."""
        mine, last = self.stages.mesh, self.stages.all[-1]
        if not self.stages.is_last:
            message = self.stages.receive_bytes(last.rank(mine.data_index, 0))
            dtype, value = json.loads(message)
            return torch.tensor(value, dtype=getattr(torch, dtype), device=device_of(mine))
        total = torch.stack(list(losses)).sum()
        if mine.sample_index == 0:
            dtype = str(total.dtype).removeprefix("torch.")
            message = json.dumps([dtype, float(total)]).encode()
            for stage in self.stages.all[:-1]:
                for index in range(stage.sample_size):
                    self.stages.send_bytes(message, stage.rank(mine.data_index, index))
        return total


def _generators(stages: Stages) -> list[Tensor]:
    """Returns the states of torch's generators from which a forward pass may draw."""
    on_device = device_of(stages.mesh).type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_device else [])]


@contextmanager
def _drawing_as(running: MicroBatch) -> Iterator[None]:
    """Lets torch's generators draw what they drew for a micro-batch, in the `with` block."""
    on_host, *on_device = running.drew_from
    with torch.random.fork_rng([torch.cuda.current_device()] if on_device else []):
        torch.set_rng_state(on_host)
        for state in on_device:
            torch.cuda.set_rng_state(state)
        yield


def _detached(loss: Tensor) -> Tensor:
    value = local_of(loss) if isinstance(loss, ShardedTensor) else loss
    return value.detach().reshape(())
