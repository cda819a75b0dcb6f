"""Training steps on CT volumes with augmentation in the background thread, against none.

An epoch of a 3D U-Net's steps on one rank, with all changes that keep a volume's extents, each with
nnU-Net's probability or more; with none; and the seconds that the steps waited for data.

    python benchmarks/python/augmentation.py
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch.nn import functional as F

import pydist
from pydist.comm import LocalTransport
from pydist.data import Augmented, AugmentOptions, CTOptions, Loader, ShardDataset, generate_ct
from pydist.data.blocks import BlockSource
from pydist.mesh import Mesh
from pydist.models import UNet3d

OPTIONS = AugmentOptions(
    flip=("depth", "height", "width"), rotate=0.5, probability=0.2, noise=0.1, blur=(0.1, 1.0),
    scale=0.25, shift=0.1, low_resolution=0.5, gamma=(0.7, 1.5),
)  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__, rounds=7)
    parser.add_argument("--width", type=int, default=64, help="edge of the volumes (64)")
    parser.add_argument("--features", type=int, default=8, help="of the network (8)")
    parser.add_argument("--samples", type=int, default=8, help="volumes of an epoch (8)")
    options = parser.parse_args()
    if options.quick:
        options.width, options.features, options.samples, options.rounds = 16, 2, 2, 2
    mesh = Mesh(LocalTransport())
    waited: dict[str, list[float]] = {"plain": [], "augmented": []}
    with tempfile.TemporaryDirectory() as folder:
        shape = (options.width,) * 3
        generate_ct(Path(folder), CTOptions(count=options.samples, shape=shape, validation=0))
        data = ShardDataset(folder, normalize="ct")
        model = pydist.parallelize(UNet3d(1, 3, features=options.features, levels=3), mesh)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def epoch(name: str, source: BlockSource) -> Callable[[], object]:
            def run() -> None:
                with Loader(source, mesh, 1) as loader:
                    for batch in loader:
                        loss = F.cross_entropy(model(batch.inputs), batch.targets)
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                    waited[name].append(loader.waited_s)

            return run

        contestants = {
            "plain": epoch("plain", data),
            "augmented": epoch("augmented", Augmented(data, OPTIONS)),
        }
        for each in contestants.values():
            each()
        times = common.in_turns(contestants, options.rounds, lambda: None)
    ratio = statistics.median(
        a / b for a, b in zip(times["augmented"], times["plain"], strict=True)
    )
    rows: list[dict[str, Any]] = [
        {
            "who": name, "over_plain": 1.0 if name == "plain" else ratio,
            "waited": statistics.median(waited[name][1:]), **common.summary(seconds),
        }
        for name, seconds in times.items()
    ]  # fmt: skip
    common.show(
        ("", "epoch, s", "waited for data, s", "over plain"),
        [(row["who"], row["median"], row["waited"], row["over_plain"]) for row in rows],
    )
    setting = {name: getattr(options, name) for name in ("width", "features", "samples")}
    common.write({"machine": common.machine(), **setting, "rows": rows}, "augmentation", options)


if __name__ == "__main__":
    main()
