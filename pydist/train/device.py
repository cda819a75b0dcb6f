"""Chooses the device and the precision of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from pydist._loader import native
from pydist.backend.problem import onednn_has
from pydist.comm.transports.nccl.device_assignment import present
from pydist.errors import UsageError
from pydist.runtime import why_no_devices

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.train.config import TrainConfig

PRECISIONS = {"off": "fp32", "bf16": "bf16 (mixed)", "fp16": "fp16 (mixed)"}
AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(wanted: str, world: Transport, option: str = "train.device") -> torch.device:
    """Returns the device of this rank: its current CUDA device, or the CPU.

    Args:
        wanted: "cpu", "cuda", or "auto" for CUDA where possible.
        world: the transport over all ranks.
        option: the user's name of `wanted`.

    Raises:
        UsageError: "cuda" where it is impossible.
    """
    obstacle = None if wanted == "cpu" else cuda_obstacle(world)
    if wanted == "cpu" or (wanted == "auto" and obstacle is not None):
        return torch.device("cpu")
    if obstacle is not None:
        raise UsageError(f'{option} is "cuda": {obstacle}; "cpu" is possible')
    return torch.device("cuda", torch.cuda.current_device())


def cuda_obstacle(world: Transport) -> str | None:
    """Returns why the ranks of a job can't compute on CUDA devices; `None` if they can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    if not native.has_cuda:
        return "pydist was built without CUDA kernels"
    return host_transport(world)


def facts_of_run(
    device: torch.device, wanted: str, amp: str, world: Transport, option: str = "train.device"
) -> dict[str, str]:
    """Returns device, transport and precision for the first line of a run. Collective.

    Args:
        device: the device from `choose_device`.
        wanted: see `choose_device`.
        amp: automatic mixed precision, "off" if there is none.
        world: the transport over all ranks.
        option: see `choose_device`.

    Returns:
        "device", "transport", "precision", and "unused_device": why an available CUDA device is
        not used, or "".
    """
    unused = why_unused(wanted, world, option)
    return {
        "device": describe(device),
        "transport": world.name,
        "precision": PRECISIONS[amp],
        "unused_device": "" if device.type == "cuda" else unused,
    }


def slow_precision(device: torch.device, amp: str) -> str:
    """Returns that mixed precision slows a run on this rank's CPU down; "" if it may not."""
    if device.type != "cpu" or amp == "off" or onednn_has(AMP_DTYPES[amp]):
        return ""
    return f'this processor has no instructions for convolutions in {amp}: amp = "off" is faster'


def why_unused(wanted: str, world: Transport, option: str = "train.device") -> str:
    """Returns why a rank's CUDA device is not used; "" if no rank has one. Collective.

    For runs on the CPU; the result is the same on all ranks.

    Args:
        wanted: see `choose_device`.
        world: the transport over all ranks.
        option: see `choose_device`.
    """
    everyone = world.all_gather_json([present(), cuda_obstacle(world)])
    if not any(devices for devices, _ in everyone):
        return ""
    if wanted == "cpu":
        return f'{option} is "cpu"'
    return why_no_devices() or next((obstacle for _, obstacle in everyone if obstacle), "")


def describe(device: torch.device) -> str:
    """Returns a device's kind, and its name if it has one: "cpu", "cuda (NVIDIA H200)"."""
    if device.type != "cuda":
        return device.type
    return f"cuda ({torch.cuda.get_device_name(device)})"


def host_transport(world: Transport) -> str | None:
    """Returns a description if several ranks exchange through host memory; else `None`."""
    if world.size == 1 or world.device is not None:
        return None
    return f"transport '{world.name}' carries host memory"


def waiting_transport(world: Transport) -> str | None:
    """Returns a description if the host waits for exchanges or carries them; else `None`."""
    if world.size > 1 and world.host_waits:
        return f"the host waits in transport '{world.name}'"
    return host_transport(world)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Runs the block's work on a stream of its own, if the device has streams.

    A graph can't be captured on the default stream, and autograd nodes stay on the stream of their
    creation: so one block must contain the creation and the training of a model.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """Returns the context of a forward pass with automatic mixed precision."""
    return torch.autocast(device.type, AMP_DTYPES[amp], enabled=amp != "off")


def memory_format(config: TrainConfig, device: torch.device) -> torch.memory_format:
    """Returns the layout of input and weights [N, C, D, H, W]: channels last for tensor cores.

    On CPUs the layers autotune their layout (`pydist.backend.conv_kernels`).
    """
    wanted = config.channels_last
    if device.type == "cuda" and (wanted == "always" or (wanted == "auto" and config.amp != "off")):
        return torch.channels_last_3d
    return torch.contiguous_format


def in_format(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Converts the weights of 3-D convolutions to a memory format."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 5:
                parameter.data = parameter.data.contiguous(memory_format=memory_format)
