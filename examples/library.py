"""pydist as a library: a network of your own, on samples that are cut over the ranks.

    pydist run -n 4 examples/library.py --depth 2     # also under mpirun, torchrun, srun
    python examples/library.py                        # one rank: the same numbers

Nothing in the network knows that it is split.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import pydist


def main() -> None:
    """Fits a small network to a made-up task on a mesh of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=1, help="blocks that a sample is cut into")
    mesh = pydist.init(spatial=(parser.parse_args().depth, 1, 1))  # the other ranks: more groups

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.LeakyReLU(),
        nn.AvgPool3d(3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 8**3, 1),
    )
    pydist.parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for step in range(1, 21):
        volumes = torch.rand(4, 1, 16, 16, 16)
        targets = volumes.std(dim=(1, 2, 3, 4)).unsqueeze(1)
        # Each group takes its samples; `distribute_tensor` cuts them over the ranks of the group.
        mine = slice(mesh.data_index, None, mesh.data_size)
        x = pydist.distribute_tensor(volumes[mine], mesh)
        loss = nn.functional.mse_loss(model(x), targets[mine])
        optimizer.zero_grad()
        loss.backward()  # gradients are those of the whole batch on one device
        optimizer.step()

        mean = loss.detach().clone()
        mesh.data.all_reduce(mean)
        if mesh.rank == 0 and step % 5 == 0:
            print(f"step {step:2d}  loss {mean.item() / mesh.data_size:.5f}")

    features = model[:4](x)
    whole = features.full_tensor()  # collective: brings the blocks together
    if mesh.rank == 0:
        held, shape = features.to_local().shape, whole.shape
        print(f"rank 0 of {mesh.size} holds {list(held)} of {list(shape)}")


if __name__ == "__main__":
    main()
