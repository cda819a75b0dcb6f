"""Chooses the device, times calls by its events, and reports results of gpu_*.py benchmarks.

On one H200, each of them takes less than a minute. With `--device cpu` they run at tiny sizes as a
self-test: such times mean nothing and are only written to the file of `--json`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import jobs
import torch

from pydist._loader import native

Call = Callable[[], object]

_WARM_UP = 2
_HEAD_START = 1e-3
"""Seconds for which the device is kept busy while the host queues the timed calls."""
_CYCLES = 20_000_000
"""Clock cycles per check of the clock rate."""
_SETTLING = 0.3, 2.0
"""Minimum and maximum seconds of work until the clock rate is stable."""


def options_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the options of all GPU benchmarks.

    Args:
        description: the script's docstring.
        rounds: default number of timings per contestant.
    """
    made = common.parser(description, rounds)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a self-test")
    made.add_argument(
        "--seconds", type=float, default=45.0, help="time limit; the rest is listed as not run (45)"
    )
    return made


def device_of(options: argparse.Namespace) -> torch.device:
    """Returns the device to measure; ends the script with one line if there is none.

    On the CPU, sets tiny sizes in `options`.
    """
    if options.device == "cpu":
        options.quick = True
        options.rounds = min(options.rounds, 2)
        return torch.device("cpu")
    if not native.has_cuda or not torch.cuda.is_available():
        sys.exit(f"{name()}: needs a CUDA device, torch and pydist built with CUDA")
    return torch.device("cuda", torch.cuda.current_device())


def sharing() -> str:
    """Returns how processes share a device: at the same time by MPS, else in turns of about 2 ms.

    Start MPS with nvidia-cuda-mps-control -d, and set CUDA_MPS_PIPE_DIRECTORY.
    """
    return "MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "turns"


def name() -> str:
    """Returns the name of the benchmark, which is the script's."""
    return Path(sys.argv[0]).stem


@contextmanager
def precision(kind: str, algorithms: int = 10) -> Iterator[None]:
    """Sets float32 products to "fp32" or "tf32", and how cuDNN chooses its algorithms.

    Args:
        kind: "fp32", "tf32", or another name, which is like "fp32".
        algorithms: number of algorithms, the best ones by cuDNN's heuristics, that cuDNN times to
            choose one; 0 to take the first. At large sizes the slowest of 10 take many seconds.
    """
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit
    cudnn.allow_tf32 = products.allow_tf32 = kind == "tf32"
    cudnn.benchmark = algorithms > 0
    cudnn.benchmark_limit = max(algorithms, 1)
    try:
        yield
    finally:
        cudnn.allow_tf32, products.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit = before


def l2_bytes(device: torch.device) -> int:
    """Returns the size of the device's last cache, in bytes."""
    if device.type == "cpu":
        return 1 << 16
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))


class Stopwatch:
    """Times calls on a device, after a head start that hides the host's time to queue them.

    Args:
        device: the device; for the CPU, times are the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cycles_a_second = 0.0
        if device.type == "cuda":
            self._cycles_a_second = self._settled()

    def _settled(self) -> float:
        """Returns clock cycles per second once the rate is stable; an idle device is slower."""
        began, before = time.monotonic(), 0.0
        while True:
            found = _CYCLES / self._between(lambda: torch.cuda._sleep(_CYCLES))
            least, most = (began + each < time.monotonic() for each in _SETTLING)
            if most or (least and abs(found - before) < 0.01 * found):
                return found
            before = found

    def steps(self, call: Call, repeats: int) -> float:
        """Returns seconds per consecutive call, including the device's waits for the host."""
        return self._between(lambda: [call() for _ in range(repeats)]) / repeats

    def kernels(self, calls: Sequence[Call]) -> float:
        """Returns seconds per call of calls that are queued before the device starts the first.

        Raises:
            SystemExit: the host is slower than any reasonable head start.
        """
        if self._device.type == "cpu":
            return self._between(lambda: [call() for call in calls]) / len(calls)
        ahead = _HEAD_START
        while ahead < 1.0:
            torch.cuda.synchronize()
            torch.cuda._sleep(int(ahead * self._cycles_a_second))
            start, stop = self._event(), self._event()
            start.record()
            for call in calls:
                call()
            stop.record()
            in_time = not start.query()
            stop.synchronize()
            if in_time:
                return float(start.elapsed_time(stop)) / 1e3 / len(calls)
            ahead *= 2
        sys.exit(f"{name()}: {len(calls)} calls are not queued within a second")

    def sleep(self, seconds: float) -> None:
        """Keeps the current stream busy."""
        torch.cuda._sleep(int(seconds * self._cycles_a_second))

    def _between(self, call: Call) -> float:
        if self._device.type == "cpu":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        start, stop = self._event(), self._event()
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)


class Budget:
    """Time limit of a script, after which measurements are left out.

    Attributes:
        left_out: measurements without time.
        failed: failed measurements; with any, `report` ends the script with exit code 1.
    """

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self.left_out: list[str] = []
        self.failed: list[str] = []

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return self._ends - time.monotonic()

    def allows(self, what: str) -> bool:
        """Returns whether time is left for a measurement; else adds it to `left_out`."""
        if self.left > 0:
            return True
        self.left_out.append(what)
        return False


def timed(
    contestants: Mapping[Any, Callable[[], float]], rounds: int, most: float | None = None
) -> dict[Any, list[float]]:
    """Times all contestants, interleaved, in an order that changes from round to round.

    Args:
        contestants: functions, by name, that return a time in seconds.
        rounds: number of timings per contestant.
        most: time limit in seconds, estimated from one round; at least two rounds are run. None for
            no limit: ranks that exchange messages need the same number of rounds.
    """
    began = time.monotonic()
    for contestant in contestants.values():
        contestant()
    one = time.monotonic() - began
    if most is not None:
        rounds = max(2, min(rounds, int(most / max(one, 1e-9)) - _WARM_UP))
    return jobs.interleave(
        list(contestants), rounds, lambda each, _: contestants[each](), warm_up=_WARM_UP - 1
    )


def report(
    options: argparse.Namespace, device: torch.device, budget: Budget | None = None, **content: Any
) -> None:
    """Prints what was left out, and writes the result with descriptions of machine and device.

    Raises:
        SystemExit: a measurement failed; the others are written.
    """
    left_out, failed = ([], []) if budget is None else (budget.left_out, budget.failed)
    if left_out:
        print(f"no time was left for {', '.join(left_out)}")
    found = {"machine": common.machine(**_about(device)), **content, "not_run": left_out}
    found |= {"failed": failed} if failed else {}
    common.write(found, name() if device.type == "cuda" else f"{name()}_cpu", options)
    if failed:
        sys.exit(f"{name()}: failed: {'; '.join(failed)}")


def _about(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"device": "none: a self-test on the CPU"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "device_memory_gb": round(properties.total_memory / 1e9, 1),
        "l2_mb": round(l2_bytes(device) / 1e6, 1),
        **_asked("driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _asked(*names: str) -> dict[str, str]:
    """Returns what nvidia-smi says of the first device now, at the end of a benchmark."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = said.stdout.split("\n")[0].split(",")
    return {name: value.strip() for name, value in zip(names, values, strict=False)}
