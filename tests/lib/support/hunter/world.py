"""Provides the names in a program's statements, on one device or on one rank of a mesh."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel

from pydist import Layout, Mesh, ShardedTensor, distribute_tensor, parallelize
from pydist.optim import gather_gradients, sharded
from support.equivalence import jittered, layout_at, randint, randn
from support.equivalence.one_device import with_noise
from support.hunter.program import Program
from support.networks.small import initialized
from support.random_networks.blocks import checkpointed, make

OVER = ("same", "rows", "share", "mean", "together")
"""Relations between the values of the data groups and the value of one device: `same` are equal to
it, `rows` are concatenated, `share` are rows of a gradient of the group's mean loss, `mean` are
means over the group's samples. `together` are only compared with each other."""


POOLS_1D = (nn.AvgPool1d, nn.MaxPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)
"""Pools whose results are views made by torch: it drops their hooks when they change in place."""


class Boom(KeyError):
    """Error that a program's own hooks raise, and that the program catches."""


class Seen(NamedTuple):
    """Value that a program saw, with its properties that must be equal.

    Attributes:
        over: a value of `OVER`.
        value: a full tensor, or anything that `==` compares.
        facts: shape, dtype and other properties that must be equal.
    """

    over: str
    value: Any
    facts: tuple[Any, ...]


class World:
    """The environment of one run of a program: plain torch if `mesh` is None."""

    def __init__(self, program: Program, mesh: Mesh | None, noise: int | None = None) -> None:
        self.program, self.mesh, self.noise = program, mesh, noise
        self.seen: dict[str, list[Seen]] = {}
        self.shared: set[int] = set()
        first = sum(program.groups[: mesh.data_index]) if mesh is not None else 0
        last = first + program.groups[mesh.data_index] if mesh is not None else program.batch
        self.first_sample, self.rows_of_group = first, slice(first, last)
        if mesh is not None and mesh.size == 1:  # the reference of random numbers
            self.first_sample, self.rows_of_group = 0, slice(None)
        self._names: dict[str, Any] = {}

    def names(self) -> dict[str, Any]:
        """Returns the namespace of the statements."""
        tools = {name: getattr(self, name) for name in TOOLS}
        looker = self.program.looker
        mesh = self.mesh
        here = looker >= 0 if mesh is None or mesh.size == 1 else mesh.rank == looker
        return {
            **tools, "torch": torch, "nn": nn, "F": F, "copy": copy, "checkpointed": checkpointed,
            "averaged": AveragedModel, "here": here, "Boom": Boom, "params": params,
            "trained": trained, "adapted": adapted, "pick": pick, "part": part, "scaled": scaled,
            "reloaded": reloaded, "swap": swap, "swapped": swapped, "spectral": spectral,
            "tie": tie, "boom": boom, "raising": raising, "full": full, "local": local,
            "into": into, "calm": contextlib.nullcontext,
        }  # fmt: skip

    def run(self) -> tuple[int, Exception] | None:
        """Runs the statements; returns the number and the error of one that raised."""
        names = self._names = self.names()
        for i, statement in enumerate(self.program.statements):
            try:
                exec(compile(statement, f"<statement {i}>", "exec"), names)
            except Exception as error:
                return i, error
        return None

    def has_changed_plain_tensors(self) -> bool:
        """Returns whether an in-place call has changed this rank's block of a plain tensor."""
        return any(hasattr(value, "_pydist_changed") for value in self._names.values())

    # -- functions that statements call -----------------------------------------------------

    def net(self, name: str) -> nn.Module:
        """Creates a network of the program, equal at every call."""
        layers = self.program.networks[name]
        index = list(self.program.networks).index(name)
        model = initialized(nn.Sequential(*map(make, layers)), index)
        self.stir(model)
        if self.mesh is None:
            for layer in model.modules():
                if isinstance(layer, POOLS_1D):
                    layer.register_forward_hook(_without_base)
        if self.noise is not None and self.noise % 2:
            model = with_noise(model, self.noise)
        return model

    def stir(self, model: nn.Module) -> None:
        """Adds the noise to the parameters again, after rounding or limits have removed it."""
        if self.noise is not None:
            for p in model.parameters():
                p.data.copy_(jittered(p, self.noise))

    def number(self, *shape: int, seed: int = 0) -> nn.Parameter:
        """Creates a parameter outside of networks."""
        return nn.Parameter(randn(*shape, seed=1000 + seed) * 0.3)

    def ready(self, model: nn.Module, **options: Any) -> nn.Module:
        return model if self.mesh is None else parallelize(model, self.mesh, **options)

    def rows(self, seed: int, leaf: bool = False) -> Tensor:
        """Returns this group's samples of an input, as a plain tensor."""
        x = randn(self.program.batch, *self.program.sample, seed=500 + seed)
        x = x if self.noise is None else jittered(x, self.noise + 10 * seed)
        return x[self.rows_of_group].clone().requires_grad_(leaf)

    def cut(self, seed: int, leaf: bool = False, names_first: bool = True) -> Tensor:
        """Returns an input, cut at the program's points; may leave its first sample unnamed."""
        x = self.rows(seed)
        if self.mesh is not None:
            layout = self.layout(x)
            first = self.first_sample if names_first else None
            if layout is None:
                x = distribute_tensor(x, self.mesh, first_sample=first)
            else:
                box = layout.box
                index = box.slices
                x = ShardedTensor.from_local(x[index].clone(), layout, first)
        return x.requires_grad_(leaf)

    def layout(self, x: Tensor) -> Layout | None:
        assert self.mesh is not None
        if not self.program.points or self.mesh.size == 1:
            return None if x.dim() == 5 else layout_at(self.mesh, x.shape, [None] * (x.dim() - 2))
        return layout_at(self.mesh, x.shape, self.program.points)

    def like(self, y: Tensor, seed: int = 0) -> Tensor:
        """Returns this group's rows of a plain normal random tensor with the shape of `y`."""
        return randn(self.program.batch, *y.shape[1:], seed=700 + seed)[self.rows_of_group]

    def labels(self, y: Tensor, seed: int = 0) -> Tensor:
        """Returns this group's classes for logits y."""
        found = randint(y.shape[1], self.program.batch, *y.shape[2:], seed=800 + seed)
        return found[self.rows_of_group]

    def no_sync(self, model: nn.Module) -> Any:
        return contextlib.nullcontext() if self.mesh is None else model.no_sync()  # type: ignore[operator]

    def share(self, optimizer: Any, model: nn.Module) -> Any:
        """Returns the optimizer as a partitioned optimizer (ZeRO-1)."""
        if self.mesh is None:
            return optimizer
        self.shared.add(id(model))
        return sharded(optimizer, model, "always")

    def see(self, name: str, value: Any, over: str = "same") -> None:
        """Records a value for the comparison."""
        several = isinstance(value, tuple) or (
            isinstance(value, list) and any(isinstance(each, Tensor) for each in value)
        )
        for each in value if several else [value]:
            self.seen.setdefault(name, []).append(_seen(each, over))

    def see_model(self, name: str, model: nn.Module, over: str = "same") -> None:
        """Records parameters, their gradients, and buffers."""
        if id(model) in self.shared:
            gather_gradients(model)
        for path, p in model.named_parameters():
            self.see(f"{name}.{path}", p, over)
            # Detached: torch makes some graphs (create_graph) that end nowhere.
            self.see(f"{name}.{path}.grad", None if p.grad is None else p.grad.detach(), over)
        for path, b in model.named_buffers():
            self.see(f"{name}.{path}", b, over)


TOOLS = (
    "net", "number", "ready", "rows", "cut", "like", "labels", "no_sync", "share", "see",
    "see_model", "stir",
)  # fmt: skip


def _seen(value: Any, over: str) -> Seen:
    if isinstance(value, (list, float, np.ndarray)):  # compared like tensors
        return Seen(over, torch.tensor(value), (type(value).__name__,))
    if not isinstance(value, Tensor):
        return Seen(over, value, (type(value).__name__,))
    whole = full(value.detach()).detach().clone()
    shape = tuple(whole.shape[1:] if over in ("rows", "share") else whole.shape)
    return Seen(over, whole, (shape, whole.dtype, bool(value.requires_grad)))


def _without_base(_layer: nn.Module, _args: Any, y: Any) -> Any:
    return y.clone() if isinstance(y, Tensor) else y


def full(x: Tensor) -> Tensor:
    """Returns the full tensor."""
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def local(x: Tensor) -> Tensor:
    """Returns this rank's block."""
    return x.to_local() if isinstance(x, ShardedTensor) else x


def params(*models: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters for an optimizer."""
    return list({id(p): p for m in models for p in m.parameters()}.values())


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that have gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def adapted(model: nn.Module, x: Any, number: int, *, computed: bool) -> tuple[Tensor | None, ...]:
    """Computes gradients of fast weights, copies of the weights after `number` steps."""
    weights: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not computed:
        weights = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
    grads: tuple[Tensor | None, ...] = ()
    for _ in range(1 + number):
        loss = torch.func.functional_call(model, weights, (x,)).square().mean()
        asked = list(weights.values())
        grads = torch.autograd.grad(loss, asked, create_graph=computed, allow_unused=True)
        weights = {
            n: w if g is None else w - 0.05 * g
            for (n, w), g in zip(weights.items(), grads, strict=True)
        }
        if not computed:
            weights = {n: w.detach().requires_grad_() for n, w in weights.items()}
    return grads


def pick(model: nn.Module, number: int) -> nn.Parameter:
    """Returns one of the parameters."""
    found = list(model.parameters())
    return found[number % len(found)]


def part(model: nn.Module, number: int) -> nn.Module:
    """Returns one of the layers."""
    found = [m for m in model.modules() if not any(m.children())]
    return found[number % len(found)]


def into(layer: nn.Module) -> str:
    """Returns the `over` of a gradient into a layer; a parametrization's input has no rows."""
    return "mean" if type(layer).__module__ == spectral_norm.__module__ else "share"


def tie(a: nn.Module, b: nn.Module) -> None:
    """Makes two networks of the same layers share their largest weight."""
    pairs: Iterator[tuple[Any, Any]] = zip(a.modules(), b.modules(), strict=True)
    found = [p for p in pairs if isinstance(getattr(p[0], "weight", None), nn.Parameter)]
    x, y = max(found, key=lambda pair: pair[0].weight.numel())
    y.weight = x.weight


def scaled(state: dict[str, Tensor], factor: float = 0.9) -> dict[str, Tensor]:
    """Returns a state dict with scaled values, in its own memory."""
    return {k: v * factor if v.is_floating_point() else v.clone() for k, v in state.items()}


def reloaded(state: Any) -> Any:
    """Returns `state` after saving and loading it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@torch.no_grad()
def swap(one: nn.Module, other: nn.Module) -> None:
    """Swaps the parameters of two networks, value by value."""
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        before = a.detach().clone()
        a.data.copy_(b.data)
        b.data.copy_(before)


@torch.no_grad()
def swapped(model: nn.Module, average: nn.Module, x: Tensor) -> Tensor:
    """Returns the model's output with averaged weights, and restores its own weights."""
    own = [p.detach().clone() for p in model.parameters()]
    for p, a in zip(model.parameters(), average.parameters(), strict=True):
        p.data.copy_(a.data)
    y = model(x)
    for p, before in zip(model.parameters(), own, strict=True):
        p.data.copy_(before)
    return y


def spectral(model: nn.Module, number: int) -> None:
    """Divides the weight of a convolution by its spectral norm."""
    found = [m for m in model.modules() if hasattr(m, "transposed")]
    layer = found[number % len(found)]
    spectral_norm(layer)
    estimate: Any = layer.parametrizations.weight[-1]  # type: ignore[union-attr, index]
    with torch.no_grad():
        # Does not draw from torch's global generator, which rank-threads share.
        estimate._u.copy_(F.normalize(randn(*estimate._u.shape, seed=900), dim=0))
        estimate._v.copy_(F.normalize(randn(*estimate._v.shape, seed=901), dim=0))


def boom(*_: Any) -> None:
    """Raises `Boom`; programs register this function as a hook."""
    raise Boom("a hook of the program")


@contextlib.contextmanager
def raising(register: Callable[..., Any]) -> Iterator[None]:
    """Registers the hook `boom` inside the context, and suppresses its error."""
    handle = register(boom)
    try:
        yield
    except Boom:
        pass
    finally:
        handle.remove()
