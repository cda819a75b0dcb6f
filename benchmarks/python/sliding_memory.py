"""Measures the memory per rank of a prediction by sliding windows, on 1, 2 and 4 ranks.

A synthetic volume is written as NIfTI, and a small 3D U-Net with random weights segments it, from
reading to writing. Counted are the bytes of arrays beyond the idle predictor's: the peak of torch's
allocator, by its events, and that of NumPy's, by `tracemalloc`. "Arrays" is their sum, an upper
bound, as the two peaks are not at the same time. The resident peak (VmHWM) is shown beside it.

    python benchmarks/python/sliding_memory.py --shape 160 160 160 --window 48
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import common
import jobs
import numpy as np


def main() -> None:
    parser = common.parser(__doc__, rounds=1)
    parser.add_argument("--shape", type=int, nargs=3, default=[192, 160, 160], help="of the volume")
    parser.add_argument("--window", type=int, default=48, help="side of the windows (48)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    if options.quick:
        options.shape, options.window, options.ranks = [48, 32, 32], 16, [1, 2]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), options.shape)
        for ranks in options.ranks:
            text = json.dumps({"folder": folder, "window": options.window})
            job = {
                "job": lambda n=ranks, t=text: jobs.Job(__file__, n, ["--worker", t], options.mpi)
            }
            with jobs.running(**job) as started:
                answers = started["job"].ask("measure")
                library = started["job"].ask("library")[0]
            most = max(answers, key=lambda answer: answer["arrays_mb"])
            rows.append({"ranks": ranks, **most})
    for row in rows:
        row["ratio"] = row["arrays_mb"] / rows[0]["arrays_mb"]
    extents = "×".join(map(str, options.shape))
    print(f"{extents} voxels, 3 classes, windows of {options.window}³, MB of the rank with most")
    names = ("ranks", "torch_mb", "numpy_mb", "arrays_mb", "ratio", "resident_mb", "seconds")
    head = ("ranks", "torch", "NumPy", "arrays", "/ one rank's", "resident", "s")
    common.show(head, [tuple(row[name] for name in names) for row in rows])
    described = common.machine(mpi_library=library)
    setting = {"shape": options.shape, "window": options.window}
    common.write({"machine": described, **setting, "rows": rows}, "sliding_memory", options)


def make(folder: Path, shape: list[int]) -> None:
    """Writes a volume, and a checkpoint of a network with random weights."""
    import nibabel as nib
    import torch

    from pydist.data import Manifest
    from pydist.data.medical.generate import generate_ct
    from pydist.data.medical.options import CTOptions
    from pydist.models import UNet3d
    from pydist.train import checkpoint
    from pydist.train.config import Config, DataConfig, UNet3dConfig
    from pydist.train.metadata import CheckpointMetadata

    generate_ct(folder / "data", CTOptions(count=2, shape=(16, 16, 16)))
    manifest = Manifest.load(folder / "data")
    config = Config(model=UNet3dConfig(features=4, levels=2), data=DataConfig(normalize="ct"))
    torch.manual_seed(0)
    model = UNet3d(1, 3, 4, 2)
    parts = {
        "about": CheckpointMetadata(config, manifest).dump(),
        "model": dict(model.state_dict()),
    }
    checkpoint.write(folder / "run" / "ckpt", 1, parts)
    values = np.random.default_rng(0).integers(-100, 200, shape[::-1], dtype=np.int16)
    nib.save(nib.Nifti1Image(values, np.eye(4)), folder / "case.nii.gz")


# -- the ranks ------------------------------------------------------------------------------


def work(folder: str, window: int) -> None:
    """Runs a rank of one of the jobs."""
    import pydist

    mesh = pydist.init()

    def answer(what: str) -> Any:
        if what == "library":
            return jobs.library(mesh.world)
        return measure(mesh, Path(folder), window)

    jobs.serve(mesh.rank, answer)


def measure(mesh: Any, folder: Path, window: int) -> dict[str, float]:
    """Predicts a volume, and counts the memory."""
    from pydist.inference import Predictor, Sliding

    predictor = Predictor(folder / "run", mesh, Sliding(window), device="cpu")

    def predict() -> None:
        predictor.predict_file([folder / "case.nii.gz"], folder / "labels.nii.gz")

    predict()  # loads code
    Path("/proc/self/clear_refs").write_text("5")
    before = common.status_mb("VmRSS")
    began = time.perf_counter()
    predict()
    seconds, resident = time.perf_counter() - began, common.status_mb("VmHWM") - before
    of_torch = common.peak(predict) / 1e6
    tracemalloc.start()
    predict()
    of_numpy = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return {
        "torch_mb": of_torch,
        "numpy_mb": of_numpy,
        "arrays_mb": of_torch + of_numpy,
        "resident_mb": resident,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
