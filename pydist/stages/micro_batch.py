"""Runs a micro-batch on one stage: its forward pass with transfers, and its backward pass."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from pydist.arguments import leaves, mapped
from pydist.errors import NotSupported
from pydist.exchange.function import without_autocast
from pydist.exchange.left_weights import Left, root_of
from pydist.group_sizes import GroupSizes, mark_batch
from pydist.ops.fusion.handover import hook_on_saved
from pydist.stages.boundary import Boundary
from pydist.stages.calls import Call, Calls, Key, memory_id
from pydist.stages.draws import draws, refuse_to_draw_again, run_drawing
from pydist.stages.left_layers import run_leaving
from pydist.stages.messages import PassMark, Route
from pydist.stages.ranks import Stages, device_of
from pydist.stages.shapes import Shapes, is_differentiable
from pydist.stages.sources import Sources, ValueRead, refuse_unnamed
from pydist.stages.statistics import BatchStatistics
from pydist.stages.transfers import Transfers, origin_of
from pydist.stages.uses import Uses
from pydist.tensor import ShardedTensor, local_of
from pydist.tensor.aliasing import as_result
from pydist.tensor.refusals import name_of
from pydist.tensor.stage import StageTensor
from pydist.tensor.wrapper import tensors_of

NO_STAGE = -1
"""Stage of a pass that makes the calls of the network, and computes none."""

_MOST_DRAWS = 1 << 32
"""Draws of a module in a pass, at most."""


class MicroBatch(Calls):
    """Micro-batch that passes through one stage, forward and backward.

    Args:
        stages: the stages.
        own: the stage; `NO_STAGE` to make the calls without computing them.
        placed: the mesh of each stage.
        starts: the first call of each stage but the first.
        uses: which meshes have the weights of each call.
        transfers: the messages between stages.
        shapes: of the results of calls, which micro-batches share.
        repeats: the micro-batch whose forward pass this one repeats, without messages.
        index: of the micro-batch in its batch.
        mark: of the forward pass, which all stages must have in common.
        keeps: whether messages are kept, to repeat the forward pass.
        relays: whether a tensor goes through all stages between two, instead of directly.
        lends: whether other passes need the network's arguments and received tensors unchanged.
    """

    def __init__(
        self,
        stages: Stages,
        own: int,
        placed: Sequence[int],
        starts: Sequence[Key],
        uses: Uses,
        transfers: Transfers,
        shapes: Shapes,
        repeats: MicroBatch | None = None,
        *,
        index: int = 0,
        mark: PassMark,
        relays: bool,
        lends: bool,
        keeps: bool,
    ) -> None:
        super().__init__(device_of(stages.mesh), shapes)
        self._stages, self.own, self._placed = stages, own, placed
        self._starts, self._transfers = starts, transfers
        self._uses = uses
        self._relays, self._mark = relays, mark
        self._lends = lends
        self.wrapped: Callable[[Tensor, GroupSizes | None], ShardedTensor] | None = None
        """Wraps a plain tensor as one of the batch of all groups, if norms are over all groups."""
        self.sources: Sources | None = None
        """Where the plain tensors of the forward pass come from, while it runs."""
        self.factors: list[float] = []
        """The numbers in plain tensors with which the criterion calls, such as a loss scale."""
        self.reads: list[ValueRead] = []
        """The values of weights that the network has read, if ranks may differ in them."""
        self.statistics: BatchStatistics | None = None
        """Collects the statistics of norms, which change running ones after the batch."""
        self.samples: range | None = None
        """Indices of its samples in the global batch, in a step."""
        self.begun = -1, 0
        """Number of training steps before the batch, and of the batch after them: its draws are
        others if it is no training step, as in evaluation."""
        self.is_shared = False
        """Whether micro-batches of the batch pass through the last stage on different meshes."""
        self.of_groups = 1.0
        """Its samples, divided by the samples of all groups' micro-batches."""
        # By `memory_id`, with a tensor each that keeps it from being another memory's: memory that
        # others need unchanged, and that of arguments, which a program may change after the pass.
        self._lent: dict[int, Tensor] = {}
        self._entered: dict[int, Tensor] = {}
        self._brought = dict[int, weakref.ref[StageTensor]]()  # received for this stage, by ids
        self._stage, self.index = 0, index
        self._ended = False  # the network; what follows is the criterion
        self._drawn = Counter[str]()
        self.updaters: dict[int, int] = {}
        """The stage that updates running statistics, by their ids."""
        self._origin: Any = None
        self._sizes: GroupSizes | None = None
        self.loss: Tensor | None = None
        """On the last stage, the loss to differentiate."""
        self.before: dict[int, Tensor] = {}
        """Values of the network's buffers before the forward pass, by their ids, if needed."""
        self.is_forgotten = False
        """Whether the graph was freed."""
        self.shown: Tensor | None = None
        """On the last stage, this micro-batch's part of the loss, without a graph."""
        again = None if repeats is None else repeats.boundary
        self.boundary: Boundary = Boundary(stages, transfers, again, keeps=keeps)
        """What it exchanges with other stages."""
        self.left: Left | None = None
        """Gradients of weights that the backward pass leaves, if it leaves any."""
        self._repeats = repeats is not None

    @property
    def number(self) -> int:
        """Number that identifies the forward pass."""
        return self._mark.number

    # -- forward ----------------------------------------------------------------------------

    def adopt(self, values: Any, sizes: GroupSizes | None) -> Any:
        """Returns the network's arguments, with stage tensors in the places of tensors.

        Args:
            values: the arguments.
            sizes: of all groups' micro-batches, if there are several groups.
        """
        self._origin = origin_of(list(leaves((values,))))
        self._sizes = sizes

        def entered(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            x = self.enter(value)
            x.stages = set(range(self._stages.count))
            self._entered[memory_id(x.meta)] = x.meta
            if self._lends:
                self._lent[memory_id(x.meta)] = x.meta
            return x

        return mapped(entered, values)

    def compute(self, call: Call) -> Any:
        """Computes a call on its stage, after the transfers that it needs."""
        self._mark = self._mark.after(str(call))
        assert self.sources is not None
        operands = [name for x in call.operands for name in self.sources.of(x)]
        if self.is_shared:
            refuse_unnamed(call, self.sources)
        stage = self._stage = self._stage_of(call, operands)
        if stage > self.own:
            self._let_go()
        self._check(call, stage)
        # Statistics of a batch are merged on all ranks.
        updated = [] if self.statistics is not None else call.statistics
        self._uses.note_pass(
            operands if self.samples is not None else (),
            [name for x in updated for name in self.sources.of(x)],
            self._placed[stage],
        )
        if self._ended:
            self.factors += [
                x.item()
                for x in tensors_of((call.args, call.kwargs))
                if _is_factor(x) and not self.sources.of(x)
            ]
        for x in call.inputs:
            self.bring(x, stage, str(call))
            if stage == self.own and hook_on_saved() is not None:
                self._brought.pop(id(x), None)  # a checkpointed part may compute with it again
        drawing, drawn = draws(call), self._drawn[call.key.module]
        self._drawn[call.key.module] += drawing
        result, runs = None, stage == self.own
        if runs:
            for x in call.changed:
                self._take(x, call)
        if call.statistics and self.statistics is not None and not self._repeats:
            result = self.statistics.compute(call, self._run_norm, runs=runs, share=self.of_groups)
        elif runs and call.is_batch_norm:
            result = self._run_norm(call)
        elif runs:
            result = self._run_drawing(call, drawn) if drawing else self._run_layer(call)
        for x in call.changed:
            x.owner, x.stages = stage, {stage}
            if stage != self.own:
                x.value = None
        return result

    def _stage_of(self, call: Call, operands: Sequence[str]) -> int:
        """Returns the stage that a call belongs to: the next one begins, or the last one goes on.

        A network may make other calls than those that were planned, as in evaluation. A layer stays
        on a mesh that has its weights even if the planned start of a stage now lies elsewhere.

        Raises:
            NotSupported: no later stage has the weights.
        """
        stage = self._stage
        while stage < len(self._starts) and self._uses.has_begun(
            stage + 1, self._starts[stage], call.key, self._counts
        ):
            stage += 1
        meshes = self._uses.possible(operands, trains=self.samples is not None)
        if meshes is None or self._placed[stage] in meshes:
            return stage
        later = range(self._stage, len(self._placed))
        found = next((s for s in later if self._placed[s] in meshes), None)
        if found is None:
            if self.samples is None:
                advice = "call pipe.gather() before evaluation, after the last change of weights"
            elif self._ended:
                advice = "let the criterion use them from the first step on"
            else:
                advice = "plan the stages with a sample and a mode that have the same calls"
            raise NotSupported(
                f"{call} comes after calls of stage {self._stage} in this forward pass, and its "
                "weights or statistics have been trained on an earlier stage: "
                f"{advice}, or choose other cuts"
            )
        return found

    def note_read(self, names: frozenset[str], func: Any, value: Any) -> None:
        """Notes a value that the network reads of weights or statistics, if ranks may differ in it.

        Args:
            names: of the parameters and buffers from which it is computed.
            func: reads it.
            value: on this rank, a number or list of numbers, or an array.

        Raises:
            NotSupported: it is old, in evaluation, which does not compare what ranks read.
        """
        meshes = self._uses.possible(names, trains=self.samples is not None)
        if meshes is None or len(meshes) == len(self._stages.meshes):
            return
        what = f"{name_of(func)} of {', '.join(sorted(names))}"
        is_old = self._stages.index not in meshes
        if self.samples is None and is_old:
            raise NotSupported(
                f"{what} reads a value of weights or statistics that another stage trains: call "
                "pipe.gather() before evaluation"
            )
        said = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        self.reads.append(ValueRead(what, crc32(said), is_old))

    def _run_layer(self, call: Call) -> Any:
        return call.run() if self.left is None else run_leaving(call, self.left)

    def _run_norm(self, call: Call) -> Any:
        """Computes a batch norm in training, of a plain tensor with the statistics of all groups.

        As `pydist.batch_layers` does without stages.
        """
        given = call.named
        x = given["input"]
        value = x.value if isinstance(x, StageTensor) else x
        assert isinstance(value, Tensor)
        if isinstance(value, ShardedTensor) or self.wrapped is None:
            return call.run()
        if self._stages.mesh.size == 1:
            return call.run()
        entered = self.wrapped(value, self._sizes)  # in backward another batch may be running
        found = call._replace(args=(), kwargs={**given, "input": entered}).run()
        return as_result(found.full_tensor())

    def _check(self, call: Call, stage: int) -> None:
        """Refuses a call that changes memory which another stage holds too.

        Raises:
            NotSupported: it changes a tensor in place that shares memory with one of another stage,
                or running statistics that another one updates.
        """
        for x in call.changed:
            others = [each for each in self.sharing(x) if each.stages != {stage}]
            if others:
                raise NotSupported(
                    f"{call} on stage {stage} changes a tensor in place that another one on stage "
                    f"{others[0].owner} shares memory with: begin the stage at another call"
                )
        for statistics in call.statistics:
            updater = self.updaters.setdefault(id(statistics), stage)
            if updater != stage:
                raise NotSupported(
                    f"{call} on stage {stage} uses running statistics that a call on stage "
                    f"{updater} updates: begin the stage before or after both"
                )

    def _take(self, x: StageTensor, call: Call) -> None:
        """Copies a tensor that a call changes if others need its memory unchanged.

        Raises:
            NotSupported: it has views, which would not follow the copy.
        """
        memory = memory_id(x.meta)
        if memory not in self._lent:
            return
        if any(each.value is not None for each in self.sharing(x)):
            raise NotSupported(
                f"{call} on stage {self.own} changes a view of a tensor in place that other passes "
                "need as it is (recompute=True, or several stages on a mesh): change a copy"
            )
        assert x.value is not None
        del self._lent[memory]
        with torch.enable_grad():
            x.value = x.value.clone()

    def _run_drawing(self, call: Call, drawn: int) -> Any:
        mesh = self._stages.mesh
        forward = mesh.session.forwards if self._origin is None else self._origin.forward
        forwards, batch = self.begun
        if mesh.session.forwards == forwards:
            drawn += batch * _MOST_DRAWS
        return run_drawing(call, mesh, forward, drawn, self.index, self.samples)

    def compute_again(self, call: Call) -> Any:
        """Computes a call that a checkpointed part repeats in backward."""
        refuse_to_draw_again(call)
        if not call.is_batch_norm:
            return call.run()
        if call.statistics and self.statistics is not None:  # which has counted them in forward
            given = call.named
            copies = {name: given[name].clone() for name in ("running_mean", "running_var")}
            call = call._replace(args=(), kwargs={**given, **copies})
        return self._run_norm(call)

    def made(self, call: Call, results: Sequence[StageTensor]) -> None:
        """Assigns the results of a call to its stage."""
        needs_grad = call.needs_grad
        for x in results:
            x.owner, x.stages = self._stage, {self._stage}
            if x.value is None and needs_grad and is_differentiable(x.meta):
                x.now_needs_grad()
        for x in call.changed:
            if needs_grad:
                x.now_needs_grad()

    def end_of_network(self) -> None:
        """Lets the last stage make the calls that follow, those of the criterion."""
        self._stage, self._ended = len(self._starts), True

    def bring(self, x: StageTensor, stage: int, call: str) -> None:
        """Transfers a tensor to a stage that does not hold it.

        Args:
            x: the tensor.
            stage: the stage that needs it.
            call: names the call that uses it, for errors and the order of messages.
        """
        if stage in x.stages:
            return
        hops = [x.owner, stage]
        if self._relays:
            hops = list(range(max(s for s in x.stages if s < stage), stage + 1))
        for source, target in pairwise(hops):
            route = Route(source, target, self._placed[source], self._placed[target])
            self._transfers.see(route, needs_grad=x.needs_grad)
            if source == self.own:
                assert x.value is not None
                lends = memory_id(x.meta) not in self._entered
                self.boundary.send(self.of_batch(x.value), route, call, self._mark, lends=lends)
            elif target == self.own:
                x.value = self.boundary.receive(route, call, self._mark, x.meta, self._origin)
                self._brought[id(x)] = weakref.ref(x)
                if route.is_local or self._lends:
                    self._lent[memory_id(x.meta)] = x.meta
            x.stages.add(target)

    def _let_go(self) -> None:
        """Frees received tensors after this stage's last call; the network may hold them longer.

        As a skip connection does, which it has also given to a call of this stage.
        """
        for brought in self._brought.values() if not self._relays else ():
            x = brought()
            if x is not None and x.owner != self.own:
                x.value = None
        self._brought.clear()

    def of_batch(self, value: Tensor) -> Tensor:
        """Marks a tensor's graph with the micro-batch, for the weights of sample groups."""
        if self._sizes is not None:
            local = local_of(value) if isinstance(value, ShardedTensor) else value
            mark_batch(local, self._sizes)
        return value

    # -- backward ---------------------------------------------------------------------------

    def forget(self) -> None:
        """Frees the graph; `backward` is then that of a micro-batch which repeats this one."""
        self.boundary.forget()
        self.loss, self.is_forgotten = None, True

    def backward(self) -> None:
        """Runs the backward pass of this stage, and exchanges gradients with other stages.

        Raises:
            NotSupported: a later micro-batch has changed what this one has saved.
        """
        try:
            with without_autocast(self.device):  # in which the program may run a step
                self.boundary.run_backward(self.loss, self.number)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise NotSupported(
                f"stage {self.own} computes with a buffer that the network changes in place, and "
                "the next micro-batch has changed it before the backward pass: assign a new tensor "
                "(self.count = self.count + 1), or use recompute=True"
            ) from error

    def finish_weights(self) -> None:
        """Computes the gradients of weights that the backward pass has left."""
        if self.left:
            with without_autocast(self.device):
                self.of_batch(root_of(self.left)).backward()


def _is_factor(x: Tensor) -> bool:
    is_plain = not isinstance(x, StageTensor | ShardedTensor)
    return is_plain and x.dim() == 0 and x.is_floating_point() and not x.requires_grad
