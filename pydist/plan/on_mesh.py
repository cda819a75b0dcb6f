"""Estimates one training step on one mesh: the work of the rank with most, call by call."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pydist.backend.conv_kernels import ConvKernels, by_rule
from pydist.backend.problem import ConvProblem
from pydist.gradients.buckets import ALONE_BYTES, BUCKET_BYTES
from pydist.grid import SAMPLE_AXES, Grid
from pydist.ops.coarsening import ELEMENT_BYTES, cheapest_form
from pydist.plan.blocks import Blocks
from pydist.plan.estimate import PARTS, PARTS_OF_CALLS, Estimate, StepModel
from pydist.plan.memory import Workspace, workspace_of
from pydist.plan.messages import MessageTimes
from pydist.plan.thin_layers import ThinLayers
from pydist.plan.trace import SAMPLES, TracedCall

_OF_STATISTICS = 5
"""Numbers per channel that a norm sums over ranks, forward (3) and backward (2), in float64."""


_JOINING = ("cat", "concat", "concatenate")
"""Names of calls that join tensors along channels, or rarely another dim."""


class _Format(NamedTuple):
    """Memory format that a tensor has.

    Attributes:
        channels_last: whether it is channels last.
        norm: number of the norm through which it has passed since a convolution chose it.
    """

    channels_last: bool
    norm: int | None = None


def _zeros(calls: int) -> dict[str, list[float]]:
    return {part: [0.0] * calls for part in PARTS_OF_CALLS}


def estimate_step(model: StepModel, grid: Grid) -> Estimate:
    """Estimates a training step on a mesh.

    Args:
        model: of the step.
        grid: the mesh.
    """
    step = StepOnMesh(model, grid)
    seconds = dict.fromkeys(PARTS, 0.0) | step.seconds()
    moved = step.gathered_layers(), step.layers_on_channels()
    return Estimate(grid, model.training.batch, seconds, step.memory(), *moved)


class StepOnMesh:
    """Training step on one mesh, that of the rank with most to do in each call.

    Args:
        model: of the step.
        grid: the mesh.
        working: number of ranks that work at a time, of this mesh and others; by default its own.

    Attributes:
        blocks: of the tensors on the mesh.
        forward: seconds of each call in a pass, by `pydist.plan.estimate.PARTS`.
        backward: the same of its backward.
        gathered: for each call, whether ranks gather it, as its blocks are thin.
        on_channels: for each call, whether ranks split its channels over spatial axes instead.
    """

    def __init__(self, model: StepModel, grid: Grid, working: int | None = None) -> None:
        self._model, self._grid = model, grid
        self._trace, self._hardware = model.trace, model.hardware
        ranks = working or grid.size()
        self._crowded = {r: model.hardware.crowded(r, ranks) for r in ("flops", "bandwidth")}
        self._bandwidth = model.hardware.bandwidth / self._crowded["bandwidth"]
        self.messages = MessageTimes(grid, model.hardware)
        self.blocks = Blocks(model, grid)
        calls = len(self._trace.calls)
        self.forward, self.backward = _zeros(calls), _zeros(calls)
        self.gathered, self.on_channels = [False] * calls, [False] * calls
        self.workspace = Workspace(calls)
        self._thin = ThinLayers(model, self.blocks)
        self._formats: dict[int, _Format] = {}  # of tensors that follow a convolution
        self._computes_part = [(False, False)] * calls  # of the input's, of the result's channels
        for number, call in enumerate(self._trace.calls):
            self._place(number, call)
            self._time(number, call)
            self._pass_format_on(number, call)
            if all(self._trace.tensors[n].gradient is None for n in call.outputs):
                self._leave_out_backward(number)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the step, by `pydist.plan.estimate.PARTS`."""
        calls, passes = range(len(self._trace.calls)), self._model.training.passes
        found = {part: passes * seconds for part, seconds in self.of_calls(calls).items()}
        found |= self.of_gradients(self._trace.parameters, sum(self.backward["compute"]))
        found["reading"] = max(0.0, self.reading() - sum(found.values()))
        return found

    def of_calls(self, calls: range) -> dict[str, float]:
        """Returns the seconds of some calls in a pass, forward and backward, by part."""
        first, stop = calls.start, calls.stop
        return {
            part: sum(self.forward[part][first:stop]) + sum(self.backward[part][first:stop])
            for part in self.forward
        }

    def reading(self) -> float:
        """Returns the seconds in which a rank reads its part of a step's files."""
        training = self._model.training
        nbytes = training.file_bytes * SAMPLES * self.blocks.samples * training.passes
        return nbytes / (self._grid.size(SAMPLE_AXES) * self._hardware.reading)

    def memory(self) -> dict[str, float]:
        """Returns the bytes of the rank with most, by `pydist.plan.memory.KINDS`."""
        return self.memory_of(range(len(self._trace.calls)), self._trace.parameters)

    def memory_of(
        self, calls: range, of_parameters: Sequence[int], alive: int = 1
    ) -> dict[str, float]:
        """Returns the bytes of the rank with most, for some calls of a pass.

        Args:
            calls: numbers of the calls.
            of_parameters: bytes of each trained parameter that they read.
            alive: passes whose tensors are kept for backward.
        """
        training, trace, sweep = self._model.training, self._trace, self._model.sweep
        parameters = float(sum(of_parameters))
        scale = self.blocks.samples * self._model.narrow
        sizes = ((nbytes, self._of_rank(n)) for nbytes, n in trace.memories)
        memories = np.asarray([nbytes * scale * share for nbytes, share in sizes])
        gradients = np.asarray([self.blocks.nbytes(n) for n in range(len(trace.tensors))])
        ranks = self._grid.size()
        peak, part = sweep.peak(
            memories,
            gradients,
            self.workspace,
            calls,
            accumulates=training.passes > 1 or alive > 1,
        )
        copies = float(self.workspace.copies[calls.start : calls.stop].sum())
        kept = sweep.kept(memories, self.workspace, calls)
        kept = min(kept, peak - copies) if alive == 1 else kept
        begins = calls.start == 0
        found = {
            "parameters": parameters + sum(c.held for c in trace.calls[calls.start : calls.stop]),
            "gradients": part * parameters,
            "optimizer": training.state * parameters / (ranks if training.partitioned else 1),
            "activations": alive * kept,
            "transient": max(0.0, peak - kept - copies),
            "halos": alive * sum(self.workspace.halos[i] for i in calls),
            "copies": alive * (copies + (self._copies() if begins else 0.0)),
            "buckets": sum(n for n in of_parameters if n < ALONE_BYTES) if ranks > 1 else 0.0,
            "messages": sum(self.workspace.messages[i] for i in calls),
            "input": (1 + training.prefetch) * self._input() if begins else 0.0,
        }
        held = found["activations"] + found["transient"] + found["halos"] + found["copies"]
        found["allocator"] = (self._hardware.slack - 1) * held
        found["reserved"] = self._hardware.reserved
        return {kind: float(nbytes) for kind, nbytes in found.items()}

    def gathered_layers(self) -> tuple[str, ...]:
        """Returns the paths of the modules whose calls the ranks gather."""
        return self._layers_where(self.gathered)

    def layers_on_channels(self) -> tuple[str, ...]:
        """Returns the paths of the modules whose channels the ranks split over spatial axes."""
        return self._layers_where(self.on_channels)

    def _layers_where(self, chosen: Sequence[bool]) -> tuple[str, ...]:
        calls = zip(self._trace.calls, chosen, strict=True)
        return tuple(dict.fromkeys(call.module for call, is_chosen in calls if is_chosen))

    def of_gradients(self, parameters: Sequence[int], hiding: float) -> dict[str, float]:
        """Returns the seconds of the reduction of gradients and of the optimizer.

        Args:
            parameters: bytes of each.
            hiding: seconds of backward's computation, which hides messages.
        """
        axes = ("data", *SAMPLE_AXES)
        small = sum(n for n in parameters if n < ALONE_BYTES)
        messages = [n for n in parameters if n >= ALONE_BYTES]
        buckets = math.ceil(small / BUCKET_BYTES)
        messages += [small // max(1, buckets)] * buckets
        whole = sum(self.messages.all_reduce(axes, n) for n in messages)
        left = self._exposed(whole, len(messages), hiding)
        ranks = self._grid.size() if self._model.training.partitioned else 1
        accesses = 3 + 2 * self._model.training.state
        moved = accesses * sum(parameters) / ranks
        rate = self._hardware.optimizing / self._crowded["bandwidth"]
        return {"gradients": left, "optimizer": moved / rate}

    def _of_rank(self, number: int) -> float:
        return self.blocks.share(number) * self.blocks.part(number)

    def _input(self) -> float:
        """Returns the bytes of an input, which autocast leaves as it is."""
        return self.blocks.nbytes(0) / self._model.narrow

    def _copies(self) -> float:
        """Returns the bytes of the input as convolutions keep it, if in another format or dtype."""
        has_format = self._trace.tensors[0].shape[1] > 1 and not self._hardware.is_asynchronous
        differs = has_format or self._model.narrow < 1
        keeps = any(c.window and c.has_wgrad and c.inputs[0] == 0 for c in self._trace.calls)
        return self.blocks.nbytes(0) if differs and keeps else 0.0

    # -- layouts ----------------------------------------------------------------------------

    def _place(self, number: int, call: TracedCall) -> None:
        """Decides how the results of a call are cut."""
        blocks = self.blocks
        parted = {self._trace.tensors[n].shape[1] for n in call.inputs if blocks.has_part[n]}
        is_cut = any(blocks.is_cut[n] for n in call.inputs)
        if is_cut and self._thin.is_thin(number) and call.window is not None:
            halo = self._halo(number, call.inputs[0], is_gradient=False)[1]
            self.gathered[number] = self._thin.gathers(call, blocks.in_choices(halo))
            is_cut = not self.gathered[number]
        if is_cut and parted and not blocks.has_channel_axis:
            self._move_back(number, call)
            parted = set()
        for n in call.outputs:
            shape = self._trace.tensors[n].shape
            blocks.is_cut[n] = is_cut and blocks.is_whole_sample(shape)
            blocks.has_part[n] = bool(parted) and shape[1:2] != () and shape[1] in parted
        has_channels = len(self._trace.tensors[call.outputs[0]].shape) > 1
        may_split = call.weight and call.flops and has_channels
        is_whole = not is_cut and not blocks.has_channel_axis
        if may_split and (blocks.has_channel_axis or (is_whole and self._thin.splits(call))):
            self._split_channels(number, call, bool(parted))
        elif parted and call.name in _JOINING:
            self._join(number, call)
        elif parted and not any(blocks.has_part[n] for n in call.outputs):
            axes, whole = blocks.channel_axes, blocks.of_all_channels(call.inputs[0])
            self._add("channels", number, self.messages.gather(axes, whole), 0.0)

    def _split_channels(self, number: int, call: TracedCall, has_part: bool) -> None:
        """Lets a layer split its outputs or its inputs, see `pydist.ops.channels`."""
        blocks, messages, space = self.blocks, self.messages, self.workspace
        source, out = call.inputs[0], call.outputs[0]
        shape = self._trace.tensors[out].shape
        channels = shape[1] if blocks.is_whole_sample(shape) else shape[-1]
        of_input, of_result = blocks.of_all_channels(source), blocks.of_all_channels(out)
        foreign = (blocks.channel - 1) / blocks.channel
        axes = blocks.channel_axes
        self.on_channels[number] = not blocks.has_channel_axis
        self.gathered[number] &= blocks.has_channel_axis
        if not has_part:
            blocks.has_part[out] = channels >= blocks.channel
            self._computes_part[number] = False, blocks.has_part[out]
            if blocks.has_part[out] and self._trace.tensors[source].gradient is not None:
                self._add("channels", number, 0.0, messages.all_reduce(axes, of_input))
                space.dgrad[number] += of_input  # partial, and summed
            return
        form = "sum"
        if call.window is not None and channels >= blocks.channel:
            form = cheapest_form(blocks.channel, *map(blocks.in_choices, (of_input, of_result)))
        blocks.has_part[out] = form != "sum"
        self._computes_part[number] = form != "gather", form == "gather"
        if form == "sum":
            self._add("channels", number, messages.all_reduce(axes, of_result), 0.0)
            # Partial, summed, and with the bias.
            space.forward[number] += of_result * min(2, len(call.parameters))
            return
        moved = of_result if form == "scatter" else of_input
        each = messages.gather(axes, moved)
        self._add("channels", number, each, each)
        space.messages[number] += 4 * foreign * moved
        if form == "scatter":
            for when in (space.forward, space.dgrad, space.wgrad):
                when[number] += of_result
        else:
            space.kept[number] += of_input
            space.gathered[number] = self._trace.tensors[source].memory
            space.dgrad[number] += of_input
            space.wgrad[number] += of_input

    def _join(self, number: int, call: TracedCall) -> None:
        """Splits joined channels as the operand with most, see `pydist.ops.shaping.joining`."""
        blocks, out = self.blocks, call.outputs[0]
        like = max(call.inputs, key=lambda n: (blocks.has_part[n], self._trace.tensors[n].nbytes))
        blocks.has_part[out] = blocks.has_part[like]
        each = self.messages.gather(blocks.channel_axes, blocks.nbytes(out))
        self._add("channels", number, each, each)
        foreign = (blocks.channel - 1) / blocks.channel
        self.workspace.messages[number] += 4 * foreign * blocks.nbytes(out)

    def _move_back(self, number: int, call: TracedCall) -> None:
        """Adds the time in which operands with cut channels are cut in space, beside others."""
        blocks = self.blocks
        moved = sum(blocks.nbytes(n) for n in call.inputs if blocks.has_part[n])
        each = self.messages.gather(blocks.channel_axes, moved)
        self._add("channels", number, each, each)

    def _leave_out_backward(self, number: int) -> None:
        """Leaves a call out of backward that does not reach it, as after frozen layers alone."""
        for of_calls in self.backward.values():
            of_calls[number] = 0.0
        self.workspace.dgrad[number] = self.workspace.wgrad[number] = 0.0

    # -- times ------------------------------------------------------------------------------

    def _add(self, part: str, number: int, forward: float, backward: float) -> None:
        """Adds the seconds of a call to a part of the step."""
        self.forward[part][number] += forward
        self.backward[part][number] += backward

    def _time(self, number: int, call: TracedCall) -> None:
        """Adds the time of a call, forward and backward."""
        if call.kind == "view":
            self._leave(number, call)
            return
        blocks = self.blocks
        arithmetic = self._arithmetic(number, call)
        host = self._hardware.call / 3, 2 * self._hardware.call / 3
        longer = max if self._hardware.is_asynchronous else operator.add
        forward, backward = map(longer, arithmetic, host)
        self._add("compute", number, forward, backward)
        jitter = self._hardware.jitter if self._grid.size() > 1 else 0.0
        self._add("waiting", number, jitter * forward, jitter * backward)
        if call.window is not None and blocks.is_cut[call.outputs[0]]:
            edge = self._edge(number, call) * self._hardware.edge
            self._add("compute", number, edge * arithmetic[0], edge * arithmetic[1])
            self._add_halo(number, call, forward, backward)
        elif blocks.is_cut[call.outputs[0]]:
            before, _ = self._halo(number, call.inputs[0], is_gradient=False)
            after, _ = self._halo(number, call.outputs[0], is_gradient=True)
            self._add("halo", number, before, after)
        if call.kind == "norm":
            axes = SAMPLE_AXES if call.name != "batch_norm" else ("data", *SAMPLE_AXES)
            shape = self._trace.tensors[call.inputs[0]].shape
            nbytes = 8 * (shape[1] if len(shape) > 1 else 1) * _OF_STATISTICS / 2
            each = self.messages.all_reduce(axes, nbytes)
            self._add("statistics", number, each, each)
        self._leave(number, call)

    def _leave(self, number: int, call: TracedCall) -> None:
        """Adds the time in which a layer without spatial dims gets the whole sample."""
        blocks = self.blocks
        if not any(blocks.is_cut[n] for n in call.inputs) or blocks.is_cut[call.outputs[0]]:
            return
        source = max(call.inputs, key=lambda n: self._trace.tensors[n].nbytes)
        if self.gathered[number] or self.on_channels[number]:
            each = self.messages.gather(blocks.axes, blocks.nbytes(source) / blocks.share(source))
            self._add("gather", number, each, each)
            return
        result = self._trace.tensors[call.outputs[0]]
        nbytes = result.nbytes * blocks.samples * self._model.narrow
        if result.nbytes < self._trace.tensors[source].nbytes:  # a sum or a mean
            self._add("statistics", number, self.messages.all_reduce(blocks.axes, nbytes), 0.0)
        else:
            self._add("gather", number, self.messages.gather(blocks.axes, nbytes), 0.0)

    def _arithmetic(self, number: int, call: TracedCall) -> tuple[float, float]:
        """Returns the seconds of a call's forward and backward on a rank."""
        blocks = self.blocks
        moved = max(blocks.nbytes(n) for n in (*call.inputs, *call.outputs))
        if not call.flops:
            seconds = call.passes * moved / self._bandwidth
            if call.has_exponentials:
                elements = moved / self._model.dtype.itemsize
                seconds += elements * self._hardware.exponential
            return seconds / 3, 2 * seconds / 3
        share = blocks.share(call.outputs[0])
        if call.weight and (blocks.has_part[call.outputs[0]] or blocks.has_part[call.inputs[0]]):
            share /= blocks.channel
        has_gradient = self._trace.tensors[call.inputs[0]].gradient is not None
        problem = blocks.problem(call, *self._computes_part[number])
        kept = None
        if problem is not None:
            together = min(self._grid.size(), self._hardware.ranks_per_node)
            kept = self._model.kept(problem, together)
            if not self._hardware.is_asynchronous:
                kernels = by_rule([problem], 0) if kept is None else kept.kernels
                self._add_workspace(number, call, problem, kernels)
        crowded = self._crowded["flops"]
        if kept is not None:
            crowded /= self._hardware.crowded("flops", kept.ranks)
            # A transposed convolution runs that convolution backward.
            is_adjoint = call.kind == "transposed"
            first, other = (kept.dgrad, kept.forward) if is_adjoint else (kept.forward, kept.dgrad)
            after = (kept.wgrad if call.has_wgrad else 0.0) + (other if has_gradient else 0.0)
            return crowded * first, crowded * after
        arithmetic = crowded * call.flops * blocks.samples * share / self._model.flops
        # Kernels copy weights into a format of their own.
        weights = 3 * ELEMENT_BYTES * math.prod(call.weight or (0,))
        nbytes = sum(blocks.nbytes(n) for n in (call.inputs[0], *call.outputs)) + weights
        one = max(arithmetic, nbytes / self._bandwidth)
        return one, call.backward * one

    def _pass_format_on(self, number: int, call: TracedCall) -> None:
        """Gives results that no convolution makes the memory format of their first operand."""
        found = self._formats.get(call.inputs[0])
        if found is not None and call.kind == "norm":
            found = found._replace(norm=number)
        for n in call.outputs:
            if found is not None and n not in self._formats:
                self._formats[n] = found

    def _add_workspace(
        self, number: int, call: TracedCall, problem: ConvProblem, kernels: ConvKernels
    ) -> None:
        """Adds the memory in which a convolution's kernels have operands in other formats."""
        source, space = call.inputs[0], self.workspace
        in_dgrad, in_wgrad = workspace_of(problem, kernels)
        if call.has_wgrad:
            space.wgrad[number] += in_wgrad
        if call.kind == "transposed":
            space.forward[number] += in_dgrad
        elif self._trace.tensors[source].gradient is not None:
            space.dgrad[number] += in_dgrad
            found = self._formats.get(source)
            if found is not None and found.channels_last != kernels.channels_last:
                space.copies[number] += self.blocks.nbytes(source)
                if found.norm is not None:  # whose backward gets the gradient in the other format
                    norm = self._trace.calls[found.norm]
                    space.dgrad[found.norm] += self.blocks.nbytes(norm.outputs[0])
        for n in call.outputs:
            self._formats[n] = _Format(kernels.channels_last)

    def _edge(self, number: int, call: TracedCall) -> float:
        """Returns the arithmetic of a halo's contributions, relative to that of the block."""
        assert call.window is not None
        cuts = self.blocks.cuts
        source = call.inputs[0] if call.kind != "transposed" else call.outputs[0]
        kernel = call.window.kernel[-len(cuts) :]
        return sum(
            cut.halos[number].width / (n * max(1, cut.sizes[source]))
            for cut, n in zip(cuts, kernel, strict=True)
        )

    def _add_halo(self, number: int, call: TracedCall, forward: float, backward: float) -> None:
        """Adds what halos take beyond the computation that hides them."""
        before, width = self._halo(number, call.inputs[0], is_gradient=False)
        self._add("halo", number, self._exposed(before, 1, forward), 0.0)
        self.workspace.messages[number] += 2 * width
        if self._trace.tensors[call.inputs[0]].gradient is not None:
            after, of_gradient = self._halo(number, call.outputs[0], is_gradient=True)
            self._add("halo", number, 0.0, self._exposed(after, 1, backward))
            self.workspace.messages[number] += 2 * of_gradient
        if call.saved:
            self.workspace.halos[number] += width

    def _exposed(self, seconds: float, exchanges: int, hiding: float) -> float:
        """Returns the part of messages' time that computation does not hide.

        Args:
            seconds: of the messages.
            exchanges: their number. What they take of the host's time adds to its other work.
            hiding: seconds of the computation.
        """
        hardware = self._hardware
        fixed = 0.0 if hardware.is_asynchronous else min(seconds, exchanges * hardware.exchange)
        moving = seconds - fixed
        return fixed + max(moving - hiding, (1 - hardware.overlap) * moving)

    def _halo(self, number: int, tensor: int, is_gradient: bool) -> tuple[float, float]:
        """Returns the seconds and the bytes of an exchange of a tensor's halo."""
        own = self.blocks.nbytes(tensor)
        widths, total = list[tuple[float, int]](), own
        for cut in self.blocks.cuts:
            halo = (cut.gradient_halos if is_gradient else cut.halos)[number]
            received = total * halo.width / max(1, cut.sizes[tensor])
            widths.append((received, halo.sides))
            total += received
        return self.messages.exchange(self.blocks.axes, widths), total - own
