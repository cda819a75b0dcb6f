"""Compares training steps on CT volumes with augmentation in the background thread and without.

An epoch of steps of the network of `pydist demo unet` on one rank, with nnU-Net's default changes
and with none; and the seconds that the steps waited for data. The loaders read ahead from the next
epoch, as in a run.

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
from pydist.data.blocks import BlockSource, in_epoch
from pydist.mesh import Mesh
from pydist.models import UNet3d
from pydist.tensor import ShardedTensor

OPTIONS = AugmentOptions.preset("nnunet")


def changed_share(source: BlockSource, data: ShardDataset, mesh: Mesh) -> float:
    """Returns the share of changed samples in the first epoch of a loader, after a check of them.

    Each sample of a batch must be that of the whole volume.
    """
    changed = []
    with Loader(source, mesh, 2) as loader:
        for batch in loader:
            now = in_epoch(source, batch.epoch)
            assert isinstance(batch.targets, ShardedTensor)
            inputs, labels = batch.inputs.to_local(), batch.targets.to_local()
            for n, index in enumerate(batch.indices):
                assert torch.equal(inputs[n], torch.as_tensor(now.read_block(index)))
                assert torch.equal(labels[n], torch.as_tensor(now.read_labels(index)))
                changed.append(not torch.equal(inputs[n], data.read_block(index)))
    return sum(changed) / len(changed)


def main() -> None:
    parser = common.parser(__doc__, rounds=9)
    parser.add_argument("--width", type=int, default=48, help="edge of the volumes (48)")
    parser.add_argument("--features", type=int, default=8, help="of the network (8)")
    parser.add_argument("--samples", type=int, default=16, help="volumes of an epoch (16)")
    options = parser.parse_args()
    if options.quick:
        options.width, options.features, options.samples, options.rounds = 16, 2, 8, 2
    mesh = Mesh(LocalTransport())
    waited: dict[str, list[float]] = {"plain": [], "augmented": []}
    with tempfile.TemporaryDirectory() as folder:
        shape = (options.width,) * 3
        generate_ct(Path(folder), CTOptions(count=options.samples, shape=shape, validation=0))
        data = ShardDataset(folder, normalize="ct")
        sources: dict[str, BlockSource] = {"plain": data, "augmented": Augmented(data, OPTIONS)}
        changed = {name: changed_share(each, data, mesh) for name, each in sources.items()}
        model = pydist.parallelize(UNet3d(1, 3, features=options.features, levels=3), mesh)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def epoch(name: str, loader: Loader) -> Callable[[], object]:
            def run() -> None:
                before = loader.waited_s
                for batch in loader:
                    loss = F.cross_entropy(model(batch.inputs), batch.targets)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                waited[name].append(loader.waited_s - before)

            return run

        loaders = {name: Loader(each, mesh, 2) for name, each in sources.items()}
        contestants = {name: epoch(name, each) for name, each in loaders.items()}
        for each in contestants.values():
            each()
        times = common.in_turns(contestants, options.rounds, lambda: None)
        for loader in loaders.values():
            loader.close()
    ratio = statistics.median(
        a / b for a, b in zip(times["augmented"], times["plain"], strict=True)
    )
    rows: list[dict[str, Any]] = [
        {
            "who": name, "over_plain": 1.0 if name == "plain" else ratio,
            "changed": changed[name], "waited": statistics.median(waited[name][1:]),
            **common.summary(seconds),
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
