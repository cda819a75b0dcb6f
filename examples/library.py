"""pydist as a library: a network of your own, on samples that are cut over the ranks.

    pydist run -n 4 examples/library.py          # or mpirun, torchrun, srun; or plain python: 1 rank

Nothing in the network knows that it is split, and every number is that of one device.
"""

from __future__ import annotations

import torch
from torch import nn

import pydist


def main() -> None:
    """Fits a small network to a made-up task on a mesh of all ranks."""
    ranks = pydist.init().size
    mesh = pydist.init(data=1 if ranks % 2 else 2, spatial=(ranks if ranks % 2 else ranks // 2, 1, 1))

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

    generator = torch.Generator().manual_seed(mesh.data_index)  # other samples in each group
    for step in range(20):
        # The whole samples, equal on the ranks that share them; a `Loader` reads blocks instead.
        volumes = torch.rand(4, 1, 16, 16, 16, generator=generator)
        targets = volumes.std(dim=(1, 2, 3, 4)).unsqueeze(1)
        x = pydist.distribute_tensor(volumes, mesh)
        loss = nn.functional.mse_loss(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if mesh.rank == 0 and step % 5 == 4:
            print(f"step {step + 1:2d}  loss {loss.item():.5f}")

    features = model[:4](x)
    whole = features.full_tensor()  # collective: gathers the blocks
    if mesh.rank == 0:
        print(f"{mesh}: one of {features.layout.mesh.sample_size} blocks holds "
              f"{tuple(features.to_local().shape)} of {tuple(whole.shape)}")


if __name__ == "__main__":
    main()
