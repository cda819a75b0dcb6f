"""Describes the training step of a configuration for `pydist.plan`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.data import Manifest, ShardDataset
from pydist.errors import UsageError
from pydist.optim.partitioned import WORTHWHILE
from pydist.plan import StepModel, Training, trace_network
from pydist.plan.kept import KeptConvs
from pydist.plan.measuring import this_machine
from pydist.stages.shapes import tensors_of
from pydist.train.ranks import check_settings
from pydist.train.tasks import task_of

if TYPE_CHECKING:
    from pydist.hardware import Hardware
    from pydist.train.config import Config
    from pydist.train.tasks import Task

_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_of(config: Config, hardware: Hardware, ranks: int) -> StepModel:
    """Returns the model of a configuration's training step.

    Args:
        config: as for `pydist train`; the parts of its table "mesh" do not matter.
        hardware: of a rank. On the machine on which it was measured, the times of convolutions are
            those that the autotuner has kept, and on as few ranks as it has cores it measures
            those that are missing.
        ranks: number of ranks.

    Raises:
        UsageError: the network does not suit the data set, or is in stages.
        DataError: there is no data set.
        NotSupported: the network reads values, so shapes do not tell what it computes.
    """
    check_settings(config)
    if config.mesh.stages is not None:
        raise UsageError(
            "a plan compares meshes, and mesh.stages divides the network into stages: leave it out"
        )
    manifest = Manifest.load(config.data.path)
    task = task_of(config)
    task.check(ShardDataset(config.data.path, "train", normalize="none", manifest=manifest))
    with torch.device("meta"):
        network = task.network(manifest)
    trace = trace_network(network, manifest.network_shape, _criterion(task))
    parameters = sum(p.numel() for p in network.parameters())
    partitioned = config.optimizer.sharded == "always" or (
        config.optimizer.sharded == "auto"
        and parameters >= WORTHWHILE
        and config.train.gradients == "dense"
    )
    training = Training(
        batch=config.train.batch,
        passes=config.train.accumulate,
        state=_state(config),
        dtype=_DTYPES[config.train.amp],
        partitioned=partitioned,
        prefetch=config.data.prefetch,
        file_bytes=math.prod(manifest.sample_shape) * np.dtype(manifest.dtype).itemsize,
    )
    if hardware.machine != this_machine():
        return StepModel(trace, training, hardware)
    measures = ranks <= hardware.ranks_per_node
    return StepModel(trace, training, hardware, KeptConvs(hardware.threads, measures))


def _criterion(task: Task) -> Callable[[object], Tensor]:
    """Returns a loss of as many calls as the task's, on shapes alone."""

    def loss(output: object) -> Tensor:
        scores = tensors_of(output)[0]
        if task.multiple is None:
            return scores.square().mean()
        labels = torch.zeros(scores.shape[0], *scores.shape[2:], dtype=torch.int64)
        return F.cross_entropy(scores, labels)

    return loss


def _state(config: Config) -> float:
    """Returns the bytes of the optimizer's state, relative to those of the parameters."""
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = config.optimizer.at(config.train.batch).optimizer([parameter])
    parameter.grad = torch.zeros(8)
    optimizer.step()
    state = tensors_of(dict(optimizer.state[parameter]))
    return sum(x.nbytes for x in state if x.shape == parameter.shape) / parameter.nbytes
