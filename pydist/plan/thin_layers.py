"""Decides for a plan what the ranks do with layers whose blocks are thin, as they decide in a run.

`pydist.ops.coarsening` has the rules, and also layouts between that of the blocks and the whole.
"""

from __future__ import annotations

import math

from pydist.ops.coarsening import ELEMENT_BYTES, LAYERS, costs_of, seconds_on_channels
from pydist.plan.blocks import Blocks
from pydist.plan.estimate import StepModel
from pydist.plan.trace import TracedCall


class ThinLayers:
    """Choices that ranks make for layers with thin blocks, on one mesh.

    Args:
        model: of the step.
        blocks: of the tensors on the mesh.
    """

    def __init__(self, model: StepModel, blocks: Blocks) -> None:
        self._trace, self._blocks = model.trace, blocks
        self._costs = costs_of(model.hardware)

    def is_thin(self, number: int) -> bool:
        """Returns whether a part of a call's input is thinner than half of its window."""
        return any(cut.is_thin[number] for cut in self._blocks.cuts)

    def gathers(self, call: TracedCall, halo: float) -> bool:
        """Returns whether ranks gather the input of a layer with thin blocks.

        Args:
            call: the layer.
            halo: bytes that a rank receives of its input otherwise.
        """
        costs, source = self._costs, call.inputs[0]
        nbytes = self._trace.tensors[source].nbytes * self._blocks.assumed
        whole = self._seconds(call, 1.0)
        whole = min(whole, self._on_channels(call, whole))
        part = self._seconds(call, self._blocks.share_if_cut(call.outputs[0]))
        exchanging = 2 * (costs.exchange + halo * costs.byte)
        moving = 2 * (costs.exchange + nbytes * costs.byte)
        return moving + LAYERS * whole < LAYERS * (part + exchanging)

    def splits(self, call: TracedCall) -> bool:
        """Returns whether ranks split the channels of a layer, on a mesh without a channel axis.

        Its input is not cut in space: each rank has all of it, or a part of its channels.
        """
        if call.window is None or call.groups > 1 or self._blocks.channel == 1:
            return False
        seconds = self._seconds(call, 1.0)
        is_cut = self._blocks.has_part[call.inputs[0]]
        return is_cut or self._on_channels(call, seconds) < seconds

    def _seconds(self, call: TracedCall, share: float) -> float:
        """Returns the seconds of a share of a layer, forward and backward."""
        flops = call.flops or self._trace.tensors[call.outputs[0]].nbytes / ELEMENT_BYTES
        weights = 3 * math.prod(call.weight or (0,)) * ELEMENT_BYTES * self._costs.byte
        return max(3 * flops * self._blocks.assumed * self._costs.flop * share, weights)

    def _on_channels(self, call: TracedCall, seconds: float) -> float:
        """Returns the seconds if channels are split; infinite if they can't be.

        Args:
            call: the layer.
            seconds: of all of it on one rank.
        """
        parts, out = self._blocks.channel, self._trace.tensors[call.outputs[0]]
        can = call.weight and call.groups == 1 and out.shape[1] >= parts
        if not can or self._blocks.has_channel_axis:
            return math.inf
        of_input = self._trace.tensors[call.inputs[0]].nbytes
        sizes = [n * self._blocks.assumed / ELEMENT_BYTES for n in (of_input, out.nbytes)]
        return seconds_on_channels(self._costs, parts, out.shape[1], seconds, (sizes[0], sizes[1]))
