"""Registries: what other packages declare is found by its name, without an edit in pydist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from children import child_environment

from pydist.errors import UsageError
from pydist.registry import TRANSPORTS, Registry, transport_names

TRANSPORT = """
from pydist.comm.transports.routed import RoutedTransport

class Counting(RoutedTransport):
    name, calls = "counting", 0

    def __init__(self, host):
        self.host, self.rank, self.size = host, host.rank, host.size

    @classmethod
    def over(cls, host, local_rank):
        return cls(host)

    def _of(self, tensors):
        Counting.calls += 1
        return self.host

    def _subgroup(self, members):
        return Counting(self.host._subgroup(members))

    def _barrier(self):
        self.host._barrier()

    def progress(self):
        self.host.progress()

    def abort(self, reason, exit_code):
        self.host.abort(reason, exit_code)

    def close(self):
        self.host.close()
"""

SCRIPT = """
import torch
import pydist
from my_transports import Counting

mesh = pydist.init(spatial=(2, 1, 1), transport="counting")
torch.manual_seed(0)
conv, x = torch.nn.Conv3d(1, 2, 3, padding=1).double(), torch.randn(1, 1, 6, 4, 4).double()
expected = conv(x).detach()
y = pydist.parallelize(conv, mesh)(pydist.distribute_tensor(x, mesh))
assert (y.full_tensor() - expected).abs().max() < 1e-14
assert Counting.calls > 0
if mesh.rank == 0:
    print(mesh)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package that declares two transports; one can't be imported."""
    (tmp_path / "my_transports.py").write_text(TRANSPORT)
    about = tmp_path / "my_transports-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-transports\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[pydist.transports]\ncounting = my_transports:Counting\nbroken = my_transports:Missing\n"
        "nccl = my_transports:Counting\n"
    )
    return tmp_path


def test_a_transport_of_another_package_trains(package, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = child_environment(OMP_NUM_THREADS="1", PYDIST_TUNE="0")
    environment["PYTHONPATH"] = f"{package}:{environment.get('PYTHONPATH', '')}"
    ended = subprocess.run(
        [sys.executable, "-m", "pydist", "run", "-n", "2", "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "depth 2, rank 0 of 2, counting" in ended.stdout


def test_names_of_packages_come_behind_and_do_not_replace(package, monkeypatch):
    monkeypatch.syspath_prepend(package)
    registry = Registry("transport", {"nccl": "pydist.registry:TRANSPORTS"})
    assert registry.names == ("nccl", "broken", "counting")
    assert registry.get("nccl") is TRANSPORTS
    assert registry.get("counting").name == "counting"
    with pytest.raises(UsageError, match=r"'broken' \(my_transports:Missing\): .*Missing"):
        registry.get("broken")
    with pytest.raises(UsageError, match="'ncl' is none of nccl, broken, counting"):
        registry.get("ncl")


def test_own_transports_are_what_they_are_called():
    for name in TRANSPORTS.names:
        if name != "cuda-mpi":  # its module needs an MPI
            assert TRANSPORTS.get(name).name == name
    assert {"auto", "mpi", "c10d", "local", "host", *TRANSPORTS.names} <= set(transport_names())
