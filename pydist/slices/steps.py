"""Steps sharded weights by torch's optimizers: each rank steps its slices.

An optimizer holds the sharded weights. During a step its parameter groups hold the slices, and its
state that of the slices, so that torch's implementations run unchanged, `foreach` and fused ones
included. Between steps its state is sharded like the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)  # fmt: skip

from pydist.errors import NotSupported
from pydist.exchange.own_slice import is_sharded_weight, own_slice
from pydist.slices.state import gathered, note_call
from pydist.tensor import ShardedTensor, local_of, wrap
from pydist.tensor.operands import redistribute

ELEMENTWISE = (
    ASGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SGD,
)  # fmt: skip
"""Optimizers of torch that treat each element separately, so a part can be stepped alone. Other
classes say so by an attribute ``elementwise = True``."""

_RUNNING = "_pydist_step_on_slices"
_HOOKED = Optimizer.profile_hook_step(lambda: None).__code__
"""Code of the function in which torch wraps the step of a class, to call hooks."""


def shard_state(optimizer: Optimizer) -> None:
    """Replaces whole state of sharded weights, such as loaded state, by this rank's slices."""
    for weight, values in list(optimizer.state.items()):
        if isinstance(weight, Tensor) and is_sharded_weight(weight):
            gather_in_state_dict(optimizer)
            own = {name: own_part_of_state(value, weight) for name, value in values.items()}
            optimizer.state[weight] = shown_as(own, own_slice(weight), weight)


def gather_in_state_dict(optimizer: Optimizer) -> None:
    """Lets `state_dict()` of an optimizer describe the whole network; installed once."""
    if _RUNNING not in optimizer.__dict__:
        optimizer.__dict__[_RUNNING] = None
        optimizer.register_state_dict_pre_hook(end_step)
        optimizer.register_load_state_dict_pre_hook(end_step)
        optimizer.register_state_dict_post_hook(_gather_state)


class _Step:
    """A step whose parameter groups hold slices in place of sharded weights."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._given = [(group, group["params"]) for group in optimizer.param_groups]
        self._parameters = [p for _, group in self._given for p in group]
        self._weights: dict[int, Any] = {
            id(own_slice(p)): p for p in self._parameters if is_sharded_weight(p)
        }
        self._norms = ExitStack()
        self.begin()

    def begin(self) -> None:
        """Puts the slices, and their state, in place."""
        state = self._optimizer.state
        if (summed_by := getattr(self._optimizer, "summed_by", None)) is not None:
            self._norms.enter_context(summed_by(self._sum))
        for group, parameters in self._given:
            group["params"] = [own_slice(p) for p in parameters]
        for parameter in self._parameters:
            if is_sharded_weight(parameter) and parameter in state:
                values = state.pop(parameter)
                own = {name: own_part_of_state(value, parameter) for name, value in values.items()}
                state[own_slice(parameter)] = own

    def end(self) -> None:
        """Puts the sharded weights, and their state, in place again."""
        state = self._optimizer.state
        self._norms.close()
        for group, parameters in self._given:
            group["params"] = parameters
        for parameter in self._parameters:
            own = own_slice(parameter)
            values = state.pop(own, None)
            if values is not None:  # all again, in the order of the parameters
                is_slice = own is not parameter
                state[parameter] = shown_as(values, own, parameter) if is_slice else values

    def _sum(self, parameters: Sequence[Tensor], squares: Tensor) -> Tensor:
        """Adds the sums of squares of slices over the ranks that have the others."""
        places: dict[Any, list[int]] = {}
        for place, parameter in enumerate(parameters):
            weight = self._weights.get(id(parameter))
            if weight is not None:
                group = weight.mesh.group(weight.layout.used_axes)
                places.setdefault(group, []).append(place)
        for group, some in places.items():
            part = squares[:, some]
            group.all_reduce(part)
            squares[:, some] = part
        return squares


def own_part_of_state(value: Any, weight: Any) -> Any:
    """Returns this rank's slice of a value of a weight's state (moments, a count of steps)."""
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        return value
    if isinstance(value, ShardedTensor):
        return local_of(redistribute(value, weight.layout)).detach()
    box = weight.layout.box  # a whole tensor, from load_state_dict or from before parallelize
    part = value[box.slices]
    return torch.empty_like(own_slice(weight), dtype=value.dtype).copy_(part)


def shown_as(values: dict[str, Any], own: Tensor, weight: Any) -> dict[str, Any]:
    """Converts the state of a slice to the state of the sharded weight."""

    def shown(value: Any) -> Any:
        is_part = isinstance(value, Tensor) and value.dim() > 0 and value.shape == own.shape
        return wrap(value, weight.layout, weight) if is_part else value

    return {name: shown(value) for name, value in values.items()}


def show_slices(optimizer: Optimizer, *_: Any) -> None:
    """Lets the step itself see slices, and all hooks of users, on it or on all optimizers, weights.

    Hooks of all optimizers come before its own and after them: the own hooks that put slices in
    place are the last before the step and the first after it.
    """
    end_step(optimizer)  # of a step that raised
    if getattr(optimizer, "steps_parts", False) or not _has_sharded_weights(optimizer):
        return
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    if _begin_step not in before.values():
        optimizer.register_step_pre_hook(_begin_step)
    if end_step not in after.values():
        optimizer.register_step_post_hook(end_step)
    before.move_to_end(next(key for key, hook in before.items() if hook is _begin_step))
    after.move_to_end(next(key for key, hook in after.items() if hook is end_step), last=False)


def has_hooks(optimizer: Optimizer) -> bool:
    """Returns whether users have registered step hooks on an optimizer."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any(each not in (_begin_step, end_step) for own in hooks for each in own.values())


def step_without_hooks(optimizer: Optimizer) -> None:
    """Steps an optimizer whose groups hold parts, which hooks of all optimizers would see.

    A step that a user has replaced runs as it is, with these hooks.
    """
    hooked: Any = type(optimizer).step
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and getattr(replaced, "_wrapped_by_lr_sched", False):
        optimizer._opt_called = True  # type: ignore[attr-defined]  # which the schedule asks for
        replaced = None if replaced.__wrapped__ is hooked else replaced
    if replaced is not None or hooked.__code__ is not _HOOKED:
        optimizer.step()
        return
    if _has_sharded_weights(optimizer):
        _begin_step(optimizer, (), {})
    try:
        hooked.__wrapped__(optimizer)
    finally:
        end_step(optimizer)


def _has_sharded_weights(optimizer: Optimizer) -> bool:
    return any(is_sharded_weight(p) for group in optimizer.param_groups for p in group["params"])


def _begin_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    obstacle = step_obstacle(optimizer)
    if obstacle is not None:
        raise NotSupported(
            f"a step of {type(optimizer).__name__} with sharded weights: {obstacle}; or "
            "parallelize(..., sharded_weights=False)"
        )
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        # A part of all gradients in a row, as after surgery on them, is cut as the row is.
        if isinstance(p.grad, ShardedTensor) and not is_sharded_weight(p):
            p.grad = p.grad.full_tensor().detach()
    gather_in_state_dict(optimizer)
    step = optimizer.__dict__[_RUNNING] = _Step(optimizer)
    if len(args) > 1 and callable(args[1]):
        return (args[0], _within(step, args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _within(step, kwargs["closure"])}
    return None


def end_step(optimizer: Optimizer, *_: Any) -> None:
    """Puts the sharded weights in place again if a step on slices has not ended, as it raised."""
    step = optimizer.__dict__.get(_RUNNING)
    if step is not None:
        step.end()
        optimizer.__dict__[_RUNNING] = None


def _within(step: _Step, closure: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a closure that sees the sharded weights in the optimizer."""

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        step.end()
        try:
            return closure(*args, **kwargs)
        finally:
            step.begin()

    return evaluate


def step_obstacle(optimizer: Optimizer) -> str | None:
    """Returns why an optimizer can't step parts of parameters, or `None`."""
    elementwise = type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False)
    # With norms of whole parameters, one with `summed_by` is element-wise.
    if not elementwise and not hasattr(optimizer, "summed_by"):
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        return (
            f"it may look at more than one element at a time; possible are {names}, subclasses of "
            "pydist.optim.layerwise.LayerwiseOptimizer, and classes with elementwise = True"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True"
    return None


def _gather_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Gathers sharded state of the whole network. Collective; see `state_on_rank_0`."""
    found = {}
    is_first = True
    for key, values in state_dict["state"].items():
        found[key] = values
        if isinstance(values, dict):
            found[key] = dict(values)
            for name, value in values.items():
                if isinstance(value, ShardedTensor):
                    if is_first:
                        note_call(value, "state_dict() of an optimizer of sharded weights")
                        is_first = False
                    found[key][name] = gathered(value)
    return {**state_dict, "state": found}
