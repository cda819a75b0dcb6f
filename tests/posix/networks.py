"""Program of test_networks.py: trains three networks on the files in the current directory.

It knows nothing of packs. Images and the slices of a volume come from workers of a DataLoader,
which are forked or started anew, a table from one file; the parameters and losses are printed.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[tuple[Tensor, int]]):
    """Images in a folder for each class."""

    def __init__(self) -> None:
        self.classes = sorted(path.name for path in Path("images").iterdir() if path.is_dir())
        self.files = [path for name in self.classes for path in Path("images", name).glob("*.png")]
        self.files.sort()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with Image.open(self.files[i]) as image:
            pixels = np.asarray(image.convert("RGB"), np.float32) / 255
        return torch.from_numpy(pixels).movedim(2, 0), self.classes.index(self.files[i].parts[1])


class Slices(Dataset[Tensor]):
    """Slices of a volume, which each worker opens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Tensor:
        with h5py.File("volume.h5") as file:
            return torch.from_numpy(file["full"][i // 6, i % 6 : i % 6 + 1, :8, :8]).float()


def digest(losses: Iterable[float], *networks: nn.Module) -> str:
    """Returns a hash of all bits of parameters and losses."""
    found = hashlib.sha256(np.array(list(losses)).tobytes())
    for network in networks:
        for value in network.state_dict().values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()


def classify() -> str:
    """Trains a convolutional network on the images."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(
        Images(), 6, shuffle=True, generator=order, num_workers=2, multiprocessing_context="fork"
    )
    losses = []
    for _ in range(2):
        for images, classes in loader:
            loss = functional.cross_entropy(network(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return digest(losses, network)


def forecast() -> str:
    """Trains a recurrent network to continue the columns of a table."""
    torch.manual_seed(0)
    with Path("table.csv").open(newline="") as file:
        names, *rows = csv.reader(file)
    table = torch.tensor([[float(value) for value in row] for row in rows])
    network, last = nn.GRU(len(names), 12, batch_first=True), nn.Linear(12, len(names))
    optimizer = torch.optim.Adam([*network.parameters(), *last.parameters()], 0.01)
    windows = table.unfold(0, 20, 5).movedim(1, 2)
    losses = []
    for _ in range(2):
        for batch in windows.split(8):
            loss = functional.mse_loss(last(network(batch[:, :-1])[0]), batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return digest(losses, network, last)


def imitate() -> str:
    """Trains two networks against each other: one makes slices, one tells them from real ones."""
    torch.manual_seed(0)
    makes = nn.Sequential(
        nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 64), nn.Unflatten(1, (1, 8, 8))
    )
    judges = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(72, 1))
    steps = [torch.optim.Adam(each.parameters(), 1e-3) for each in (makes, judges)]
    loader = DataLoader(Slices(), 6, num_workers=2, multiprocessing_context="spawn")
    real, made, losses = torch.ones(6, 1), torch.zeros(6, 1), []
    judge = functional.binary_cross_entropy_with_logits
    for slices in loader:
        false = makes(torch.randn(6, 6))
        told = judge(judges(slices), real) + judge(judges(false.detach()), made)
        steps[1].zero_grad()
        told.backward()
        steps[1].step()
        fooled = judge(judges(false), real)
        steps[0].zero_grad()
        fooled.backward()
        steps[0].step()
        losses += [told.item(), fooled.item()]
    return digest(losses, makes, judges)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for train in (classify, forecast, imitate):
        print(train.__name__, train())
    print(float(torch.load("tensor.pt", mmap=True)["w"].sum()))
    print(float(torch.load("tensor.pt")["w"].sum()))
