"""Tests of missing memory: what a run says, and the split that it advises."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pydist import errors, hardware, run_local
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import DoesNotFit, exit_code_of, out_of_memory, wanted_bytes
from pydist.grid import CHANNEL_AXIS, Grid
from pydist.launch import launcher_env
from pydist.launch.launcher_env import Identity
from pydist.plan import estimate_step, legal_meshes, load_hardware
from pydist.train import config_io, shortage
from pydist.train.config import (
    Config,
    DataConfig,
    MeshConfig,
    OutputConfig,
    SharesConfig,
    TrainConfig,
    UNet3dConfig,
)
from pydist.train.planning import model_of
from pydist.train.step import TrainStep
from support.jobs.children import child_environment
from support.training.runs import events, job

WANTED = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
)
WANTED += "you tried to allocate 14155776 bytes. Error code 12 (Cannot allocate memory)"


@pytest.fixture
def config(tmp_path) -> Config:
    generate_ct(tmp_path / "ct", CTOptions(count=2, shape=(64, 64, 64), validation=0.0))
    return Config(
        model=UNet3dConfig(features=16, levels=2),
        data=DataConfig(path=tmp_path / "ct", normalize="ct"),
        train=TrainConfig(epochs=1, batch=1, cuda_graph="never"),
        output=OutputConfig(folder=tmp_path / "run", plot=False),
    )


def test_a_run_ends_with_the_smallest_split_that_fits(config, monkeypatch):
    model = model_of(config, load_hardware("cpu"), 8)
    possible = [
        estimate_step(model, grid)
        for grid in legal_meshes(4)
        if grid.size((CHANNEL_AXIS,)) == grid.size(("data",)) == 1
    ]
    here = estimate_step(model, Grid.of({"depth": 2})).peak
    least = min(each.peak for each in possible)
    assert least < 0.9 * here
    limit = round(0.3 * here + 0.7 * least)
    monkeypatch.setattr(shortage, "limit_bytes", lambda device, ranks: limit)

    def failing(self, *_):
        if self.mesh.rank == 1:
            raise RuntimeError(WANTED)
        self.mesh.world.barrier()

    monkeypatch.setattr(TrainStep, "__call__", failing)
    with pytest.raises(DoesNotFit) as caught:
        run_local(job, 2, config, 1, (2, 1, 1))
    said = str(caught.value)
    assert exit_code_of(caught.value) == 66
    assert said.startswith("the training step does not fit into memory: 13.5 MiB wanted, ")
    assert (
        f"held, of {shortage._size(limit)}; the smallest split that is predicted to fit: " in said
    )
    best = min((e for e in possible if e.peak <= limit), key=lambda e: e.step)
    spatial = " ".join(map(str, best.grid.shape[2:]))
    assert f"4 ranks, -n 4 --mesh.data 1 --mesh.spatial {spatial}, " in said
    ends = {event["reason"]: event["status"] for event in events(config, "end")}
    assert ends[said] == "failed"


def test_ranks_share_the_memory_of_their_node(config, monkeypatch):
    """A job of more ranks is on the same machine: less is left for each."""
    assert shortage.limit_bytes("cpu", 1) > 1.9 * shortage.limit_bytes("cpu", 2)
    model = model_of(config, load_hardware("cpu"), 8)
    peaks = {
        n: min(estimate_step(model, g).peak for g in legal_meshes(n) if g.size(("data",)) == 1)
        for n in (1, 2, 4)
    }
    node = round(1.05 * peaks[1])
    assert peaks[4] > node / 4  # what is not divided, such as weights
    monkeypatch.setattr(shortage, "limit_bytes", lambda device, ranks: node // ranks)
    found = str(shortage.with_advice(MemoryError(), config, Grid.of({})))
    assert f"of {shortage._size(node)}; " in found
    assert "no split is predicted to fit" in found


def test_the_advice_is_a_mesh_that_the_run_accepts(config, monkeypatch):
    """Other settings of the mesh are named, and each group has a sample in each pass."""
    mesh = MeshConfig(channel=2, shares=SharesConfig(depth=(2, 1)), spatial=(2, 1, 1))
    train = replace(config.train, batch=4, accumulate=4)
    config = replace(config, mesh=mesh, train=train)
    here = estimate_step(model_of(config, load_hardware("cpu"), 8), Grid.of({})).peak
    monkeypatch.setattr(shortage, "limit_bytes", lambda device, ranks: round(0.75 * here))
    said = str(shortage.with_advice(MemoryError(), config, Grid.of({})))
    wanted = r"-n 4 --mesh.data 1 --mesh.spatial \d \d \d without mesh\.shares, mesh\.channel, "
    assert re.search(wanted, said), said


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_run_without_memory_ends_with_66_and_a_line(config, tmp_path):
    """Torch's allocator fails in earnest: the process has a limit of its addresses."""
    wide = replace(config, model=UNet3dConfig(features=64, levels=2))
    (tmp_path / "run.toml").write_text(config_io.dumps(wide))
    program = """
import resource, sys
from pathlib import Path
import pydist.plan, pydist.train.run, pydist.train.shortage, torch
from pydist.cli.main import main
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (500 << 20),) * 2)
sys.exit(main(["train", sys.argv[1]]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run.toml")],
        cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 66, ended.stderr
    line = ended.stderr.strip().splitlines()[-1]
    assert re.search(r"does not fit into memory: .* wanted, .* held, of .*; ", line), ended.stderr
    assert "wanted" in events(config, "end")[-1]["reason"]


def test_what_can_not_be_split_is_said(config, monkeypatch):
    monkeypatch.setattr(shortage, "limit_bytes", lambda device, ranks: 1 << 20)
    found = shortage.with_advice(MemoryError(), config, Grid.of({}))
    assert "more memory wanted" in str(found)
    assert "no split is predicted to fit: choose a smaller batch, or more" in str(found)
    found = shortage.with_advice(DoesNotFit("the store found none"), config, Grid.of({}))
    assert str(found).startswith("the store found none: more memory wanted")

    def full(*_):
        raise MemoryError

    monkeypatch.setattr(shortage, "model_of", full)
    found = shortage.with_advice(MemoryError(), config, Grid.of({}))
    assert str(found).endswith("`pydist plan` predicts which split fits")


@pytest.mark.parametrize(
    ("message", "nbytes"),
    [
        (WANTED, 14155776),
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity", 5 << 29),
        ("Unable to allocate 3.00 MiB for an array with shape (3, 1024)", 3 << 20),
        ("std::bad_alloc", None),
    ],
)
def test_messages_tell_the_bytes(message, nbytes):
    kind = torch.OutOfMemoryError if message.startswith("CUDA") else RuntimeError
    assert out_of_memory(kind(message))
    assert wanted_bytes(kind(message)) == nbytes


def test_primitives_fail_for_lack_of_memory_only_where_it_lacks(monkeypatch):
    error = RuntimeError("could not create a primitive")
    assert not out_of_memory(error)

    def none(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(errors.mmap, "mmap", none)
    assert errors.mmap is mmap
    assert exit_code_of(error) == 66


def test_nodes_may_have_different_numbers_of_ranks(monkeypatch):
    for of_node in (4, 3):
        place = Identity("slurm", 0, 7, 0, of_node)
        monkeypatch.setattr(launcher_env, "detect", lambda place=place: place)
        assert shortage.limit_bytes("cpu", 7) == hardware.memory_limit(of_node)


def test_the_limit_of_the_process_counts(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda what: (4 << 30, 4 << 30))
    for module in (hardware, shortage):
        monkeypatch.setattr(module, "mapped_and_resident", lambda: (3 << 30, 1 << 30))
    assert shortage.limit_bytes("cpu", 1) == 2 << 30
    assert shortage.held_bytes("cpu") == 1 << 30
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    monkeypatch.undo()
    assert 0 < shortage.held_bytes("cpu") < shortage.limit_bytes("cpu", 1)
