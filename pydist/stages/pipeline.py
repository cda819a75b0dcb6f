"""`pipeline`, which trains an unmodified network in stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pydist.arguments import leaves, mapped
from pydist.comm.consensus import require_same, together
from pydist.errors import UsageError
from pydist.parallel import broadcast_state, parallelize
from pydist.stages.micro_batch import MicroBatch
from pydist.stages.plan import Plan, make_plan, plan_of_json, plan_to_json, record
from pydist.stages.ranks import Stages, device_of
from pydist.stages.schedule import schedule_of
from pydist.stages.transfer import Transfers
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
            run the whole network without gradients. Its calls are measured for the plan.
        micro_batches: number of parts of a batch.
        schedule: "gpipe" or "1f1b"; see `pydist.stages.schedule`.
        balance: what the largest stage has least of, "time" or "memory".
        cuts: paths of the modules at which the stages from the second on begin; overrides
            `balance`.
        skips: "direct" sends a tensor from the stage that computes it to those that use it;
            "relay" sends it through all stages between, for comparison.
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
    given = {"micro_batches": micro_batches, "schedule": schedule, "skips": skips}
    require_same(stages.world, {**given, "cuts": str(cuts), **facts_of(model)})
    arguments = sample if isinstance(sample, tuple) else (sample,)
    with together(stages.world, "planning stages"):
        mine = make_plan(record(model, arguments), stages.count, balance, cuts)
    # Every rank has measured; all take the plan of rank 0.
    plan = json.loads(stages.world.broadcast_bytes(json.dumps(plan_to_json(mine)).encode()))
    broadcast_state(model, stages.world)
    parallelize(model, stages.mesh, batch_norm, group_weight)
    made = Pipeline(model, stages, plan_of_json(plan), micro_batches, schedule, skips)
    model.register_forward_pre_hook(made.enter, with_kwargs=True)
    return made


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
        micro_batches: int,
        schedule: str,
        skips: str,
    ) -> None:
        self.model, self.stages, self.plan = model, stages, plan
        self._micro_batches, self._schedule = micro_batches, schedule
        self._relays = skips == "relay"
        self._transfers = Transfers(stages)
        self._uses = Uses(model)
        self._running: MicroBatch | None = None

    def step(self, inputs: Any, target: Any, criterion: Callable[..., Any]) -> Tensor:
        """Runs the forward and backward passes of a batch, in micro-batches.

        Args:
            inputs: an argument of the network, or a tuple of them; tensors whose dim 0 counts the
                samples are cut into micro-batches. The same on all ranks with one data index: only
                the first stage reads the values of most networks.
            target: the second argument of the criterion; read by the last stage, cut alike.
            criterion: called as criterion(output, target); a mean over samples.

        Returns:
            The loss, the mean over the sample group's samples; a scalar without a graph, equal on
            all ranks with one data index.

        Raises:
            UsageError: there are fewer samples than micro-batches, or the network's calls differ
                from those of the plan.
        """
        parts = list(self._parts(inputs, target))
        passes = schedule_of(self._schedule)(self.stages.index, self.stages.count, len(parts))
        tied = (p for p, _ in self._tied())
        before = {id(p): p.grad.detach().clone() for p in tied if p.grad is not None}
        alive: dict[int, tuple[MicroBatch, Any]] = {}
        total, dtype = None, torch.get_default_dtype()
        last = max(i for i, each in enumerate(passes) if each.kind == "backward")
        for i, (kind, m) in enumerate(passes):
            if kind == "forward":
                weight, arguments, wanted = parts[m]
                running = self._micro_batch()
                loss = self._forward(running, arguments, lambda out: criterion(out, wanted))
                if not isinstance(loss, StageTensor) or loss.meta.numel() != 1:
                    raise UsageError("criterion: expected a scalar computed from the output")
                dtype, own = loss.meta.dtype, None if loss.value is None else loss.value * weight
                alive[m] = running, own
                if own is not None:
                    value = local_of(own) if isinstance(own, ShardedTensor) else own
                    total = value.detach() + (0 if total is None else total)
            else:
                running, own = alive.pop(m)
                with nullcontext() if i == last else self.model.no_sync():  # type: ignore[operator]
                    running.backward(own)
        self._reduce_tied(before)
        return self._everywhere(total, dtype)

    def __call__(self, *inputs: Any) -> Any:
        """Runs a forward pass without gradients on the whole batch.

        Returns:
            The output on the last stage, as of a parallelized model; `None` on the others.
        """
        with torch.no_grad():
            running = self._micro_batch()
            out = self._forward(running, inputs, lambda out: out)
        if not self.stages.is_last:
            return None
        return mapped(lambda x: x.value if isinstance(x, StageTensor) else x, out)

    @torch.no_grad()
    def gather(self) -> None:
        """Makes the parameters and buffers of the network up to date on all ranks. Collective.

        Each is sent from a stage that uses it. Then `model.state_dict()` is that of the network.
        """
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            used = self._uses.stages_of(name, tensor)
            if used and self.stages.count > 1:
                sent = tensor.detach().contiguous()
                self.stages.world.broadcast(sent, self.stages.all[min(used)].rank(0, 0))
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their 2-norm over all stages is at most `max_norm`.

        Collective. As `torch.nn.utils.clip_grad_norm_` of the whole network.

        Returns:
            The norm before.
        """
        total = torch.zeros(1, dtype=torch.float64)
        own = [(n, p) for n, p in self.model.named_parameters() if p.grad is not None]
        if self.stages.world.rank == self.stages.own.rank(0, 0):
            for name, p in own:
                if min(self._uses.stages_of(name, p), default=0) == self.stages.index:
                    assert p.grad is not None
                    total += p.grad.detach().double().pow(2).sum().cpu()
        self.stages.world.all_reduce(total)
        norm = total.sqrt().squeeze()
        scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for _, p in own:
            assert p.grad is not None
            p.grad.mul_(scale)
        return norm.to(torch.get_default_dtype())

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Makes the arguments of the network stage tensors; a forward pre-hook."""
        if self._running is None:
            return None
        entered: tuple[tuple[Any, ...], dict[str, Any]] = self._running.adopt((args, kwargs))
        return entered

    def _forward(
        self, running: MicroBatch, inputs: tuple[Any, ...], then: Callable[[Any], Any]
    ) -> Any:
        self._running = running
        try:
            out = self.model(*inputs)
        finally:
            self._running = None
        running.end_of_network()
        return then(out)

    def _parts(self, inputs: Any, target: Any) -> Iterator[tuple[float, tuple[Any, ...], Any]]:
        """Yields the weight, the arguments and the target of each micro-batch."""
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        first = next((x for x in leaves(arguments) if isinstance(x, Tensor) and x.dim()), None)
        if first is None:
            raise UsageError("inputs: expected the network's arguments, with a tensor among them")
        samples = first.shape[0]
        if samples < self._micro_batches:
            raise UsageError(f"{samples} samples in {self._micro_batches} micro-batches")
        points = [samples * i // self._micro_batches for i in range(self._micro_batches + 1)]
        for a, b in zip(points, points[1:], strict=False):
            cut = _Cut(samples, a, b)
            yield (b - a) / samples, mapped(cut, arguments), mapped(cut, target)

    def _micro_batch(self) -> MicroBatch:
        return MicroBatch(
            self.stages, self.plan.starts, self._transfers, relays=self._relays, uses=self._uses
        )

    def _tied(self) -> list[tuple[nn.Parameter, set[int]]]:
        """Returns the trained parameters that several stages use, with these stages."""
        named = self.model.named_parameters()
        found = [(p, self._uses.stages_of(n, p)) for n, p in named if p.requires_grad]
        return [(p, used) for p, used in found if len(used) > 1]

    def _reduce_tied(self, before: Mapping[int, Tensor]) -> None:
        """Adds the gradients that a parameter got on several stages.

        Args:
            before: the gradients before the step, by the ids of the parameters.
        """
        represents = self.stages.world.rank == self.stages.own.rank(0, 0)
        for parameter, used in self._tied():
            holds, old = self.stages.index in used, before.get(id(parameter))
            grad = parameter.grad if holds else None
            message = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype)
            if represents and grad is not None:  # the stage's other ranks have the same
                added = grad if old is None else grad - old
                message[:-1], message[-1] = added.detach().flatten(), 1
            self.stages.world.all_reduce(message)
            if holds and message[-1] > 0:
                total = message[:-1].view(parameter.shape).to(parameter.device)
                parameter.grad = total if old is None else old + total

    def _everywhere(self, total: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns the last stage's loss on all ranks."""
        mine, last = self.stages.mesh, self.stages.all[-1]
        if total is None:
            received = torch.empty(1, dtype=torch.float64)
            self.stages.world.recv(received, last.rank(mine.data_index, 0))
            return received[0].to(device_of(mine), dtype)
        if mine.sample_index == 0:
            sent = total.to("cpu", torch.float64).reshape(1)
            for stage in self.stages.all[:-1]:
                for index in range(stage.sample_size):
                    self.stages.world.send(sent, stage.rank(mine.data_index, index))
        return total.reshape(()).to(dtype)


class _Cut:
    """Cuts a micro-batch out of arguments.

    Args:
        samples: in the batch.
        start: the first sample.
        stop: the first sample behind.
    """

    def __init__(self, samples: int, start: int, stop: int) -> None:
        self._samples, self._start, self._stop = samples, start, stop

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != self._samples:
            return x
        if (self._start, self._stop) == (0, self._samples):
            return x
        if not isinstance(x, ShardedTensor):
            return x[self._start : self._stop]
        layout = x.layout.replace((self._stop - self._start, *x.shape[1:]))
        first = x._origin.sizes.given_first
        first = None if first is None else first + self._start
        local = local_of(x)[self._start : self._stop]
        return ShardedTensor.from_local(local, layout, first, x._origin.statistics)
