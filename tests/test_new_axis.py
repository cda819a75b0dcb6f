"""Test of the recipe for a mesh axis: one line in a copy of the package, and it is everywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pydist
from pydist.data import UniverseOptions, generate_universes
from pydist.train import log
from support.jobs.children import child_environment

TABLE = "OTHER_AXES = {\n"
LINE = '    "time": "the sample\'s frames",\n'

SCRIPT = """
import json
from pathlib import Path

import torch
import pydist
from pydist.check import check
from pydist.cli.main import main
from pydist.comm import LocalTransport, run_local
from pydist.errors import UsageError
from pydist.mesh import Mesh
from pydist.stages import Stages, pipeline
from torch import nn
from torch.nn.functional import mse_loss

mesh = pydist.init(time=2)
assert str(mesh.grid) == "time 2", mesh
assert (mesh.coords["time"], mesh.group(("time",)).size) == (mesh.rank, 2)

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU()).double()

torch.manual_seed(1)
x, target = torch.randn(2, 3, 4, 4, 4).double(), torch.randn(2, 4, 4, 4, 4).double()

# A tensor cut along it: each rank has 2 or 1 of 3 frames.
frames = x.movedim(1, 2).clone().requires_grad_()
cut = pydist.distribute_tensor(frames.detach(), mesh, dims={2: "time"}).requires_grad_()
assert cut.to_local().shape == (2, 4, 2 - mesh.rank, 4, 4)
weight = torch.randn(5, 4, 1, 1, 1).double()
whole, split = torch.conv3d(frames, weight), torch.conv3d(cut, weight)
assert (split.full_tensor() - whole).abs().max() < 1e-12
whole.square().mean().backward()
split.square().mean().backward()
assert (cut.grad.full_tensor() - frames.grad).abs().max() < 1e-12

# A step whose ranks along it are replicas equals one on one device.
def step(model, x, target):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    return float(loss.detach()), [p.detach() for p in model.parameters()]

alone, of_one = step(network(), x, target)
together, of_two = step(
    pydist.parallelize(network(), mesh),
    pydist.distribute_tensor(x, mesh),
    pydist.distribute_tensor(target, mesh),
)
assert abs(alone - together) < 1e-12
assert all((a - b).abs().max() < 1e-12 for a, b in zip(of_one, of_two, strict=True))

def staged(world):
    stages = Stages(world, [{"time": 2, "shares": {"time": (2, 1)}}, {"spatial": (2, 1, 1)}])
    model = network()
    pipe = pipeline(model, stages, x)
    assert abs(float(pipe.step(x, target, mse_loss)) - alone) < 1e-12
    return str(stages.meshes[0].grid)

assert run_local(staged, 4) == ["time 2"] * 4

report = check(network, (3, 4, 4, 4), (2, 1, 1), time=2)
assert report.ok and len(report.calls) == 4
try:
    pydist.init(times=2)
except UsageError as error:
    assert "expected counts of time, channel" in str(error), error

for arguments in COMMANDS:
    assert main(arguments.split()) == 0
"""

CONFIG = """
[model]
variant = "mlperf"
width = 32
[data]
path = "universes"
{more}
[mesh]
{mesh}
[train]
steps = 3
batch = 2
validate_every = 0
[output]
folder = "{folder}"
plot = false
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Runs the script on two ranks with a copy of the package to which a line was added."""
    folder = tmp_path_factory.mktemp("axis")
    package = Path(pydist.__path__[0])
    copy = shutil.copytree(package, folder / "copy" / "pydist", ignore=lambda *_: {"__pycache__"})
    grid = copy / "grid.py"
    assert grid.read_text().count(TABLE) == 1
    grid.write_text(grid.read_text().replace(TABLE, TABLE + LINE))
    generate_universes(
        folder / "universes", UniverseOptions(count=3, width=32, box_width=32, validation=0)
    )
    runs = {
        "one": ("", "transport = 'local'"),
        "auto": ("", 'time = 2\nspatial = "auto"'),
        "two": ('store = "memory"', "time = 2\nshares = {time = [2, 1]}"),
    }
    for name, (more, mesh) in runs.items():
        (folder / f"{name}.toml").write_text(CONFIG.format(more=more, mesh=mesh, folder=name))
    commands = ["train two.toml --mesh.time 2", "train auto.toml"]
    commands += ["check nets.py:network --sample 1,4,4 --time 2"]
    (folder / "nets.py").write_text(
        "from torch import nn\ndef network():\n    return nn.Conv2d(1, 2, 3)\n"
    )
    (folder / "script.py").write_text(SCRIPT.replace("COMMANDS", repr(commands)))
    environment = child_environment(OMP_NUM_THREADS="1", PYDIST_TUNE="0")
    environment["PYTHONPATH"] = f"{folder / 'copy'}:{environment.get('PYTHONPATH', '')}"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pydist", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    assert run("train", "one.toml").returncode == 0
    return folder, run("run", "-n", "2", "script.py")


def test_an_axis_of_one_line_is_an_argument_everywhere(ended) -> None:
    assert ended[1].returncode == 0, ended[1].stderr
    assert "split time 2, 2×1" in ended[1].stdout
    assert 'mesh.spatial = "auto": time 2, predicted' in ended[1].stdout


def test_replicas_along_a_new_axis_train_as_one_device(ended) -> None:
    one, two = (list(log.losses(ended[0] / name / "log.jsonl").values()) for name in ("one", "two"))
    assert len(two) == 3
    assert two == pytest.approx(one, rel=1e-5)
    assert "time = 2" in (ended[0] / "two" / "config.toml").read_text()
