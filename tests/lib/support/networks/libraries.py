"""Compares a split step of other libraries' networks, unmodified and small, with one device.

    PYTHONPATH=tests/lib python -m support.networks.libraries > docs/monai.md

writes the tables of the documentation. Networks with dropout are in evaluation mode, autoencoders
without their random numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.errors import NotSupported
from support.equivalence import Answer, Task, check_network, randn, whole_answer
from support.networks import monai_zoo, nnunet_zoo
from support.networks.cases import BATCH
from support.networks.small import initialized

SPLITS = ((2, 1, 1), (1, 2, 2))
BOUND = 1e-10
"""Largest distance from one device, relative to the largest value of the tensor."""
NOISE = 1e-3
"""Relative change under noise of one ulp from which a value is nothing but rounding."""
CASES = monai_zoo.CASES | nnunet_zoo.CASES
RANDOM = {"SegResNetVAE", "VQVAE", "VNet", "EfficientNetBN"}


class Summed(nn.Module):
    """A network whose floating-point outputs all count; in evaluation mode if it is random."""

    def __init__(self, network: nn.Module, *, is_random: bool) -> None:
        super().__init__()
        self.network = network
        if is_random:
            network.eval()

    def forward(self, x: Tensor) -> Tensor:
        found = [y for y in _tensors(self.network(x)) if y.is_floating_point()]
        if len(found) == 1:
            return found[0]
        return torch.stack([y.square().mean() for y in found])[None].expand(len(x), -1)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [] if value is None else [t for each in value for t in _tensors(each)]


def task_of(name: str, batch: int = BATCH) -> Task:
    """Returns a task, with two samples unless told otherwise."""
    case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = initialized(Summed(case.make(), is_random=name in RANDOM))
    x = randn(batch, case.channels, *case.extents)
    with torch.no_grad():
        target = randn(*model(x).shape, seed=1)
    return Task(model, x, target, F.mse_loss)


def check_splits(task: Task, answer: Answer) -> None:
    """Compares a step on each split with the answer of one device."""
    for spatial in SPLITS:
        check_network(task, spatial, answer=answer)


def verdict(name: str) -> str:
    """Returns "equal", or the call that is refused; raises an error where results differ."""
    try:
        task = task_of(name)
    except ImportError:
        return "not tried: it needs a package that is not installed"
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        return "not tried: a part of it computes in float32 only"
    answer = whole_answer(task)
    # As of biases before a norm, whose gradients are zero.
    answer = answer._replace(
        bounds={
            each: math.inf if bound > NOISE else max(BOUND, bound)
            for each, bound in answer.bounds.items()
        }
    )
    try:
        check_splits(task, answer)
    except NotSupported as error:
        return f"refused: `{str(error).partition(' on a sharded')[0]}`"
    return "equal"


HEAD = f"""# MONAI's and nnU-Net's networks

3-D networks, unmodified and small, with one step of two samples in fp64, split 2×1×1 and 1×2×2:
"equal" means outputs, loss, all gradients and buffers of one device, within {BOUND} of the largest
value of each. `tests/lib/support/networks/libraries.py` writes this page, and tests compare
rows of it.

## MONAI

All 3-D networks of `monai.networks.nets`. Networks of 2-D images only (HoVerNet, Quicknat,
MILModel, TorchVisionFCModel, Transchex) and of vectors (FullyConnectedNet, Generator) are not here.
"""
NNUNET = """
## nnU-Net

The architectures of `dynamic-network-architectures` from which nnU-Net builds its networks, in 3-D.
"""
TABLE = """
| network | split run |
|---|---|
"""


def page() -> Iterator[str]:
    """Yields the lines of the page."""
    for head, cases in ((HEAD, monai_zoo.CASES), (NNUNET, nnunet_zoo.CASES)):
        yield head + TABLE
        said = {}
        for name in cases:
            said[name] = verdict(name)
            yield f"| {name} | {said[name]} |\n"
        equal = sum(each == "equal" for each in said.values())
        yield f"\n{equal} of {len(said)} are equal.\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in page():
        print(line, end="", flush=True)
