"""The ways to do a training step of CosmoFlow that `cosmoflow_step.py` and `memory.py` run."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from conv_contestants import conv_onednn
from quiet import Quiet
from torch import Tensor, nn

import pydist
from pydist.comm import Transport
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.optim import gather_gradients, sharded

RATE = 1e-4


class Plain:
    """torch as it is, on the whole samples."""

    def __init__(
        self, model: nn.Module, threads: int, onednn: bool = False, rate: float = RATE
    ) -> None:
        self._model, self._threads = model, threads
        self._optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        for module in model.modules() if onednn else ():
            if isinstance(module, nn.Conv3d):
                module.forward = partial(_forward_onednn, module)

    def prepare(self, x: Tensor, target: Tensor) -> None:
        """Takes the data of the next step; not timed."""
        self.take(x, target)

    def take(self, shard: Tensor, target: Tensor) -> None:
        """Takes this rank's part of it: the whole."""
        torch.set_num_threads(self._threads)
        self._x, self._target = shard, target

    def step(self, check: bool = False) -> Any:
        """A training step.

        Args:
            check: stop before the optimizer.

        Returns:
            The loss; to check it, the gradients as well.
        """
        self._optimizer.zero_grad()
        loss = F.mse_loss(self._model(self._x), self._target)
        loss.backward()
        if check:
            return loss.item(), self.grads()
        self._optimizer.step()
        return loss.item()

    def grads(self) -> list[Tensor]:
        return [p.grad.clone() for p in self._model.parameters()]

    def state_bytes(self) -> int:
        """What the optimizer holds on this rank."""
        optimizer = getattr(self._optimizer, "_inner", self._optimizer)
        states = optimizer.state.values()
        return sum(v.nbytes for state in states for v in state.values() if torch.is_tensor(v))


class Pydist(Plain):
    """pydist, on shards as a loader gives them; with silent transports a bound for it."""

    def __init__(
        self,
        model: nn.Module,
        world: Transport,
        spatial: tuple[int, int, int],
        silent_halo: bool = False,
        silent_gradients: bool = False,
        share: Literal["auto", "never"] = "auto",
    ) -> None:
        self._activations, self._gradients = Quiet(world), Quiet(world)
        measured = silent_halo or silent_gradients
        self._mesh = Mesh(self._activations if measured else world, 1, spatial)
        if measured:
            # Halos and statistics go through the mesh's groups, which are made now; gradients and
            # parameters go through its world.
            self._mesh.world = self._gradients
        # Ranks that do not reduce gradients would part; at rate 0 the optimizer works as much.
        rate = 0.0 if measured else RATE
        parallel = pydist.parallelize(model, self._mesh)
        super().__init__(parallel, torch.get_num_threads(), rate=rate)
        self._optimizer = sharded(self._optimizer, parallel, share)
        self._activations.quiet, self._gradients.quiet = silent_halo, silent_gradients

    def prepare(self, x: Tensor, target: Tensor) -> None:
        layout = layout_for_sample(self._mesh, x.shape)
        mine = tuple(slice(lo, hi) for lo, hi in zip(layout.box.lo, layout.box.hi, strict=True))
        self.take(x[mine].contiguous(), target)

    def take(self, shard: Tensor, target: Tensor) -> None:
        """Takes this rank's shard of the next step's data."""
        shape = (*shard.shape[:2], *(self._model.input_shape[1:]))
        layout = layout_for_sample(self._mesh, shape)
        self._x = pydist.ShardedTensor.from_local(shard, layout)
        self._target = target

    def grads(self) -> list[Tensor]:
        gather_gradients(self._model)
        return super().grads()

    def kept(self) -> int:
        """Bytes that were given to be sent and were not."""
        return self._activations.kept + self._gradients.kept


class AllReduce:
    """One bare MPI all-reduce of as many bytes as the model has gradients, written anew."""

    def __init__(self, model: nn.Module) -> None:
        self._bytes = torch.empty(sum(p.numel() for p in model.parameters()))

    def prepare(self, x: Tensor, target: Tensor) -> None:
        self._bytes.uniform_(-1, 1)

    def step(self, check: bool = False) -> Any:
        from mpi4py import MPI

        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self._bytes.numpy())
        return (0.0, None) if check else 0.0


def _forward_onednn(module: Any, x: Tensor) -> Tensor:
    return conv_onednn(x, module.weight, module.bias, module.padding, module.stride)
