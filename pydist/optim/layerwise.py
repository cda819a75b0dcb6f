"""LARS and LAMB, whose step of a parameter depends on the norms of the whole parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import UsageError
from pydist.exchange.own_slice import own_slice

ParameterGroup = dict[str, Any]
Sums = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Adds the sums of squares [2, P] of P parameters over the ranks that hold parts of them."""


def is_vector(parameter: Tensor) -> bool:
    """Returns whether a parameter is a bias or belongs to a norm: at most one dim."""
    return parameter.dim() <= 1


class LayerwiseOptimizer(Optimizer):
    """An optimizer that scales the step of each parameter by its trust ratio.

    Parameters that `exclude` names, by default biases and norms' weights, form groups of their own,
    with ``adapt`` and ``weight_decay`` off: their ratio is 1. The ratio is 1 as well where one of
    the two norms is 0. Norms are formed in float32, or in float64 for parameters of that type.

    Args:
        params: parameters, or groups of them; a group with ``adapt`` is not divided.
        defaults: settings of groups.
        exclude: whether a parameter is excluded.
        adapt: whether the others have trust ratios.
    """

    _exclude: Callable[[Tensor], bool] | None = None
    _sums: Sums | None = None
    recorded: dict[int, Tensor] | None = None
    """If set, steps add norm of the parameter, norm of its direction and ratio, [3], by the id of
    the parameter or of this rank's part; see `trust_ratios`."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: ParameterGroup,
        exclude: Callable[[Tensor], bool] | None,
        *,
        adapt: bool = True,
    ) -> None:
        for name, given in defaults.items():
            if isinstance(given, float | int) and not given >= 0:
                raise UsageError(f"{name}={given}: expected a number >= 0")
        self._exclude = exclude
        super().__init__(params, {**defaults, "adapt": adapt})

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_exclude": self._exclude}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of another optimizer, perhaps
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: ParameterGroup) -> None:
        """Adds a group of parameters; excluded ones become a group of their own."""
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        named = bool(parameters) and not isinstance(parameters[0], Tensor)
        if "adapt" in param_group or self._exclude is None:
            super().add_param_group({**param_group, "params": parameters})
            return
        excluded = [self._exclude(each[1] if named else each) for each in parameters]
        for adapts in (True, False):
            some = [p for p, out in zip(parameters, excluded, strict=True) if out != adapts]
            if some:
                added = {**param_group, "params": some}
                off = {} if adapts else {"adapt": False, "weight_decay": 0.0}
                super().add_param_group({**added, **off})

    @contextmanager
    def summed_by(self, sums: Sums) -> Iterator[None]:
        """Lets steps in the `with` block complete sums of squares of parameters in parts.

        Args:
            sums: called once for each step, as sums(parameters, squares).
        """
        self._sums = sums
        try:
            yield
        finally:
            self._sums = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient.

        Args:
            closure: re-evaluates the loss, with gradients; called once.

        Returns:
            The result of the closure; None without one.

        Raises:
            UsageError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = [
            (group, parameters, self._directions(group, parameters))
            for group in self.param_groups
            if (parameters := _with_gradient(group["params"]))
        ]
        adapted = [(ps, ds) for group, ps, ds in steps if group["adapt"]]
        every = [p for ps, _ in adapted for p in ps]
        norms = torch.empty(2, 0)
        if every:
            squares = [_squares(every), _squares([d for _, ds in adapted for d in ds])]
            norms = torch.stack(squares)
            if self._sums is not None:
                norms = self._sums(every, norms)
            norms = norms.sqrt()
        start = 0
        for group, parameters, directions in steps:
            ratios = None
            if group["adapt"]:
                weights, lengths = norms[:, start : start + len(parameters)]
                start += len(parameters)
                ratios = self.ratios(group, weights, lengths)
                self.record(parameters, weights, lengths, ratios)
            self._move(group, parameters, directions, ratios)
        return loss

    def ratios(self, group: ParameterGroup, weights: Tensor, lengths: Tensor) -> Tensor:
        """Returns trust ratios [P], from norms of parameters and of their directions.

        Args:
            group: the parameter group, with its settings.
            weights: norms of the parameters, [P].
            lengths: norms of their directions, [P].
        """
        found = self._ratio(group, weights, lengths)
        return torch.where((weights > 0) & (lengths > 0), found, 1.0)

    def record(
        self, parameters: Sequence[Tensor], weights: Tensor, lengths: Tensor, ratios: Tensor
    ) -> None:
        """Records norms and ratios [P], if wanted.

        Args:
            parameters: P parameters.
            weights: their norms, [P].
            lengths: norms of their directions, [P].
            ratios: trust ratios, [P].
        """
        if self.recorded is not None:
            rows = torch.stack([weights, lengths, ratios], 1).double()
            self.recorded |= {id(p): row for p, row in zip(parameters, rows, strict=True)}

    @abstractmethod
    def _directions(self, group: ParameterGroup, parameters: list[Tensor]) -> list[Tensor]:
        """Returns the tensors whose norms are compared with the norms of the parameters."""

    @abstractmethod
    def _ratio(self, group: ParameterGroup, weights: Tensor, lengths: Tensor) -> Tensor:
        """Returns the trust ratios [P] of parameters where both norms are above 0.

        Args:
            group: the settings.
            weights: norms of the parameters, [P].
            lengths: norms of their directions, [P].
        """

    @abstractmethod
    def _move(
        self,
        group: ParameterGroup,
        parameters: list[Tensor],
        directions: list[Tensor],
        ratios: Tensor | None,
    ) -> None:
        """Changes the parameters of a group.

        Args:
            group: the settings.
            parameters: those with a gradient.
            directions: from `_directions`.
            ratios: trust ratios, [P]; `None` if all are 1.
        """

    def _state_of(self, parameter: Tensor, names: Sequence[str]) -> Mapping[str, Any]:
        """Returns a parameter's state, with zeros at first."""
        state = self.state[parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


class LARS(LayerwiseOptimizer):
    """LARS, which scales the rate of each layer, for SGD with momentum on large batches.

    A parameter w with gradient g is stepped with the trust ratio r = η |w| / (|g| + β |w| + eps)::

        paper:  v = m v + lr r (g + β w);  w = w - v
        torch:  v = m v + r (g + β w);     w = w - lr v

    They differ while the learning rate changes: the paper's velocity keeps the rates of earlier
    steps. A step of the paper's form without momentum changes w by at most lr η |w|.

    Sources: You, Gitman, Ginsburg (arXiv 1708.03888), Algorithm 1, with η in the ratio; MLPerf's
    reference for the exclusions; timm for the form "torch".

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: m.
        weight_decay: β.
        trust_coefficient: η.
        eps: added to the denominator of the ratio.
        nesterov: whether the velocity's next value is used, g + m v.
        form: "paper" or "torch".
        exclude: whether a parameter has neither a ratio nor weight decay; by default, if it has
            at most one dim. `None` excludes none.
        adapt: whether the others have ratios; without, it is SGD with momentum in either form.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        *,
        nesterov: bool = False,
        form: Literal["paper", "torch"] = "paper",
        exclude: Callable[[Tensor], bool] | None = is_vector,
        adapt: bool = True,
    ) -> None:
        if form not in ("paper", "torch"):
            raise UsageError(f"form={form!r}; possible are paper, torch")
        if nesterov and not momentum:
            raise UsageError("nesterov=True needs momentum > 0")
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient, "eps": eps, "nesterov": nesterov, "form": form,
        }  # fmt: skip
        super().__init__(params, defaults, exclude, adapt=adapt)

    def _directions(self, group: ParameterGroup, parameters: list[Tensor]) -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    def _ratio(self, group: ParameterGroup, weights: Tensor, lengths: Tensor) -> Tensor:
        scale = lengths + group["weight_decay"] * weights + group["eps"]
        return group["trust_coefficient"] * weights / scale

    def _move(
        self,
        group: ParameterGroup,
        parameters: list[Tensor],
        directions: list[Tensor],
        ratios: Tensor | None,
    ) -> None:
        lr, momentum, in_velocity = group["lr"], group["momentum"], group["form"] == "paper"
        steps: Any = directions
        if group["weight_decay"]:
            steps = torch._foreach_add(steps, parameters, alpha=group["weight_decay"])
        if ratios is not None:
            steps = _scaled(steps, ratios * lr if in_velocity else ratios)
        elif in_velocity:
            steps = torch._foreach_mul(steps, lr)
        if momentum:
            names = ("momentum_buffer",)
            velocities = [self._state_of(p, names)["momentum_buffer"] for p in parameters]
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, steps)
            ahead = group["nesterov"]
            steps = torch._foreach_add(steps, velocities, alpha=momentum) if ahead else velocities
        torch._foreach_add_(parameters, steps, alpha=-1.0 if in_velocity else -lr)


class LAMB(LayerwiseOptimizer):
    """LAMB, which scales Adam's step with decay in each layer by |w| over the step's norm.

    With Adam's bias-corrected moments m and v, r = m / (√v + eps) + β w, and w changes by
    -lr |w| / |r| r.

    Sources: You et al., Large batch optimization for deep learning (ICLR 2020); timm. The global
    gradient norm, which NVIDIA's form clips to 1 before, is `torch.nn.utils.clip_grad_norm_`.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: β.
        clip: whether ratios are at most 1 (LAMBC).
        exclude: as of `LARS`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        clip: bool = False,
        exclude: Callable[[Tensor], bool] | None = is_vector,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"betas={betas}: expected two numbers in [0, 1)")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clip": clip,
        }  # fmt: skip
        super().__init__(params, defaults, exclude)

    def _directions(self, group: ParameterGroup, parameters: list[Tensor]) -> list[Tensor]:
        grads = [p.grad for p in parameters if p.grad is not None]
        names = ("exp_avg", "exp_avg_sq")
        states = [self._state_of(p, names) for p in parameters]
        means, squares = ([state[name] for state in states] for name in names)
        (b1, b2), counts = group["betas"], list[Tensor]()
        for p in parameters:
            counts.append(self.state[p].setdefault("step", torch.zeros((), dtype=torch.float32)))
            counts[-1] += 1
        torch._foreach_lerp_(means, grads, 1 - b1)
        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - b2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - b2 ** float(n)) ** 0.5 for n in counts])
        torch._foreach_add_(roots, group["eps"])
        found = torch._foreach_div(means, roots)
        torch._foreach_div_(found, [1 - b1 ** float(n) for n in counts])
        if group["weight_decay"]:
            torch._foreach_add_(found, parameters, alpha=group["weight_decay"])
        return list(found)

    def _ratio(self, group: ParameterGroup, weights: Tensor, lengths: Tensor) -> Tensor:
        found = weights / lengths
        return found.clamp(max=1.0) if group["clip"] else found

    def _move(
        self,
        group: ParameterGroup,
        parameters: list[Tensor],
        directions: list[Tensor],
        ratios: Tensor | None,
    ) -> None:
        steps: Any = directions if ratios is None else _scaled(directions, ratios)
        torch._foreach_add_(parameters, steps, alpha=-group["lr"])


class Trust(NamedTuple):
    """What a layer-wise step has used of a parameter."""

    weight: float
    """Norm of the parameter."""
    direction: float
    """Norm of its gradient (LARS), or of Adam's step with decay (LAMB)."""
    ratio: float


def trust_ratios(
    optimizer: LayerwiseOptimizer, named: Iterable[tuple[str, Tensor]]
) -> dict[str, Trust]:
    """Returns the recorded norms and ratios of the last step, by name.

    Excluded parameters, whose ratio is 1, are not among them.

    Args:
        optimizer: LARS or LAMB, the one that was partitioned; its `recorded` was set to {} before.
        named: parameters, as from `model.named_parameters()`.
    """
    recorded = optimizer.recorded or {}
    found = {n: recorded[id(own_slice(p))] for n, p in named if id(own_slice(p)) in recorded}
    if not found:
        return {}
    rows = torch.stack(list(found.values())).tolist()
    return {n: Trust(*row) for n, row in zip(found, rows, strict=True) if row[0] or row[1]}


def _with_gradient(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = [p for p in parameters if p.grad is not None]
    for p in found:
        assert p.grad is not None
        if p.grad.layout != torch.strided or p.grad.is_complex():
            raise UsageError(
                f"a gradient of layout {p.grad.layout} and {p.grad.dtype}: layer-wise optimizers "
                "take dense real ones"
            )
    return found


def _scaled(tensors: list[Tensor], factors: Tensor) -> Any:
    """Returns each tensor times its factor."""
    # A number of no dims does not change the type of the product.
    return torch._foreach_mul(tensors, list(factors.unbind()))


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of squares of each tensor, in at least float32, float64 [P]."""
    norms = [
        torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for x in tensors
    ]
    return torch.stack([norm.double() for norm in norms]).square()
