"""Estimates one training step on one mesh: the work of the rank with most, call by call."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from pydist.backend.problem import ConvProblem
from pydist.gradients.buckets import ALONE_BYTES, BUCKET_BYTES
from pydist.grid import CHANNEL_AXIS, SAMPLE_AXES, Grid, axes_by_dim
from pydist.ops.channel_forms import cheapest_form
from pydist.ops.coarsening import BYTE_S, ELEMENT_BYTES, EXCHANGE_S, FLOP_S, LAYERS
from pydist.plan.estimate import PARTS, Estimate, StepModel
from pydist.plan.messages import MessageTimes
from pydist.plan.trace import SAMPLES, TracedCall

_OF_STATISTICS = 5
"""Numbers per channel that a norm sums over ranks, forward (3) and backward (2), in float64."""


def estimate_step(model: StepModel, grid: Grid) -> Estimate:
    """Estimates a training step on a mesh.

    Args:
        model: of the step.
        grid: the mesh.
    """
    step = _StepOnMesh(model, grid)
    seconds = dict.fromkeys(PARTS, 0.0) | step.seconds()
    return Estimate(grid, model.training.batch, seconds, step.memory())


class _StepOnMesh:
    """Training step on one mesh, that of the rank with most to do in each call.

    Args:
        model: of the step.
        grid: the mesh.
    """

    def __init__(self, model: StepModel, grid: Grid) -> None:
        self._model, self._grid = model, grid
        self._trace, self._hardware = model.trace, model.hardware
        self._messages = MessageTimes(grid, model.hardware)
        self._axes = tuple(axes_by_dim(len(self._trace.tensors[0].shape) - 2).values())
        self._cuts = model.cuts.of([grid.size((axis,)) for axis in self._axes])
        self._channel = grid.size((CHANNEL_AXIS,))
        groups = grid.size(("data",)) * model.training.passes
        samples = math.ceil(model.training.batch / groups)
        self._samples = samples / SAMPLES
        self._dims = len(self._trace.tensors[0].shape)
        count = len(self._trace.tensors)
        self._is_cut = [False] * count
        self._has_part = [False] * count  # of the channels
        self._is_cut[0] = grid.size(self._axes) > 1
        self._seconds: dict[str, float] = defaultdict(float)
        self._backward = self._halo_bytes = 0.0
        self._run()

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the step, by `pydist.plan.estimate.PARTS`."""
        return dict(self._seconds)

    def memory(self) -> dict[str, float]:
        """Returns the bytes of the rank with most, by `pydist.plan.memory.KINDS`."""
        training, trace = self._model.training, self._trace
        parameters = float(sum(trace.parameters))
        scale = self._samples * self._model.narrow
        sizes = ((nbytes, self._share(n) * self._part(n)) for nbytes, n in trace.memories)
        memories = np.asarray([nbytes * scale * share for nbytes, share in sizes])
        gradients = np.asarray([self._bytes(n) for n in range(len(trace.tensors))])
        kept, ranks = self._model.sweep.kept(memories), self._grid.size()
        found = {
            "parameters": parameters,
            "gradients": parameters,
            "optimizer": training.state * parameters / (ranks if training.partitioned else 1),
            "activations": kept,
            "transient": max(0.0, self._model.sweep.peak(memories, gradients) - kept),
            "halos": self._halo_bytes,
            "copies": self._copies(),
            "buckets": sum(n for n in trace.parameters if n < ALONE_BYTES) if ranks > 1 else 0.0,
            "input": (1 + training.prefetch) * self._bytes(0),
        }
        held = found["activations"] + found["transient"] + found["halos"] + found["copies"]
        found["allocator"] = (self._hardware.slack - 1) * held
        found["reserved"] = float(self._hardware.reserved)
        return found

    def _copies(self) -> float:
        """Returns the bytes of the input in the memory format of convolutions, where that differs.

        Other inputs have it already: the convolution before has chosen it.
        """
        source = self._trace.tensors[0]
        reads = [c for c in self._trace.calls if c.window and c.weight and c.inputs[0] == 0]
        differs = reads and source.shape[1] > 1 and not self._hardware.is_asynchronous
        return self._bytes(0) if differs else 0.0

    def _run(self) -> None:
        """Follows the calls, then the rest of the step."""
        for number, call in enumerate(self._trace.calls):
            self._place(number, call)
            self._time(number, call)
        found = self._seconds
        passes, training = self._model.training.passes, self._model.training
        for part in found:
            found[part] *= passes
        self._reduce_and_step()
        reading = training.file_bytes * SAMPLES * self._samples * passes
        reading /= self._grid.size(SAMPLE_AXES) * self._hardware.reading
        found["reading"] = max(0.0, reading - sum(found.values()))

    # -- layouts ----------------------------------------------------------------------------

    def _place(self, number: int, call: TracedCall) -> None:
        """Decides how the results of a call are cut."""
        parted = {self._trace.tensors[n].shape[1] for n in call.inputs if self._has_part[n]}
        is_cut = any(self._is_cut[n] for n in call.inputs)
        if is_cut and self._is_thin(number) and call.window is not None:
            is_cut = not self._gathers(number, call)
        for n in call.outputs:
            shape = self._trace.tensors[n].shape
            self._is_cut[n] = is_cut and len(shape) == self._dims
            self._has_part[n] = bool(parted) and shape[1:2] != () and shape[1] in parted
        if call.weight and call.flops and self._channel > 1:
            self._split_channels(call, bool(parted))
        elif parted and not any(self._has_part[n] for n in call.outputs):
            axes, whole = (CHANNEL_AXIS,), self._whole_channels(call.inputs[0])
            self._seconds["channels"] += self._messages.gather(axes, whole)

    def _split_channels(self, call: TracedCall, has_part: bool) -> None:
        """Lets a layer split its outputs or its inputs, see `pydist.ops.channels`."""
        out = call.outputs[0]
        shape = self._trace.tensors[out].shape
        channels = shape[1] if len(shape) == self._dims else shape[-1]
        of_result = self._whole_channels(out)
        axes = (CHANNEL_AXIS,)
        if not has_part:
            self._has_part[out] = channels >= self._channel
            if self._has_part[out] and self._trace.tensors[call.inputs[0]].gradient is not None:
                of_input = self._whole_channels(call.inputs[0])
                self._seconds["channels"] += self._messages.all_reduce(axes, of_input)
            return
        of_input = self._whole_channels(call.inputs[0])
        form = "sum"
        if call.window is not None and channels >= self._channel:
            form = cheapest_form(self._channel, of_input, of_result)
        self._has_part[out] = form != "sum"
        if form == "sum":
            self._seconds["channels"] += self._messages.all_reduce(axes, of_result)
        else:
            moved = of_result if form == "scatter" else of_input
            self._seconds["channels"] += 2 * self._messages.gather(axes, moved)

    def _is_thin(self, number: int) -> bool:
        return any(cut.is_thin[number] for cut in self._cuts)

    def _gathers(self, number: int, call: TracedCall) -> bool:
        """Returns whether ranks gather a layer with thin blocks, by the costs that they use.

        `pydist.ops.coarsening` also has layouts between that of the blocks and the whole.
        """
        source, out = call.inputs[0], call.outputs[0]
        nbytes = self._trace.tensors[source].nbytes * self._samples
        flops = call.flops or self._trace.tensors[out].nbytes / ELEMENT_BYTES
        weights = 3 * math.prod(call.weight or (0,)) * ELEMENT_BYTES * BYTE_S
        whole = max(3 * flops * self._samples * FLOP_S, weights)
        part = max(3 * flops * self._samples * FLOP_S * self._share_if_cut(out), weights)
        halo = 2 * (EXCHANGE_S + self._halo(number, source, is_gradient=False)[1] * BYTE_S)
        moving = 2 * (EXCHANGE_S + nbytes * BYTE_S)
        return moving + LAYERS * whole < LAYERS * (part + halo)

    # -- sizes ------------------------------------------------------------------------------

    def _share(self, number: int) -> float:
        """Returns the part of a tensor's spatial extents that a rank has at most."""
        return self._share_if_cut(number) if self._is_cut[number] else 1.0

    def _share_if_cut(self, number: int) -> float:
        """Returns the same for a tensor that is cut, whether or not it is."""
        shape = self._trace.tensors[number].shape
        found = 1.0
        for dim, cut in enumerate(self._cuts, start=2):
            found *= cut.sizes[number] / max(1, shape[dim])
        return found

    def _whole_channels(self, number: int) -> float:
        """Returns the bytes of a rank's block of a tensor, with all channels."""
        nbytes = self._trace.tensors[number].nbytes * self._samples * self._model.narrow
        return nbytes * self._share(number)

    def _bytes(self, number: int) -> float:
        """Returns the bytes of a rank's block of a tensor."""
        return self._whole_channels(number) * self._part(number)

    def _part(self, number: int) -> float:
        """Returns the part of a tensor's channels that a rank has at most."""
        shape = self._trace.tensors[number].shape
        if not self._has_part[number] or len(shape) < 2:
            return 1.0
        return math.ceil(shape[1] / self._channel) / shape[1]

    def _local(self, number: int) -> tuple[int, ...]:
        """Returns the shape of a rank's block of a tensor."""
        tensor = self._trace.tensors[number]
        shape = [round(self._samples * tensor.shape[0]), *tensor.shape[1:]]
        if self._has_part[number]:
            shape[1] = math.ceil(shape[1] / self._channel)
        if self._is_cut[number]:
            shape[2:] = [cut.sizes[number] for cut in self._cuts]
        return tuple(shape)

    # -- times ------------------------------------------------------------------------------

    def _time(self, number: int, call: TracedCall) -> None:
        """Adds the time of a call, forward and backward."""
        if call.kind == "view":
            self._leave(call)
            return
        arithmetic = self._arithmetic(call)
        host = self._hardware.call / 3, 2 * self._hardware.call / 3
        longer = max if self._hardware.is_asynchronous else operator.add
        forward, backward = map(longer, arithmetic, host)
        self._seconds["compute"] += forward + backward
        self._backward += backward
        if call.window is not None and self._is_cut[call.outputs[0]]:
            self._seconds["compute"] += self._edge(number, call) * sum(arithmetic)
            self._add_halo(number, call, forward, backward)
        elif self._is_cut[call.outputs[0]]:
            self._seconds["halo"] += sum(
                self._halo(number, n, is_gradient)[0]
                for n, is_gradient in ((call.inputs[0], False), (call.outputs[0], True))
            )
        if call.kind == "norm":
            axes = SAMPLE_AXES if call.name != "batch_norm" else ("data", *SAMPLE_AXES)
            shape = self._trace.tensors[call.inputs[0]].shape
            nbytes = 8 * (shape[1] if len(shape) > 1 else 1) * _OF_STATISTICS / 2
            self._seconds["statistics"] += 2 * self._messages.all_reduce(axes, nbytes)
        self._leave(call)

    def _leave(self, call: TracedCall) -> None:
        """Adds the time in which a layer without spatial dims gets the whole sample."""
        if not any(self._is_cut[n] for n in call.inputs) or self._is_cut[call.outputs[0]]:
            return
        source = max(call.inputs, key=lambda n: self._trace.tensors[n].nbytes)
        result = self._trace.tensors[call.outputs[0]]
        nbytes = result.nbytes * self._samples * self._model.narrow
        if result.nbytes < self._trace.tensors[source].nbytes:  # a sum or a mean
            self._seconds["statistics"] += self._messages.all_reduce(self._axes, nbytes)
        else:
            self._seconds["gather"] += self._messages.gather(self._axes, nbytes)

    def _arithmetic(self, call: TracedCall) -> tuple[float, float]:
        """Returns the seconds of a call's forward and backward on a rank."""
        moved = max(self._bytes(n) for n in (*call.inputs, *call.outputs))
        if not call.flops:
            seconds = call.passes * moved / self._hardware.bandwidth
            return seconds / 3, 2 * seconds / 3
        share = self._share(call.outputs[0])
        if call.weight and (self._has_part[call.outputs[0]] or self._has_part[call.inputs[0]]):
            share /= self._channel
        kept = self._kept(call)
        has_gradient = self._trace.tensors[call.inputs[0]].gradient is not None
        if kept is not None:
            forward, dgrad, wgrad = kept
            return forward, wgrad + (dgrad if has_gradient else 0.0)
        arithmetic = call.flops * self._samples * share / self._model.flops
        weights = 4 * math.prod(call.weight or (0,))
        nbytes = sum(self._bytes(n) for n in (call.inputs[0], *call.outputs)) + weights
        one = max(arithmetic, nbytes / self._hardware.bandwidth)
        return one, call.backward * one

    def _kept(self, call: TracedCall) -> Sequence[float] | None:
        """Returns measured seconds of a convolution on a rank's block."""
        if call.window is None or not call.weight:
            return None
        source, out = self._local(call.inputs[0]), self._local(call.outputs[0])
        if call.kind == "transposed":
            source, out = out, source
        if len(source) < 4:
            return None
        parted = self._has_part[call.inputs[0]] or self._has_part[call.outputs[0]]
        groups = max(1, call.groups // (self._channel if parted else 1))
        weight = (out[1], source[1] // groups, *call.weight[2:])
        window = call.window
        padding = tuple(before for before, _ in window.padding)
        dtype = self._model.training.dtype
        problem = ConvProblem(
            source, weight, window.stride, padding, window.dilation, groups, dtype
        )
        return self._model.kept(problem, self._grid.size(SAMPLE_AXES))

    def _edge(self, number: int, call: TracedCall) -> float:
        """Returns the arithmetic of a halo's contributions, relative to that of the block."""
        assert call.window is not None
        source = call.inputs[0] if call.kind != "transposed" else call.outputs[0]
        kernel = call.window.kernel[-len(self._cuts) :]
        return sum(
            cut.halos[number].width / (n * max(1, cut.sizes[source]))
            for cut, n in zip(self._cuts, kernel, strict=True)
        )

    def _add_halo(self, number: int, call: TracedCall, forward: float, backward: float) -> None:
        """Adds what halos take beyond the computation that hides them."""
        hidden = self._hardware.overlap
        before, width = self._halo(number, call.inputs[0], is_gradient=False)
        self._seconds["halo"] += max(before - forward, (1 - hidden) * before)
        if self._trace.tensors[call.inputs[0]].gradient is not None:
            after, _ = self._halo(number, call.outputs[0], is_gradient=True)
            self._seconds["halo"] += max(after - backward, (1 - hidden) * after)
        if call.saved:
            self._halo_bytes += width

    def _halo(self, number: int, tensor: int, is_gradient: bool) -> tuple[float, float]:
        """Returns the seconds and the bytes of an exchange of a tensor's halo."""
        own = self._bytes(tensor)
        widths, total = list[tuple[float, int]](), own
        for cut in self._cuts:
            halo = (cut.gradient_halos if is_gradient else cut.halos)[number]
            received = total * halo.width / max(1, cut.sizes[tensor])
            widths.append((received, halo.sides))
            total += received
        return self._messages.exchange(self._axes, widths), total - own

    def _reduce_and_step(self) -> None:
        """Adds the seconds of the reduction of gradients and of the optimizer."""
        axes = ("data", *SAMPLE_AXES)
        parameters = self._trace.parameters
        small = sum(n for n in parameters if n < ALONE_BYTES)
        messages = [n for n in parameters if n >= ALONE_BYTES]
        buckets = math.ceil(small / BUCKET_BYTES)
        messages += [small // max(1, buckets)] * buckets
        whole = sum(self._messages.all_reduce(axes, n) for n in messages)
        hidden = self._hardware.overlap
        self._seconds["gradients"] = max(whole - self._backward, (1 - hidden) * whole)
        ranks = self._grid.size() if self._model.training.partitioned else 1
        accesses = 3 + 2 * self._model.training.state
        moved = accesses * sum(parameters) / ranks
        self._seconds["optimizer"] = moved / self._hardware.bandwidth
