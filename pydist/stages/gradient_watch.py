"""A warning for gradients of stages that are changed by what one rank sees of them."""

from __future__ import annotations

import threading
import warnings
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pydist.errors import NotSupported
from pydist.exchange.own_slice import own_slice
from pydist.gradients.partitioned import PartitionedGradient
from pydist.stages.ranks import Stages
from pydist.stages.sources import version_of
from pydist.tensor import ShardedTensor, local_of

_watches: WeakSet[GradientWatch] = WeakSet()
_installed: list[object] = []
_lock = threading.Lock()


class GradientWatch:
    """Notices changes of gradients between a step of the pipeline and the optimizer's step.

    `torch.nn.utils.clip_grad_norm_` on a rank knows the gradients of its own stages alone: the norm
    is not the network's, and each stage scales by another number. Nothing that runs on all ranks
    sees it, so the rank itself warns, once.

    Args:
        model: the network.
        stages: the stages.
    """

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        self._model = model
        self._known: dict[int, tuple[int, int]] = {}
        self._has_warned = False
        if len(stages.meshes) == 1:
            return  # it has all gradients
        with _lock:
            if not _installed:
                _installed.append(register_optimizer_step_pre_hook(_before_step))
            _watches.add(self)

    def note(self) -> None:
        """Notes the gradients, after what all stages have done together."""
        self._known = {
            id(p): _version_of(grad)
            for p in self._model.parameters()
            if (grad := own_slice(p).grad) is not None
        }

    def before_step(self, optimizer: Optimizer) -> None:
        """Warns if the gradients of an optimizer were changed since.

        Raises:
            NotSupported: the optimizer computes with all gradients at once.
        """
        if isinstance(optimizer, LBFGS):
            own = {id(p) for p in self._model.parameters()}
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                raise NotSupported(
                    "LBFGS of a network in stages: its steps depend on all gradients, and a rank "
                    "has those of its own stages alone; possible are optimizers that change each "
                    "parameter by its own gradient, such as SGD and AdamW"
                )
        if self._has_warned or not self._known:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                known, grad = self._known.get(id(p)), own_slice(p).grad
                if known is None or grad is None or known == _version_of(grad):
                    continue
                self._has_warned = True
                warnings.warn(
                    "gradients were changed on this rank, which has those of its own stages alone: "
                    "clip their norm with pipe.clip_grad_norm_, and unscale them with pipe."
                    "unscale_ before scaler.step, so that all stages change by the same number",
                    stacklevel=2,
                )
                return


def _before_step(optimizer: Optimizer, *_: object) -> None:
    with _lock:
        watches = list(_watches)
    for each in watches:
        each.before_step(optimizer)


def _version_of(grad: Tensor) -> tuple[int, int]:
    """Returns which tensor a gradient is, and how often it was changed."""
    if isinstance(grad, PartitionedGradient):
        grad = grad.piece
    elif isinstance(grad, ShardedTensor):
        grad = local_of(grad)
    return id(grad), version_of(grad)
