"""Keeps a trained network on all ranks, to which the first rank deals samples or windows out."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.comm.consensus import together
from pydist.data.axes import without_flat
from pydist.errors import DataError, UsageError, in_words
from pydist.inference.loaded import load_network, values_of
from pydist.inference.windows import Sliding, Windows
from pydist.interop import ArrayLike
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.parallel import parallelize
from pydist.partition import Box
from pydist.tensor import ShardedTensor
from pydist.train.device import choose_device
from pydist.train.gather import gather_to_first_rank, scatter_from_first_rank
from pydist.train.tasks.factory import first_of

_NAP = 0.01
"""Seconds for which idle ranks sleep between two looks for work: a waiting MPI polls."""
_IDLE = {"do": "nothing"}
_END = {"do": "end"}


class Resident:
    """Trained network on all ranks of a mesh, which predicts for one rank of them.

    Each sample group computes some of the items, which are partitioned over its ranks. An item is a
    sample, or, of a network for the classes of voxels, a window of one. The first rank of all calls
    `predict`, `idle` and at last `end`, from one thread; meanwhile the others are in `follow`.

    Args:
        checkpoint: see `pydist.train.metadata.load_trained`; of any task.
        mesh: the ranks: items are dealt out along its data axis, and partitioned along the others.
        sliding: windows, for networks that predict the class of each voxel; None for full volumes.
        device: "cpu", "cuda", or "auto" for CUDA where possible, as in training.
        factory: of a network that is not pydist's own, such as "nets.py:make"; it runs only if
            it is named, as a checkpoint may be a stranger's.
        task: the same for a task that is not pydist's own.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        UsageError: windows for another task, a window that the network can't halve, "cuda" where
            it is impossible, or another factory.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        mesh: Mesh,
        sliding: Sliding | None = None,
        device: str = "auto",
        factory: str = "",
        task: str = "",
    ) -> None:
        with together(mesh.world):
            self.device = choose_device(device, mesh.world, "device")
            """The device of this rank."""
            self.loaded = load_network(checkpoint, factory, task)
            """The network, as loaded."""
            if sliding is not None:
                if self.loaded.task.multiple is None:
                    raise UsageError(
                        f"sliding windows: {self.loaded.name} predicts no classes of voxels"
                    )
                sliding.check(self.loaded.task.multiple)
            # The copy on shapes finds out which inputs the network refuses before ranks compute.
            self._on_shapes = _on_shapes(self.loaded.network)
        self.mesh, self._sliding = mesh, sliding
        self._known: dict[tuple[int, ...], str] = {}
        self._is_computing = False
        manifest = self.loaded.manifest
        shape = without_flat(manifest.sample_shape, manifest.dims)
        self._checks = self._on_shapes is not None and not self._refusal(shape)
        # A batch norm without running statistics forms those of the group's item.
        self._model = parallelize(self.loaded.network.to(self.device), mesh, batch_norm="group")

    @property
    def groups(self) -> int:
        """Number of items that are computed at a time."""
        return self.mesh.data_size

    def prepared(self, image: ArrayLike, name: str = "the image") -> Tensor:
        """Checks an image and normalizes it. Not collective.

        Args:
            image: [C, D, H, W], or [C, H, W] or [C, W] where the network was trained on such, in
                the units of the training data.
            name: names it in errors.

        Returns:
            The network's input, float32, of the same shape.

        Raises:
            DataError: another shape than the network accepts, or values that do not fit or are not
                finite.
            UsageError: the image is not an array.
        """
        values = values_of(image, name)
        if not values.size:
            raise DataError(f"{name}: the shape {values.shape} has no voxels")
        stored = self.loaded.stored(values, name)
        extents = stored.shape[1:]
        if self._sliding is None:
            multiple = self.loaded.task.multiple or 1
            if any(extent % multiple for extent in extents):
                raise DataError(
                    f"{name}: {extents} voxels; the network needs multiples of {multiple}"
                )
            if self._checks and (why := self._refusal(stored.shape)):
                raise DataError(f"{name}: the network refuses the shape {stored.shape}: {why}")
        mean = float(stored.mean(dtype=np.float64))
        if not math.isfinite(mean):
            raise DataError(f"{name}: a value is NaN or infinite")
        out = torch.empty(stored.shape)
        volume = (slice(None), *[None] * (4 - stored.ndim))  # an image is a flat one
        normalized = out.numpy()[volume]
        block = np.ascontiguousarray(stored)[volume]
        if not self.loaded.normalizer(block, 0, mean, normalized):
            raise DataError(
                f"{name}: a value is not finite after normalization "
                f'("{self.loaded.normalizer.kind}")'
            )
        return out

    def _refusal(self, shape: Sequence[int]) -> str:
        """Returns why the network refuses a shape; empty if it accepts it."""
        key = tuple(shape)
        if key not in self._known and self._on_shapes is not None:
            try:
                with torch.no_grad():
                    self._on_shapes(torch.empty((1, *key), device="meta"))
                self._known[key] = ""
            except Exception as error:  # a user's network may raise anything
                self._known[key] = in_words(error)
        return self._known[key]

    def predict(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Computes the outputs of the network. On the first rank; the others are in `follow`.

        Args:
            inputs: of the network, as `prepared` returns them; of any shapes.

        Returns:
            The output for each of them, on the host: [outputs], or the scores
            [classes, D, H, W] of volumes.
        """
        if self._sliding is None:
            return self._deal(inputs)
        return [self._by_windows(x, self._sliding) for x in inputs]

    def idle(self) -> None:
        """Tells the other ranks that there is nothing to do. On the first rank, again and again."""
        self._tell(_IDLE)

    def end(self) -> None:
        """Ends `follow` on the other ranks. On the first rank.

        After an error in `predict` while all ranks compute it sends nothing: the others do not wait
        for an order, and the error ends the job.
        """
        if not self._is_computing:
            self._tell(_END)

    def follow(self) -> None:
        """Computes what the first rank deals out, until it calls `end`. On the other ranks."""
        while True:
            order = self.mesh.world.broadcast_json(None)
            if order == _END:
                return
            if order == _IDLE:
                time.sleep(_NAP)
            else:
                self._compute(order["shapes"], None)

    def _tell(self, order: object) -> None:
        self.mesh.world.broadcast_json(order)

    def _by_windows(self, x: Tensor, sliding: Sliding) -> Tensor:
        """Computes scores by windows, of which all groups compute some at a time."""
        window = [sliding.window] * (x.ndim - 1)
        extents = [max(n, sliding.window) for n in x.shape[1:]]
        missing = [(0, m - n) for n, m in zip(x.shape[1:], extents, strict=True)]
        padded = F.pad(x[None], sum(reversed(missing), ()), mode="replicate")[0]
        windows = Windows(extents, window, sliding.overlap)
        everything = Box([0] * len(window), window)
        found: Tensor | None = None
        for first in range(0, len(windows), self.groups):
            numbers = range(first, min(first + self.groups, len(windows)))
            places = [
                (slice(None), *(slice(at, at + sliding.window) for at in windows.start(n)))
                for n in numbers
            ]
            dealt = self._deal([padded[place] for place in places])
            for number, place, scores in zip(numbers, places, dealt, strict=True):
                if found is None:
                    found = scores.new_zeros(len(scores), *extents)
                found[place] += windows.weighted(scores, number, everything)
        assert found is not None
        return found[tuple(slice(n) for n in (len(found), *x.shape[1:]))]

    def _deal(self, items: Sequence[Tensor]) -> list[Tensor]:
        self._is_computing = True
        self._tell({"do": "compute", "shapes": [tuple(item.shape) for item in items]})
        found = self._compute([tuple(item.shape) for item in items], items)
        self._is_computing = False
        return found

    @torch.no_grad()
    def _compute(
        self, shapes: Sequence[Sequence[int]], items: Sequence[Tensor] | None
    ) -> list[Tensor]:
        """Computes the items that this rank's group has; returns all outputs on the first rank.

        Item i belongs to group i modulo the number of groups. Collective.
        """
        world, mine = self.mesh.world, self.mesh.data_index
        leaders = [self.mesh.sample_size * group for group in range(self.groups)]
        leads = self.mesh.sample.rank == 0
        for i, x in enumerate(items or ()):
            if leaders[i % self.groups] != world.rank:
                world.send(x.contiguous(), leaders[i % self.groups])
        items_here = {
            i: self._received(i, shapes[i], items, leads)
            for i in range(mine, len(shapes), self.groups)
        }
        outputs: dict[int, Tensor] = {}
        for i, item in items_here.items():
            output = self._output(item, shapes[i])
            if output is not None:
                outputs[i] = output
        told = {i: (tuple(x.shape), str(x.dtype)) for i, x in outputs.items()}
        everyones = world.all_gather_json(told)
        if world.rank != 0:
            for each in outputs.values():
                world.send(each, 0)
            return []
        for rank, theirs in enumerate(everyones):
            for i, (shape, dtype) in theirs.items():
                if rank != 0:
                    kind = getattr(torch, dtype.removeprefix("torch."))
                    world.recv(outputs.setdefault(int(i), torch.empty(shape, dtype=kind)), rank)
        return [outputs[i] for i in range(len(shapes))]

    def _received(
        self, i: int, shape: Sequence[int], items: Sequence[Tensor] | None, leads: bool
    ) -> Tensor | None:
        """Returns an item on the first rank of its group; None on the others."""
        if items is not None:
            return items[i]
        if not leads:
            return None
        item = torch.empty(tuple(shape))
        self.mesh.world.recv(item, 0)
        return item

    def _output(self, item: Tensor | None, shape: Sequence[int]) -> Tensor | None:
        """Computes the network's output for an item; None but on the first rank of the group."""
        layout = layout_for_sample(self.mesh, (1, *shape))
        whole = None if item is None else item[None]
        block = scatter_from_first_rank(whole, layout, torch.float32)
        x = ShardedTensor.from_local(block.to(self.device), layout)
        found = first_of(self._model(x), self.loaded.manifest.dims).cpu()
        if isinstance(found, ShardedTensor):
            gathered = gather_to_first_rank(found)
            return None if gathered is None else gathered[0]
        return found[0].contiguous() if self.mesh.sample.rank == 0 else None


def _on_shapes(network: nn.Module) -> nn.Module | None:
    """Returns a copy that computes shapes; None of a network that has none, as with weight norm."""
    try:
        return copy.deepcopy(network).to("meta")
    except Exception:  # a user's network may raise anything
        return None


def labels_of(scores: Tensor) -> npt.NDArray[np.generic]:
    """Returns the class with the highest score for each voxel: uint8, or uint16 for many classes.

    Args:
        scores: [classes, D, H, W], or of fewer dims.

    Raises:
        DataError: a score is NaN.
    """
    if scores.isnan().any():
        raise DataError("the network's scores for this input have NaN")
    kind = "uint8" if len(scores) <= 256 else "uint16"
    return scores.argmax(0).numpy().astype(kind)
