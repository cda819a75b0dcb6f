"""Measures the latency of `pydist serve` on one and several ranks, for one and several clients.

A U-Net segments synthetic CT volumes by sliding windows, dealt out to the ranks. Each client
sends its next request when it has the answer to the last one, over loopback. Latency is that of a
request, with the volume's upload and the labels' download; all answers must be equal.

    python benchmarks/python/serving.py --ranks 2 --clients 1 4
"""

from __future__ import annotations

import argparse
import http.client
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import numpy as np

WINDOW = 32
HEAD = ("ranks", "clients", "requests", "p50, ms", "p99, ms", "requests/s")
_WARMUP = 3


def main() -> None:
    """Measures all numbers of ranks and clients in turns."""
    parser = common.parser(__doc__, rounds=100)
    parser.add_argument("--ranks", type=int, default=2, help="ranks, besides one (2)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="(1 4)")
    parser.add_argument("--edge", type=int, default=64, help="voxels along a volume's side (64)")
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich, gloo or auto")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.edge = 4, 32
    with tempfile.TemporaryDirectory() as folder:
        image = trained(Path(folder), options.edge)
        rows, answers = [], set()
        for ranks in (1, options.ranks):
            with served(Path(folder, "run"), ranks, options) as port:
                for clients in options.clients:
                    seconds, taken, labels = measured(port, image, clients, options.rounds)
                    answers |= labels
                    rows.append(
                        {"ranks": ranks, "clients": clients, "requests": len(seconds),
                         "p50": float(np.percentile(seconds, 50)),
                         "p99": float(np.percentile(seconds, 99)),
                         "requests_per_second": len(seconds) / taken}
                    )  # fmt: skip
    if len(answers) > 1:
        raise SystemExit(f"{len(answers)} different answers to one request")
    common.show(
        HEAD,
        [(r["ranks"], r["clients"], r["requests"], 1e3 * r["p50"], 1e3 * r["p99"],
          r["requests_per_second"]) for r in rows],
    )  # fmt: skip
    settings = {"edge": options.edge, "window": WINDOW}
    common.write({"machine": common.machine(), **settings, "rows": rows}, "serving", options)


def trained(folder: Path, edge: int) -> bytes:
    """Trains a small U-Net for a step; returns a volume as .npy."""
    from pydist.data import ShardDataset
    from pydist.data.medical.generate import generate_ct
    from pydist.data.medical.options import CTOptions
    from pydist.setup import init
    from pydist.train.config import Config, DataConfig, OutputConfig, TrainConfig, UNet3dConfig
    from pydist.train.run import train

    generate_ct(folder / "data", CTOptions(count=1, shape=(edge,) * 3, validation=0.0))
    config = Config(
        model=UNet3dConfig(features=8, levels=2),
        data=DataConfig(path=folder / "data", normalize="ct"),
        train=TrainConfig(epochs=1, batch=1, steps=1),
        output=OutputConfig(folder=folder / "run", plot=False),
    )
    train(config, init(1, (1, 1, 1), "local"))
    content = io.BytesIO()
    np.save(content, ShardDataset(folder / "data", normalize="none")[0][0].numpy())
    return content.getvalue()


@contextmanager
def served(run: Path, ranks: int, options: argparse.Namespace) -> Iterator[int]:
    """Starts a server for the `with` block; yields its port. It must end in order."""
    command = [sys.executable, "-m", "pydist", "serve", str(run), "-n", str(ranks), "--port", "0"]
    command += ["--sliding", str(WINDOW), "--overlap", "0.5", "--mpi", options.mpi]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.match(r"serving +http://127\.0\.0\.1:(\d+)", line):
                yield int(found[1])
                break
    finally:
        server.send_signal(signal.SIGTERM)
        rest = server.stdout.read()
        code = server.wait(60)
    if code or not rest.startswith("served"):
        raise SystemExit(f"the server ended with code {code}")


def measured(
    port: int, image: bytes, clients: int, requests: int
) -> tuple[list[float], float, set[bytes]]:
    """Returns the seconds of each request, of all together, and the different answers."""

    def client(count: int) -> tuple[list[float], set[bytes]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        seconds, answers = [], set()
        for _ in range(count):
            began = time.perf_counter()
            connection.request("POST", "/predict", image)
            answer = connection.getresponse()
            content = answer.read()
            seconds.append(time.perf_counter() - began)
            if answer.status != 200:
                raise SystemExit(f"{answer.status}: {content[:200]!r}")
            answers.add(content)
        connection.close()
        return seconds, answers

    client(_WARMUP)
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found: list[Any] = list(pool.map(client, [max(1, requests // clients)] * clients))
    taken = time.perf_counter() - began
    return [s for own, _ in found for s in own], taken, set().union(*(a for _, a in found))


if __name__ == "__main__":
    main()
