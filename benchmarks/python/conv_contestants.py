"""Defines the implementations of four 3×3×3 convolutions with ReLU that `conv_stack.py` compares.

Each gets this rank's part of the input, `[1, 4, D, H, W]`, contiguous as from a loader, and returns
its part of the output; then it gets dL/dy and returns the gradients of all parameters, summed over
the ranks.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from silenced_transport import SilencedTransport, as_transport
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh

import pydist
from pydist.comm import Transport
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh

CHANNELS = (4, 16, 16, 16, 16)
LAYERS = len(CHANNELS) - 1

Exchange = Callable[[dict[int, Tensor], dict[int, Tensor]], None]
"""Sends tensors to neighbors and fills those received from them, by rank."""


def network(inplace: bool = False) -> nn.Sequential:
    """Creates the stack, with the same weights for all."""
    generator = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(CHANNELS):
        conv = nn.Conv3d(inside, outside, 3, padding=1)
        with torch.no_grad():
            for each in conv.parameters():
                bound = (27 * inside) ** -0.5
                each.uniform_(-bound, bound, generator=generator)
        layers += [conv, nn.ReLU(inplace=inplace)]
    return nn.Sequential(*layers)


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the parameters' gradients, for comparison."""
    return [p.grad for p in parameters if p.grad is not None]


def summed(grads: Sequence[Tensor], reduce: Callable[[Tensor], object]) -> list[Tensor]:
    """Sums gradients over all ranks with one all-reduce."""
    flat = torch.cat([g.reshape(-1) for g in grads])
    reduce(flat)
    pieces = flat.split([g.numel() for g in grads])
    return [piece.view(g.shape) for piece, g in zip(pieces, grads, strict=True)]


class Contestant(ABC):
    """Base of the implementations that run the stack on this rank."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def backward(self, grad: Tensor) -> list[Tensor]: ...


class Plain(Contestant):
    """Contestant that runs plain torch on the full sample."""

    def __init__(self, threads: int, inplace: bool = False) -> None:
        self._threads, self._model = threads, network(inplace)

    def forward(self, x: Tensor) -> Tensor:
        torch.set_num_threads(self._threads)
        self._model.zero_grad()
        self._y = self._model(x)
        return self._y

    def backward(self, grad: Tensor) -> list[Tensor]:
        y = self._y
        del self._y
        y.backward(grad)
        return gradients(self._model.parameters())


class Layered(Contestant):
    """Contestant that runs the stack convolution by convolution, with a given function."""

    def __init__(
        self,
        convolve: Callable[[Tensor, Tensor, Tensor], Tensor],
        reduce: Callable[[Tensor], None] | None = None,
        inplace: bool = False,
        threads: int = 1,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self._convolve, self._reduce = convolve, reduce
        self._relu = F.relu_ if inplace else F.relu
        self._threads, self._format = threads, memory_format
        self._parameters = list(network().parameters())

    def forward(self, x: Tensor) -> Tensor:
        torch.set_num_threads(self._threads)
        for parameter in self._parameters:
            parameter.grad = None
        x = x.to(memory_format=self._format)
        for weight, bias in zip(self._parameters[::2], self._parameters[1::2], strict=True):
            x = self._relu(self._convolve(x, weight, bias))
        self._y = x
        return x

    def backward(self, grad: Tensor) -> list[Tensor]:
        y = self._y
        del self._y
        y.backward(grad)
        grads = gradients(self._parameters)
        return grads if self._reduce is None else summed(grads, self._reduce)


class Blocked(Contestant):
    """Contestant that exchanges nothing and keeps activations in oneDNN's blocked layout."""

    def __init__(self) -> None:
        self._parameters = [p.detach() for p in network().parameters()]

    def forward(self, x: Tensor) -> Tensor:
        self._activations = [x.to_mkldnn()]
        for weight, bias in zip(self._parameters[::2], self._parameters[1::2], strict=True):
            out = _onednn(self._activations[-1], weight, bias)
            self._activations.append(torch.relu_(out))
        return self._activations[-1].to_dense()

    def backward(self, grad: Tensor) -> list[Tensor]:
        grads: list[Tensor] = []
        grad = grad.to_mkldnn()
        for weight in reversed(self._parameters[::2]):
            grad = torch.ops.aten.threshold_backward(grad, self._activations.pop(), 0)
            wanted = len(self._activations) > 1
            grad, *pair = _convolution_backward(
                grad, self._activations[-1], weight, (1, 1, 1), [wanted, True, True]
            )
            grads[:0] = pair
        return grads


class Pydist(Contestant):
    """Contestant that runs pydist, as a user calls it on a loader's shards."""

    def __init__(self, world: Transport, inplace: bool = False, quiet: bool = False) -> None:
        transport = SilencedTransport(world)
        self._mesh = Mesh(as_transport(transport) if quiet else world, 1, (world.size, 1, 1))
        self._model = pydist.parallelize(network(inplace), self._mesh)
        transport.quiet = quiet

    def forward(self, x: Tensor) -> Tensor:
        self._model.zero_grad()
        shape = (*x.shape[:2], x.shape[2] * self._mesh.size, *x.shape[3:])
        sharded = pydist.ShardedTensor.from_local(x, layout_for_sample(self._mesh, shape))
        self._y = self._model(sharded).to_local()
        return self._y

    def backward(self, grad: Tensor) -> list[Tensor]:
        y = self._y
        del self._y
        y.backward(grad)
        return gradients(self._model.parameters())


# -- handwritten splits ---------------------------------------------------------------------


def by_hand(rank: int, size: int, exchange: Exchange, convolve: Any) -> Any:
    """Returns a convolution that receives the neighbors' planes and concatenates them."""

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return convolve(_Halo.apply(x, rank, size, exchange), weight, bias, (0, 1, 1))

    return run


class _Halo(Function):
    """Function that concatenates a plane of depth from each neighbor, and zeros at the ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, size: int, exchange: Exchange) -> Tensor:
        ctx.place = rank, size, exchange
        first, last = x[:, :, :1], x[:, :, -1:]
        before, after = torch.zeros_like(first), torch.zeros_like(last)
        exchange(
            _neighbors(rank, size, first.contiguous(), last.contiguous()),
            _neighbors(rank, size, before, after),
        )
        return torch.cat([before, x, after], 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rank, size, exchange = ctx.place
        before, own, after = grad[:, :, :1], grad[:, :, 1:-1], grad[:, :, -1:]
        first, last = torch.zeros_like(before), torch.zeros_like(after)
        exchange(
            _neighbors(rank, size, before.contiguous(), after.contiguous()),
            _neighbors(rank, size, first, last),
        )
        own[:, :, :1] += first
        own[:, :, -1:] += last
        return own, None, None, None


def _neighbors(rank: int, size: int, lower: Tensor, upper: Tensor) -> dict[int, Tensor]:
    found = {rank - 1: lower, rank + 1: upper}
    return {peer: each for peer, each in found.items() if 0 <= peer < size}


def exchange_gloo(sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> None:
    """Exchanges tensors by `batch_isend_irecv` of torch.distributed."""
    operations = [dist.P2POp(dist.irecv, each, peer) for peer, each in recvs.items()]
    operations += [dist.P2POp(dist.isend, each, peer) for peer, each in sends.items()]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def exchange_mpi(sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> None:
    """Exchanges tensors by Isend and Irecv of mpi4py."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    requests = [world.Irecv(each.numpy(), peer) for peer, each in recvs.items()]
    requests += [world.Isend(each.numpy(), peer) for peer, each in sends.items()]
    MPI.Request.Waitall(requests)


def reduce_gloo(flat: Tensor) -> None:
    dist.all_reduce(flat)


def reduce_mpi(flat: Tensor) -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())


# -- convolutions on one rank ---------------------------------------------------------------


def conv_torch(x: Tensor, weight: Tensor, bias: Tensor, padding: Any = 1) -> Tensor:
    """Convolves with the kernel that torch chooses."""
    return F.conv3d(x, weight, bias, padding=padding)


def conv_onednn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int] = (1, 1, 1),
    stride: Sequence[int] = (1, 1, 1),
) -> Tensor:
    """Convolves with oneDNN forward and backward, also where torch would use its slow path."""
    return _OneDnn.apply(x, weight, bias, padding, stride)


class _OneDnn(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: Sequence[int],
        stride: Sequence[int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.stride, ctx.biased = padding, stride, bias is not None
        return _onednn(x, weight, bias, padding, stride)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], True, ctx.biased]
        # A conversion loses channels-last, which torch passes to oneDNN by itself (large shards).
        plain = x.is_contiguous()
        dx, dw, db = _convolution_backward(
            grad.to_mkldnn() if plain else grad,
            x.to_mkldnn() if plain else x,
            weight,
            ctx.padding,
            wanted,
            ctx.stride,
        )
        return dx.to_dense() if plain and dx is not None else dx, dw, db, None, None


def _onednn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int] = (1, 1, 1),
    stride: Sequence[int] = (1, 1, 1),
) -> Tensor:
    return torch.mkldnn_convolution(x, weight, bias, padding, stride, (1, 1, 1), 1)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    wanted: list[bool],
    stride: Sequence[int] = (1, 1, 1),
) -> Any:
    biases, ones, zeros = [weight.shape[0]], (1, 1, 1), (0, 0, 0)
    return torch.ops.aten.convolution_backward(
        grad, x, weight, biases, stride, padding, ones, False, zeros, 1, wanted
    )


# -- packages -------------------------------------------------------------------------------


class ShardTensorRival(Contestant):
    """Contestant that uses `ShardTensor` of NVIDIA's physicsnemo."""

    def __init__(self) -> None:
        from physicsnemo.domain_parallel import ShardTensor
        from physicsnemo.domain_parallel.shard_utils import conv_patches
        from torch.distributed.tensor import Shard

        # Its convolution; the package itself enables it only with a GPU.
        assert conv_patches is not None
        self._shards, self._kind = [Shard(2)], ShardTensor
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._model = network()

    def forward(self, x: Tensor) -> Tensor:
        self._model.zero_grad()
        # It can infer the shapes, but only with pinned memory, that is, with a GPU.
        shapes = {0: [tuple(x.shape)] * self._mesh.size()}
        sharded = self._kind.from_local(x, self._mesh, self._shards, sharding_shapes=shapes)
        self._y = self._model(sharded).to_local()
        return self._y

    def backward(self, grad: Tensor) -> list[Tensor]:
        y = self._y
        del self._y
        y.backward(grad)
        # Each convolution reduces the gradients of its own weights.
        return gradients(self._model.parameters())


class DistConvRival(Contestant):
    """Contestant that uses `DCTensor` of LBANN's DistConv, and all-reduces gradients over gloo."""

    def __init__(self) -> None:
        from distconv import DCTensor, ParallelStrategy

        self._strategy = ParallelStrategy(dist.get_world_size(), 2, device_type="cpu")
        self._kind, self._model = DCTensor, network()

    def forward(self, x: Tensor) -> Tensor:
        self._model.zero_grad()
        self._y = self._model(self._kind.from_shard(x, self._strategy))
        return self._y._tensor

    def backward(self, grad: Tensor) -> list[Tensor]:
        y = self._y
        del self._y
        y.backward(self._kind.from_shard(grad, self._strategy))
        return summed(gradients(self._model.parameters()), reduce_gloo)


class DTensorRival(Contestant):
    """torch's own DTensor."""

    def __init__(self) -> None:
        from torch.distributed.tensor import DTensor, Shard, distribute_module

        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._kind, self._shards = DTensor, [Shard(2)]
        self._model = distribute_module(network(), self._mesh)

    def forward(self, x: Tensor) -> Tensor:
        self._model.zero_grad()
        self._y = self._model(self._kind.from_local(x, self._mesh, self._shards)).to_local()
        return self._y

    def backward(self, grad: Tensor) -> list[Tensor]:
        y = self._y
        del self._y
        y.backward(grad)
        grads = gradients(self._model.parameters())
        return [g.full_tensor() for g in grads if isinstance(g, self._kind)]
