"""Compares validation errors of training at batches of 4 and 64, by recipe and without.

Two cases on synthetic universes. "small": samples of 16³ voxels of 8 Mpc/h that are added up to 8³;
three convolutions of 8, 16 and 32 channels, each with average pooling, and two linear layers;
Nesterov momentum. "cosmoflow": CosmoFlow for samples of 32³ voxels of 4 Mpc/h, without dropout;
Adam, whose rate follows the root of the batch. Both with LARS, too. All contestants of a case see
the same number of samples, and for a seed begin with the same weights. Learning rates were chosen
with another seed, at a batch of 64. Two processes of one thread train at a time, on one rank each:
a step does not depend on the number of ranks.

"within 5 %" says whether the mean over seeds of the validation MSE is at most 5 % above that of
batch 4, or above it by no more than the spread of batch 4 over its seeds.

    python benchmarks/python/large_batch.py --case cosmoflow
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from pydist.train.config import OptimizerConfig

SMALL, LARGE = 4, 64
EPOCHS, WARMUP = {"small": 8, "cosmoflow": 10}, 1.0
CHANNELS, HIDDEN = (8, 16, 32), 64
UNIVERSES: dict[str, dict[str, Any]] = {
    "small": {"count": 512, "width": 16, "box_width": 32, "cell": 8.0, "seed": 1},
    "cosmoflow": {"count": 128, "width": 32, "box_width": 64, "cell": 4.0, "seed": 1},
}
"""The universes of each case."""
RECIPE = "batch 64, recipe"
HEAD = ("contestant", "rate", "MSE", "over batch 4", "of each seed", "within 5 %", "s")

_data: dict[str, Any] = {}


def main() -> None:
    """Trains all contestants and shows their validation errors."""
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--case", choices=list(UNIVERSES), default="small", help="network (small)")
    parser.add_argument("--data", type=Path, help="folder of the universes, if they exist")
    parser.add_argument("--epochs", type=int, help=f"epochs ({EPOCHS})")
    options = parser.parse_args()
    epochs = options.epochs or EPOCHS[options.case]
    if options.quick:
        options.rounds, epochs = 2, 2
    machine = common.machine(threads_per_rank=1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or make(Path(temporary), options)
        rows = trained(folder, options, epochs)
    common.show(HEAD, [line(row) for row in rows])
    universes = UNIVERSES[options.case]
    result = {"machine": machine, "epochs": epochs, "universes": universes, "rows": rows}
    name = "large_batch" if options.case == "small" else f"large_batch_{options.case}"
    common.write(result, name, options)


def contestants(case: str, epochs: int) -> dict[str, tuple[int, OptimizerConfig]]:
    """Returns batch and optimizer by name; learning rates are those of the batch."""
    from pydist.train.config import AdamConfig, LarsConfig, SgdConfig

    common_: dict[str, Any] = {
        "warmup_epochs": WARMUP, "decay": "cosine", "decay_epochs": epochs - WARMUP, "end_lr": 1e-7,
    }  # fmt: skip
    recipe: OptimizerConfig = AdamConfig(
        lr=6.25e-5, lr_batch=SMALL, lr_scaling="sqrt", **common_
    )  # fmt: skip
    if case == "small":
        recipe = SgdConfig(lr=0.005, lr_batch=SMALL, nesterov=True, **common_)
    # Biases get the rate without a ratio: published rates of 2 and more diverge here.
    lars = LarsConfig(lr=0.08, lr_batch=LARGE, trust_coefficient=0.05, nesterov=True, **common_)
    others: dict[str, OptimizerConfig] = {"batch 64, LARS": lars}
    others["batch 64, no scaling"] = replace(recipe, lr_batch=None)
    chosen = {"batch 4": (SMALL, recipe), RECIPE: (LARGE, recipe)}
    chosen |= {name: (LARGE, each) for name, each in others.items()}
    return {name: (batch, each.at(batch)) for name, (batch, each) in chosen.items()}


def trained(folder: Path, options: argparse.Namespace, epochs: int) -> list[dict[str, Any]]:
    """Trains each contestant once for each seed; returns a row for each contestant."""
    case, chosen = options.case, contestants(options.case, epochs)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(2, spawn, initializer=load, initargs=(case, folder)) as pool:
        jobs = {
            (name, seed): pool.submit(train, case, name, seed, epochs)
            for seed in range(options.rounds)
            for name in chosen
        }
        found = {each: job.result() for each, job in jobs.items()}
    rows = []
    for name, (batch, optimizer) in chosen.items():
        runs = [found[name, seed] for seed in range(options.rounds)]
        last = [run["curve"][-1] for run in runs]
        rows.append({
            "contestant": name, "batch": batch, "lr": optimizer.lr, "mse": statistics.mean(last),
            "mse_of_seeds": last, "seconds": statistics.median(run["seconds"] for run in runs),
            "curves": [run["curve"] for run in runs],
        })  # fmt: skip
    small = rows[0]["mse_of_seeds"]
    allowed = max(0.05 * rows[0]["mse"], max(small) - min(small))
    for row in rows:
        row["over_small"] = row["mse"] / rows[0]["mse"]
        row["within"] = row["mse"] - rows[0]["mse"] <= allowed
    return rows


def line(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a row of the table."""
    seeds = " ".join(f"{each:.4f}" for each in row["mse_of_seeds"])
    within = "yes" if row["within"] else "no"
    return (
        row["contestant"], row["lr"], f"{row['mse']:.4f}", f"{row['over_small']:.3f}", seeds,
        within, row["seconds"],
    )  # fmt: skip


def make(folder: Path, options: argparse.Namespace) -> Path:
    """Makes the universes; returns their folder."""
    from pydist.data import UniverseOptions, generate_universes

    universes = dict(UNIVERSES[options.case])
    if options.quick:
        universes |= {"count": 4, "box_width": universes["width"]}
    generate_universes(folder / "data", UniverseOptions(**universes))
    return folder / "data"


def load(case: str, folder: Path) -> None:
    """Reads all samples into memory: log(1 + n) of n particles in a voxel, standardized.

    Args:
        case: "small" adds up 2³ voxels.
        folder: of the universes.
    """
    import h5py
    import numpy as np
    import torch
    from torch.nn.functional import avg_pool3d

    from pydist.data import Manifest

    torch.set_num_threads(1)
    manifest = Manifest.load(folder)
    for split in ("train", "val"):
        cubes, targets = [], []
        for each in manifest.files:
            if each.split == split:
                with h5py.File(folder / each.path) as file:
                    counts = torch.from_numpy(file["full"][...].astype(np.float32))
                    cubes.append((8 * avg_pool3d(counts, 2) if case == "small" else counts).log1p())
                    targets.append(torch.from_numpy(file["unitPar"][...]))
        _data[split] = torch.stack(cubes), torch.stack(targets)
    deviation, mean = torch.std_mean(_data["train"][0], (0, 2, 3, 4), keepdim=True)
    for inputs, _ in _data.values():
        inputs.sub_(mean).div_(deviation)


def network(case: str) -> Any:
    """Returns the network of a case, with CosmoFlow's initialization."""
    from torch import nn

    from pydist.models import CosmoFlow

    if case == "cosmoflow":
        return CosmoFlow(32, dropout=0.0)
    layers: list[nn.Module] = []
    channels = 4
    for out in CHANNELS:
        layers += [nn.Conv3d(channels, out, 3, padding=1), nn.LeakyReLU(0.01), nn.AvgPool3d(2)]
        channels = out
    layers += [nn.Flatten(), nn.Linear(channels, HIDDEN), nn.LeakyReLU(0.01)]
    model = nn.Sequential(*layers, nn.Linear(HIDDEN, 4))
    for module in model:
        if isinstance(module, nn.Conv3d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def train(case: str, name: str, seed: int, epochs: int) -> dict[str, Any]:
    """Trains a contestant; returns the validation MSE of each epoch, and the seconds."""
    import torch
    from torch.nn.functional import mse_loss

    from pydist.optim import schedule

    batch, config = contestants(case, epochs)[name]
    torch.manual_seed(seed)
    model = network(case)
    (x, target), (held, expected) = _data["train"], _data["val"]
    optimizer = config.optimizer(model.parameters())
    rates = schedule(
        optimizer, config.decay_epochs * len(x), config.end_lr, config.decay,
        warmup=config.warmup_epochs * len(x), warmup_start=config.warmup_start,
    )  # fmt: skip
    began, curve = time.perf_counter(), []
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(batch):
            loss = mse_loss(model(x[chosen]), target[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step(len(chosen))
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in held.split(64)])
        curve.append(float(mse_loss(outputs, expected)))
    return {"curve": curve, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
