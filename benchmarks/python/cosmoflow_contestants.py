"""Runs training steps of CosmoFlow in the ways that `cosmoflow_step.py` and `memory.py` compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
import torch.nn.functional as F
from conv_contestants import conv_onednn, gradients
from silenced_transport import Noting, SilencedTransport, as_transport
from torch import Tensor, nn

import pydist
from pydist.comm import Transport
from pydist.entry_hook import entry_hook_of
from pydist.gradients.forms.form import DenseForm
from pydist.gradients.forms.messages import Messages
from pydist.gradients.partitioned_bucket import PartitionedBucket
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.optim import gather_gradients, sharded
from pydist.optim.partitioned import ShardedOptimizer

RATE = 1e-4

Loss = Callable[[Tensor, Tensor], Tensor]


class Plain:
    """Contestant that trains in plain torch on the full samples.

    Attributes:
        exposed_seconds: over all steps so far, the time from the end of backward to the end of the
            reductions, and from the optimizer's step to the gather of parameters.
    """

    exposed_seconds = 0.0

    def __init__(
        self,
        model: nn.Module,
        threads: int,
        onednn: bool = False,
        rate: float = RATE,
        loss: Loss = F.mse_loss,
    ) -> None:
        self._model, self._threads, self._loss = model, threads, loss
        self._optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        for module in model.modules() if onednn else ():
            if isinstance(module, nn.Conv3d):
                vars(module)["forward"] = partial(_forward_onednn, module)

    def prepare(self, x: Tensor, target: Tensor) -> None:
        """Sets the data of the next step; not timed."""
        self.take(x, target)

    def take(self, shard: Tensor, target: Tensor) -> None:
        """Sets this rank's shard of the data, which is all of it."""
        torch.set_num_threads(self._threads)
        self._x, self._target = shard, target

    def step(self, check: bool = False) -> Any:
        """Runs a training step.

        Args:
            check: whether to stop before the optimizer.

        Returns:
            The loss; with `check`, also the gradients.
        """
        self._optimizer.zero_grad()
        loss = self._loss(self._model(self._x), self._target)
        loss.backward()
        if check:
            return loss.item(), self.grads()
        self._optimizer.step()
        return loss.item()

    def grads(self) -> list[Tensor]:
        return [grad.clone() for grad in gradients(self._model.parameters())]

    def state_bytes(self) -> int:
        """Returns the size of the optimizer's state on this rank."""
        optimizer = getattr(self._optimizer, "_inner", self._optimizer)
        states = optimizer.state.values()
        return sum(v.nbytes for state in states for v in state.values() if torch.is_tensor(v))


class Pydist(Plain):
    """Contestant that trains with pydist on shards; with silent transports, it gives the bound."""

    def __init__(
        self,
        model: nn.Module,
        world: Transport,
        spatial: tuple[int, int, int],
        silent_halo: bool = False,
        silent_gradients: bool = False,
        share: Literal["auto", "never"] = "auto",
        loss: Loss = F.mse_loss,
    ) -> None:
        self._activations, self._gradients = SilencedTransport(world), SilencedTransport(world)
        measured = silent_halo or silent_gradients
        self._mesh = Mesh(as_transport(self._activations) if measured else world, 1, spatial)
        if measured:
            # Halos and statistics use the mesh's existing groups; gradients and parameters use its
            # world.
            self._mesh.world = as_transport(self._gradients)
        # Without reductions, parameters would diverge between ranks; rate 0 costs the same time.
        rate = 0.0 if measured else RATE
        parallel = pydist.parallelize(model, self._mesh)
        super().__init__(parallel, torch.get_num_threads(), rate=rate, loss=loss)
        self._optimizer = sharded(self._optimizer, parallel, share)
        waits: list[tuple[Any, str]] = [(entry_hook_of(parallel).reducer, "_finish")]
        if isinstance(self._optimizer, ShardedOptimizer):
            gathering = ("_start_gathering_values", "_finish_gathering_values")
            waits += [(self._optimizer, name) for name in gathering]
        for owner, name in waits:
            setattr(owner, name, self._timed(getattr(owner, name)))
        self._activations.quiet, self._gradients.quiet = silent_halo, silent_gradients

    def prepare(self, x: Tensor, target: Tensor) -> None:
        layout = layout_for_sample(self._mesh, x.shape)
        mine = layout.box.slices
        self._x = pydist.ShardedTensor.from_local(x[mine].contiguous(), layout)
        self._target = target

    def take(self, shard: Tensor, target: Tensor) -> None:
        """Sets this rank's shard of the next step's data; all ranks have shards of one shape."""
        edges = zip(shard.shape[2:], self._mesh.spatial, strict=True)
        shape = (*shard.shape[:2], *(edge * count for edge, count in edges))
        layout = layout_for_sample(self._mesh, shape)
        self._x = pydist.ShardedTensor.from_local(shard, layout)
        self._target = target

    def grads(self) -> list[Tensor]:
        gather_gradients(self._model)
        return super().grads()

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            start = perf_counter()
            function(*args)
            self.exposed_seconds += perf_counter() - start

        return call

    def exposed(self) -> float:
        """Returns gradients and parameters that a step waits for, as bytes of an all-reduce."""
        reducer = entry_hook_of(self._model).reducer
        (lane,) = reducer.members.lanes
        assert isinstance(lane.form, DenseForm)
        users: list[Messages | PartitionedBucket] = [lane.form.messages, *lane.partitioned]
        transport, noting = lane.transport, Noting(lane.transport)
        for user in users:
            user.transport = as_transport(noting)
        self.step()
        for user in users:
            user.transport = transport
        return noting.exposed

    def kept(self) -> int:
        """Returns the bytes of suppressed messages."""
        return self._activations.kept + self._gradients.kept


class AllReduce:
    """One bare all-reduce, by MPI if ranks are processes, of numbers rewritten each time."""

    exposed_seconds = 0.0

    def __init__(self, world: Transport, elements: int) -> None:
        self._world = world
        self._numbers = torch.empty(elements)
        self.nbytes = self._numbers.nbytes

    def prepare(self, x: Tensor, target: Tensor) -> None:
        self._numbers.uniform_(-1, 1)

    def step(self, check: bool = False) -> Any:
        if self._world.name == "mpi":
            from mpi4py import MPI

            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self._numbers.numpy())
        else:
            self._world.all_reduce(self._numbers)
        return (0.0, None) if check else 0.0


def _forward_onednn(module: Any, x: Tensor) -> Tensor:
    return conv_onednn(x, module.weight, module.bias, module.padding, module.stride)
