"""Program whose two ranks diverge in the way that the argument names."""

from __future__ import annotations

import sys

import torch
from torch import nn

import pydist


def main(case: str) -> None:
    mesh = pydist.init(spatial=(1 if case == "evaluation" else 2, 1, 1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.AvgPool3d(3, 2))
    pydist.parallelize(model, mesh)
    noise = torch.zeros(4, 1, 1, 1)
    for step in range(1, 7):
        x = torch.ones(1, 2, 8, 6, 6)
        strange = step == 4 and mesh.rank == 1
        model.train(not (strange and case == "evaluation"))
        y = model(pydist.distribute_tensor(x, mesh))
        if strange and case == "call":
            y = nn.functional.avg_pool3d(y, 3, 1, 1)
        if strange and case == "known":
            model[1](model[0](pydist.distribute_tensor(x, mesh)))
        if strange and case == "operand":
            noise = torch.ones(4, 1, 1, 1)
        (y + noise).square().sum().backward()
        print("step", step, "is done", flush=True)


main(sys.argv[1])
