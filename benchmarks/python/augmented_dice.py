"""Compares Dice of `pydist demo unet` on unseen CT volumes with augmentation and without.

For each seed all train the same number of steps on one rank. Volumes and epochs are those of the
demo; augmented samples take longer to learn.

    python benchmarks/python/augmented_dice.py                       about 15 minutes
    python benchmarks/python/augmented_dice.py --epochs 48
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import common

from pydist.comm import LocalTransport
from pydist.data import AugmentOptions, CTOptions, generate_ct
from pydist.mesh import Mesh
from pydist.train.config import (
    AdamConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    OutputConfig,
    TrainConfig,
    UNet3dConfig,
)
from pydist.train.log import read
from pydist.train.run import train

FORMS = {
    "none": AugmentOptions(),
    "flips": AugmentOptions(flip=("depth", "height", "width")),
    "nnunet": AugmentOptions.preset("nnunet"),
}


def dice_of(folder: Path, data: Path, augment: AugmentOptions, seed: int, epochs: int) -> Any:
    """Trains once; returns Dice by class over the validation set."""
    config = Config(
        model=UNet3dConfig(features=8),
        data=DataConfig(path=data, normalize="ct", augment=augment),
        optimizer=AdamConfig(lr=1e-2, decay_epochs=float(epochs), end_lr=1e-4),
        train=TrainConfig(epochs=epochs, batch=2, loss="dice_ce", validate_every=0, seed=seed),
        checkpoint=CheckpointConfig(every=10**9, resume="never"),
        output=OutputConfig(folder=folder, plot=False),
    )
    train(config, Mesh(LocalTransport(), seed=seed))
    last = [event for event in read(folder / "log.jsonl") if event["event"] == "validation"][-1]
    return {name: last["dice"][name] or 0.0 for name in ("liver", "tumor")}


def main() -> None:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--volumes", type=int, default=52, help="a quarter validates (52)")
    parser.add_argument("--width", type=int, default=48, help="edge of the volumes (48)")
    parser.add_argument("--epochs", type=int, default=16, help="of each run (16)")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    options = parser.parse_args()
    if options.quick:
        options.volumes, options.width, options.epochs, options.rounds = 4, 16, 1, 1
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        data, shape = Path(place) / "data", (options.width,) * 3
        spacing = (256 / options.width,) * 3
        generate_ct(data, CTOptions(count=options.volumes, shape=shape, spacing=spacing))
        for seed in range(options.rounds):
            for name in options.forms:
                augment = FORMS[name]
                folder = Path(place) / f"{name}-{seed}"
                found = dice_of(folder, data, augment, seed, options.epochs)
                rows.append({"augment": name, "seed": seed, **found})
    means = [
        (name, *(
            statistics.mean(row[each] for row in rows if row["augment"] == name)
            for each in ("liver", "tumor")
        ))
        for name in options.forms
    ]  # fmt: skip
    common.show(("augment", "liver", "tumor"), means)
    setting = {name: getattr(options, name) for name in ("volumes", "width", "epochs")}
    common.write({"machine": common.machine(), **setting, "rows": rows}, "augmented_dice", options)


if __name__ == "__main__":
    main()
