"""The facts of a model that must be equal on all ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def facts_of(model: nn.Module, *, devices: bool = True) -> dict[str, str]:
    """Describes the structure of a model: its modules with modes, its parameters and buffers.

    Ranks with different structures exchange different messages: one waits forever, or gradients
    of different parameters are summed.

    Args:
        model: the network.
        devices: whether the kinds of devices must be equal, too.

    Returns:
        Descriptions by name, in an order that follows from the model alone.
    """
    facts = {}
    for path, module in model.named_modules():
        kind, name = type(module), f"module {path!r}" if path else "the model"
        facts[name] = f"{kind.__qualname__} ({'train' if module.training else 'eval'})"
        if kind.__module__.startswith("torch.nn."):  # others may print rank-local facts
            facts[f"{name}'s settings"] = module.extra_repr()
    for path, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        facts[f"parameter {path!r}"] = _described(parameter, devices) + frozen
    for path, buffer in model.named_buffers():
        facts[f"buffer {path!r}"] = _described(buffer, devices)
    return facts


def _described(tensor: Tensor, devices: bool) -> str:
    shape = "lazy" if is_lazy(tensor) else "×".join(map(str, tensor.shape)) or "scalar"
    where = f" on {tensor.device.type}" if devices else ""
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}{where}"
