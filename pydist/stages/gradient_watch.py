"""Refuses and warns of steps of stages that depend on gradients that one rank does not have."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from pydist.errors import NotSupported
from pydist.exchange.own_slice import own_slice
from pydist.gradients.step_check import before_steps
from pydist.stages.gradients import grad_state_of, is_spoiled
from pydist.stages.parameters import StagedParameters
from pydist.stages.ranks import Stages

_watches: WeakSet[GradientWatch] = WeakSet()
_lock = threading.Lock()


class GradientWatch:
    """Notices changes of gradients between a step of the pipeline and the optimizer's step.

    `torch.nn.utils.clip_grad_norm_` on a rank knows the gradients of its own stages alone: the norm
    is not the network's, and each stage scales by another number. Nothing that runs on all ranks
    sees it, so the rank itself warns, once.

    Args:
        model: the network.
        parameters: all that the passes train.
        stages: the stages.
    """

    def __init__(self, model: nn.Module, parameters: StagedParameters, stages: Stages) -> None:
        self._model, self._parameters = model, parameters
        self._known: dict[int, tuple[object, ...]] = {}
        self._has_warned = self._is_within = False
        self._has_failed = False  # the latest step has raised
        self._checked: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._is_alone = len(stages.meshes) == 1
        if self._is_alone:
            return  # it has all gradients
        before_steps(_before_step)
        with _lock:
            _watches.add(self)

    @contextmanager
    def within_step(self, spoil: Callable[[], None]) -> Iterator[None]:
        """Refuses optimizers in the `with` block, in which a step of the pipeline runs.

        Args:
            spoil: fills gradients to which the step has added with NaN, if it raises.
        """
        self._is_within = True
        try:
            yield
            self._has_failed = False
        except BaseException:
            if not self._is_alone:
                spoil()
                self._has_failed = True
            raise
        finally:
            self._is_within = False

    def refuse_partial(self, parameters: Iterable[Tensor]) -> None:
        """Refuses gradients of a step that raised: on another mesh they have other parts of it.

        Raises:
            NotSupported: one is still there.
        """
        if not self._has_failed:
            return
        grads = (own_slice(p).grad for p in parameters)
        if any(is_spoiled(grad) for grad in grads if grad is not None):
            raise NotSupported(
                "a gradient to which a step of the pipeline has added before it raised, on each "
                "mesh another part, which is NaN now: call zero_grad() before the next step"
            )

    def note(self) -> None:
        """Notes the gradients, after what all stages have done together."""
        self._known = {
            id(p): grad_state_of(grad)
            for p in self._model.parameters()
            if (grad := own_slice(p).grad) is not None
        }

    def before_step(self, optimizer: Optimizer) -> None:
        """Warns if the gradients of an optimizer were changed since.

        Raises:
            NotSupported: the optimizer computes with all gradients at once, steps within the
                backward pass, or with gradients of a step that raised.
        """
        if self._is_within and self._has_parameters_of(optimizer):
            raise NotSupported(
                f"{type(optimizer).__name__} within the backward pass of a network in stages, as "
                "in a hook: stages share gradients after that pass; call optimizer.step() after "
                "pipe.step()"
            )
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._checked.get(optimizer) != count:
            if self._has_parameters_of(optimizer):
                _require_own_gradients(optimizer)
            self._checked[optimizer] = count
        if self._has_failed:
            own = {id(p) for _, p in self._parameters.named()}
            stepped = (p for group in optimizer.param_groups for p in group["params"])
            self.refuse_partial(p for p in stepped if id(p) in own)
        if self._has_warned or not self._known:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                known, grad = self._known.get(id(p)), own_slice(p).grad
                if known is None or grad is None or known == grad_state_of(grad):
                    continue
                self._has_warned = True
                warnings.warn(
                    "gradients were changed on this rank, which has those of its own stages alone. "
                    "Changes of each element by itself are right. Clip norms with pipe."
                    "clip_grad_norm_, and unscale with pipe.unscale_ before scaler.step, so that "
                    "all stages change by the same number",
                    stacklevel=2,
                )
                return

    def _has_parameters_of(self, optimizer: Optimizer) -> bool:
        own = {id(p) for p in self._model.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _require_own_gradients(optimizer: Optimizer) -> None:
    """Refuses LBFGS, which computes with all gradients, and warns of classes that may do so."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise NotSupported(
            f"{name} of a network in stages: its steps depend on all gradients, and a rank has "
            "those of its own stages alone; possible are optimizers that change each parameter by "
            "its own gradient, such as SGD and AdamW"
        )
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    steps_parts = hasattr(optimizer, "summed_by") or getattr(optimizer, "steps_parts", False)
    if not (is_torchs or steps_parts or getattr(optimizer, "elementwise", False)):
        warnings.warn(
            f"{name} of a network in stages: if it changes each parameter by its own gradient "
            "alone, ignore this; if it combines the gradients of several parameters, as Prodigy "
            "and SAM do, its steps are wrong, as a rank has those of its own stages alone",
            stacklevel=4,
        )


def _before_step(optimizer: Optimizer, *_: object) -> None:
    with _lock:
        watches = list(_watches)
    for each in watches:
        each.before_step(optimizer)
