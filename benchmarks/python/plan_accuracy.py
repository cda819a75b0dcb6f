"""Compares predicted and measured time and memory of training steps, on 1 and 2 ranks.

The hardware is measured first, as by `pydist env --bench`. Then every mesh, and two stages with two
micro-batches, train each network for some steps, in turns, and the plan's numbers are compared with
the medians. Times are of forward, backward and Adam; memory is the peak of torch's allocator in a
step, by the profiler's events, so without parameters and the optimizer's state. Accuracy is
ParaDL's: 1 - |predicted - measured| / measured.

    python benchmarks/python/plan_accuracy.py

Two fits of a machine, in other states of it, are compared by what they predict:

    pydist env --bench calm.json -n 2      # and later
    pydist env --bench busy.json -n 2
    python benchmarks/python/plan_accuracy.py --profiles calm.json busy.json
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import common
import jobs
from formatting import result_of

NETWORKS = {
    "CosmoFlow, 64³": ("cosmoflow", 64),
    "CosmoFlow, 128³": ("cosmoflow", 128),
    "MONAI UNet, 96³": ("monai", 96),
    "the paper's U-Net, 64³": ("unet", 64),
}
MESHES: dict[str, dict[str, int]] = {
    "1 rank": {},
    "data 2": {"data": 2},
    "channel 2": {"channel": 2},
    "depth 2": {"depth": 2},
    "height 2": {"height": 2},
    "width 2": {"width": 2},
}
SCHEDULES = {"2 stages, gpipe": "gpipe", "2 stages, 1f1b": "1f1b"}
"""Schedules of two stages of one rank each, with a micro-batch for each sample."""
PLACES = (*MESHES, *SCHEDULES)
BATCH = 2
_CHOOSING = 15
"""First steps, which are not measured: the autotuner spreads its measurements over ten of them."""
_MANY = 1 << 30
"""Ranks for which no convolution is measured here."""
HEAD = ("network", "mesh", "predicted, s", "measured, s", "ratio", "MB predicted", "counted", "/")
COUNTED = ("gradients", "activations", "transient", "halos", "copies", "buckets")
"""Parts of a predicted peak that are allocated in a step."""


def main() -> None:
    """Starts the ranks and shows predictions with measurements, or runs one of the ranks."""
    parser = common.parser(__doc__, rounds=7)
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--network", type=int, nargs="+", help="measure some, from 0 on, anew")
    parser.add_argument(
        "--profiles", nargs=2, metavar="FILE", help="compare the predictions of two profiles"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    names = [*NETWORKS]
    chosen = range(len(names)) if options.network is None else options.network
    networks = {names[number]: NETWORKS[names[number]] for number in chosen}
    if options.quick:
        networks, options.rounds = {"CosmoFlow, 32³": ("cosmoflow", 32)}, 1
    if options.profiles is not None:
        compare(networks, options)
        return

    def start(ranks: int) -> Callable[[], jobs.Job]:
        return lambda: jobs.Job(__file__, ranks, ["--worker"], options.mpi)

    with jobs.running(one=start(1), two=start(2)) as started:
        hardware = started["two"].ask("hardware")[0]
        rows = []
        for name, (kind, width) in networks.items():
            job = {mesh: started["one" if is_one_rank(mesh) else "two"] for mesh in PLACES}
            for mesh, each in job.items():
                each.ask("prepare", kind=kind, width=width, mesh=mesh)
            peaks = {mesh: max(each.ask("peak", mesh=mesh)) for mesh, each in job.items()}

            def step(mesh: str, _: int, job: dict[str, jobs.Job] = job) -> float:
                return max(job[mesh].ask("step", mesh=mesh))

            seconds = jobs.interleave(list(PLACES), options.rounds, step)
            for mesh, taken in seconds.items():
                row = {"network": name, "mesh": mesh, "measured": common.summary(taken)}
                row["counted"] = peaks[mesh]
                rows.append(row | predicted(kind, width, mesh, hardware))
            for each in started.values():
                each.ask("forget")
    show(rows)
    if options.network is not None:
        rows += others(networks)
    result = {"machine": common.machine(), "hardware": hardware, "batch": BATCH, "rows": rows}
    common.write(result, "plan_accuracy", options)


def others(networks: Collection[str]) -> list[dict[str, Any]]:
    """Returns the kept rows of other networks, with the commit at which they were measured."""
    before = result_of("plan_accuracy")
    commit = before["machine"]["commit"]
    return [{"commit": commit, **row} for row in before["rows"] if row["network"] not in networks]


def is_one_rank(mesh: str) -> bool:
    """Returns whether a mesh has a single rank."""
    return mesh in MESHES and not MESHES[mesh]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table, the mean accuracy, and how good the best predicted mesh is."""
    lines = []
    for row in rows:
        taken, peak = row["measured"]["median"], row["counted"] / 1e6
        of_step = sum(row["memory"][part] for part in COUNTED) / 1e6
        lines.append(
            (row["network"], row["mesh"], row["step"], taken, row["step"] / taken,
             of_step, peak, of_step / peak)
        )  # fmt: skip
    print(f"a step of {BATCH} samples")
    common.show(HEAD, lines)
    accuracy = [1 - abs(line[4] - 1) for line in lines]
    print(f"mean accuracy of the time {sum(accuracy) / len(accuracy):.1%}")
    for name in dict.fromkeys(row["network"] for row in rows):
        of_two = [row for row in rows if row["network"] == name and not is_one_rank(row["mesh"])]
        chosen = min(of_two, key=lambda row: row["step"])
        best = min(of_two, key=lambda row: row["measured"]["median"])
        ratio = chosen["measured"]["median"] / best["measured"]["median"]
        print(f"{name}: predicted best {chosen['mesh']}, {ratio:.2f} × the time of {best['mesh']}")


def compare(networks: dict[str, tuple[str, int]], options: argparse.Namespace) -> None:
    """Prints the steps that two profiles predict, and how far apart they are."""
    from dataclasses import asdict

    from pydist.hardware import load_hardware

    profiles = [asdict(load_hardware(path)) for path in options.profiles]
    rows = []
    for name, (kind, width) in networks.items():
        for mesh in PLACES:
            first, second = (
                predicted(kind, width, mesh, each, measures=False)["step"] for each in profiles
            )
            rows.append((name, mesh, first, second, second / first))
    common.show(("network", "mesh", *options.profiles, "ratio"), rows)
    apart = [max(row[-1], 1 / row[-1]) - 1 for row in rows]
    print(
        f"predictions differ by {sum(apart) / len(apart):.1%} on average, {max(apart):.1%} at most"
    )
    result = {"machine": common.machine(), "profiles": profiles, "batch": BATCH, "rows": rows}
    common.write(result, "plan_profiles", options)


def predicted(
    kind: str, width: int, mesh: str, hardware: dict[str, Any], *, measures: bool = True
) -> dict[str, Any]:
    """Returns the plan's seconds and bytes of a mesh.

    Args:
        kind: of the network.
        width: of its samples.
        mesh: name of the mesh.
        hardware: the profile.
        measures: whether to measure convolutions whose times are not known.
    """
    from pydist.grid import Grid
    from pydist.hardware import hardware_of
    from pydist.plan import Training, estimate_step
    from pydist.plan.choosing import step_model
    from pydist.plan.estimate import InStages
    from pydist.plan.in_stages import estimate_in_stages

    ranks = 1 if measures else _MANY
    model = step_model(traced(kind, width), Training(batch=BATCH), hardware_of(hardware), ranks)
    found = (
        estimate_step(model, Grid.of(MESHES[mesh]))
        if mesh in MESHES
        else estimate_in_stages(model, Grid.of({}), InStages(2, BATCH, SCHEDULES[mesh]))
    )
    assert found is not None, "fewer calls than stages"
    return {"step": found.step, "seconds": dict(found.seconds), "memory": dict(found.memory)}


@cache
def traced(kind: str, width: int) -> Any:
    """Returns the trace of a network."""
    from pydist.plan import trace_network

    network, sample, _ = made(kind, width)
    return trace_network(network, sample, lambda output: loss_of(kind, output))


def made(kind: str, width: int) -> tuple[Any, tuple[int, ...], Any]:
    """Returns a network, the shape of a sample, and the targets of a batch."""
    import torch

    torch.manual_seed(0)
    if kind == "cosmoflow":
        from pydist.models import CosmoFlow

        cosmoflow = CosmoFlow(width, batch_norm=True, dropout=0.0)
        return cosmoflow, (4, width, width, width), torch.ones(BATCH, 4)
    if kind == "unet":
        from pydist.models import UNet3d

        network: Any = UNet3d(classes=2)
    else:
        from monai.networks.nets.unet import UNet

        network = UNet(3, 1, 2, (16, 32, 64, 128, 256), (2, 2, 2, 2), num_res_units=2)
    classes = torch.zeros(BATCH, width, width, width, dtype=torch.int64)
    return network, (1, width, width, width), classes


def loss_of(kind: str, output: Any, targets: Any = None) -> Any:
    """Returns the loss; of zeros where there are no targets, as for a trace."""
    import torch
    import torch.nn.functional as F

    if kind == "cosmoflow":
        return F.mse_loss(output, torch.zeros_like(output) if targets is None else targets)
    if targets is None:
        targets = torch.zeros(output.shape[0], *output.shape[2:], dtype=torch.int64)
    return F.cross_entropy(output, targets)


# -- the ranks ------------------------------------------------------------------------------


def work() -> None:
    """Runs a rank of one of the jobs."""
    from dataclasses import asdict

    import pydist
    from pydist.plan.measuring import measure_hardware

    world = pydist.init().world
    contestants: dict[str, OnMesh | InTwoStages] = {}

    def answer(what: str, **details: Any) -> Any:
        if what == "hardware":
            return asdict(measure_hardware(world, "here"))
        if what == "forget":
            contestants.clear()
            gc.collect()
            return None
        if what == "prepare":
            kind = OnMesh if details["mesh"] in MESHES else InTwoStages
            contestants[details["mesh"]] = kind(world, **details)
            return None
        step = contestants[details["mesh"]]
        if what == "peak":
            world.barrier()
            return common.peak(step)
        world.barrier()
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    jobs.serve(world.rank, answer)


class OnMesh:
    """Network that is trained on a mesh, with its batch.

    Args:
        world: the ranks.
        kind: of the network.
        width: of its samples.
        mesh: name of the mesh.
    """

    def __init__(self, world: Any, kind: str, width: int, mesh: str) -> None:
        import torch

        import pydist
        from pydist.grid import SPATIAL_AXES

        sizes, self._kind = MESHES[mesh], kind
        spatial = [sizes.get(axis, 1) for axis in SPATIAL_AXES]
        self._world = world
        made_mesh = pydist.Mesh(
            world, sizes.get("data", 1), spatial, axes={"channel": sizes.get("channel", 1)}
        )
        network, sample, targets = made(kind, width)
        self._network = pydist.parallelize(network, made_mesh)
        self._optimizer = torch.optim.Adam(network.parameters(), fused=True)
        own = BATCH // made_mesh.data_size
        dims = dict(enumerate(SPATIAL_AXES, start=2))
        x = torch.rand(own, *sample, generator=torch.Generator().manual_seed(1))
        self._x = pydist.distribute_tensor(x, made_mesh, dims)
        self._targets = targets[:own]
        if kind != "cosmoflow":
            cut = {dim - 1: axis for dim, axis in dims.items()}
            self._targets = pydist.distribute_tensor(self._targets, made_mesh, cut)
        for _ in range(_CHOOSING):
            self()

    def __call__(self) -> None:
        """Takes a step."""
        loss = loss_of(self._kind, self._network(self._x), self._targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class InTwoStages:
    """Network that is trained in two stages, with its batch; arguments as of `OnMesh`."""

    def __init__(self, world: Any, kind: str, width: int, mesh: str) -> None:
        import torch

        from pydist.stages import Stages, pipeline

        self._kind = kind
        network, sample, self._targets = made(kind, width)
        self._x = torch.rand(BATCH, *sample, generator=torch.Generator().manual_seed(1))
        self._pipe = pipeline(
            network, Stages(world, [{}, {}]), self._x[:1], micro_batches=BATCH,
            schedule=SCHEDULES[mesh],
        )  # fmt: skip
        self._optimizer = torch.optim.Adam(network.parameters(), fused=True)
        for _ in range(_CHOOSING):
            self()

    def __call__(self) -> None:
        """Takes a step."""
        self._pipe.step(self._x, self._targets, lambda y, t: loss_of(self._kind, y, t))
        self._optimizer.step()
        self._optimizer.zero_grad()


if __name__ == "__main__":
    main()
