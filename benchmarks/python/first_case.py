"""Measures the time of each command from a folder of NIfTI files to a predicted case's Dice.

The commands are those of docs/prediction.md, with a MONAI UNet on synthetic CT volumes, or on a
folder of your own in the layout of the Medical Segmentation Decathlon. Times include the start of
Python and the import of torch and MONAI.

    python benchmarks/python/first_case.py --ranks 2
    python benchmarks/python/first_case.py --volumes Task09_Spleen --case spleen_10
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

FACTORY = "monai.networks.nets:UNet"


def main() -> None:
    parser = common.parser(__doc__, rounds=1)
    parser.add_argument("--volumes", type=Path, help="folder with imagesTr and labelsTr")
    parser.add_argument("--case", default="ct_0000", help="the case that is predicted (ct_0000)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=40, help="of training (40)")
    options = parser.parse_args()
    count, edge = ("4", "32") if options.quick else ("12", "64")
    epochs = 1 if options.quick else options.epochs
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        volumes = options.volumes and options.volumes.resolve()
        if volumes is None:
            volumes = Path(folder) / "Task00_Synthetic"
            made = ["--format", "nifti", "--count", count, "--shape", edge, edge, edge]
            commands.append(["data", "ct", str(volumes), *made])
        images = sorted((volumes / "imagesTr").glob(f"{options.case}*")) or [
            volumes / "imagesTr" / f"{options.case}_0000.nii.gz"
        ]
        truth = volumes / "labelsTr" / f"{options.case}.nii.gz"
        ranks = ["-n", str(options.ranks)]
        config = str(common.ROOT / "examples" / "monai_unet.toml")
        commands += [
            ["data", "nifti", str(volumes), "ct", "--multiple", "16"],
            ["train", config, *ranks, "--train.epochs", str(epochs)],
            [
                "predict", "runs/monai_unet", *map(str, images), "-o", "case.nii.gz", *ranks,
                "--factory", FACTORY, "--truth", str(truth),
            ],
        ]  # fmt: skip
        rows = [timed(command, folder) for command in commands]
    common.show(("command", "s"), [(row["command"], row["seconds"]) for row in rows])
    print(rows[-1]["said"])
    setting = {"ranks": options.ranks, "epochs": epochs}
    described = {"machine": common.machine(), **setting, "rows": rows}
    common.write(described, "first_case", options)


def timed(command: list[str], folder: str) -> dict[str, object]:
    """Runs a command of pydist; returns its time and its last line."""
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "pydist", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(common.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"pydist {' '.join(command)}\n{ended.stdout}{ended.stderr}")
    said = ended.stdout.strip().splitlines()[-1]
    seconds = time.perf_counter() - began
    return {"command": " ".join(command[:2]), "seconds": round(seconds, 1), "said": said}


if __name__ == "__main__":
    main()
