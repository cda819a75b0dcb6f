"""Tests of the comparison at start: the error names the differing key with both values."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pydist
from pydist import setup
from pydist.comm import Transport
from pydist.errors import UsageError

pytestmark = pytest.mark.ranks(2, mpi="mpich")


def differ(world: Transport, key: str, here: object, there: object, **arguments: Any) -> None:
    match = rf"^{key}.* differs between the ranks: {here} on rank 0, {there} on rank 1$"
    with pytest.raises(UsageError, match=match):
        pydist.init(**{"spatial": (2, 1, 1), **arguments})
    world.barrier()


def of_rank_1(world: Transport, patch: pytest.MonkeyPatch, owner: Any, name: str, value: Any):
    if world.rank == 1:
        patch.setattr(owner, name, value)


def test_mesh_seed_and_transport(world: Transport) -> None:
    mesh = (2, 1, 1) if world.rank == 0 else (1, 2, 1)
    differ(world, "the mesh", "1 × 1 × 2 × 1 × 1", "1 × 1 × 1 × 2 × 1", spatial=mesh)
    sizes = [f"1 × {n} × 1 × 1 × 1" for n in (2, 1)]
    differ(world, "the mesh", *sizes, data=1, spatial=(1, 1, 1), channel=2 - world.rank)
    given = {"depth": (1, 2 + world.rank)}
    differ(world, "the argument shares", r".*2\)}", r".*3\)}", shares=given)
    differ(world, "the seed", 0, 1, seed=world.rank)
    differ(world, "the transport", "auto", "c10d", transport=("auto", "c10d")[world.rank])


@pytest.mark.parametrize(
    ("key", "owner", "name"),
    [
        ("the version of pydist", setup.native, "__version__"),
        ("the version of torch", torch, "__version__"),
        ("the version of Python", platform, "python_version"),
        ("the MPI library", setup, "_mpi_library"),
    ],
)
def test_versions(
    world: Transport, key: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = getattr(owner, name)
    said = value() if callable(value) else value
    of_rank_1(world, monkeypatch, owner, name, (lambda: "0") if callable(value) else "0")
    differ(world, key, f"{said[:3]}.*", 0)


def test_versions_of_devices(world: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "connect", lambda _: world)
    monkeypatch.setattr(world, "device", torch.device("cuda", 0))  # no computation follows
    for name, owner, value in (
        ("CUDA", torch.version, "12.9"),
        ("cuDNN", torch.backends, SimpleNamespace(version=lambda: 1)),
        ("the CUDA driver", setup, SimpleNamespace(read_text=lambda: "Kernel Module  550.54.15")),
    ):
        attribute = {"CUDA": "cuda", "cuDNN": "cudnn", "the CUDA driver": "_DRIVER"}[name]
        with monkeypatch.context() as patch:
            of_rank_1(world, patch, owner, attribute, value)
            differ(world, f"the version of {name}", ".*", r"(12\.9|1|550\.54\.15)")


def test_variables(world: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    if world.rank == 1:
        monkeypatch.setenv("PYDIST_PRIVATE", "7")
    differ(world, "the environment variable PYDIST_PRIVATE", "absent", 7)


@pytest.mark.parametrize(
    ("key", "here", "there", "layers"),
    [
        ("module '0'", "Conv3d", "Linear", ([nn.Conv3d(1, 1, 1)], [nn.Linear(1, 1)])),
        ("module '0''s settings", "=1", ".*=2", ([nn.PReLU()], [nn.PReLU(2)])),
        ("module '1'", "absent", "ReLU", ([nn.ReLU()], [nn.ReLU(), nn.ReLU()])),
        (
            "parameter '0.weight'", "1×1 float32 on cpu", "1×1 float64 on cpu",
            ([nn.Linear(1, 1)], [nn.Linear(1, 1, dtype=torch.float64)]),
        ),
    ],
)  # fmt: skip
def test_models(
    world: Transport, key: str, here: str, there: str, layers: tuple[list[nn.Module], ...]
) -> None:
    mesh = pydist.init(spatial=(2, 1, 1))
    match = f"^{key} differs .*: .*{here}.* on rank 0, {there}.* on rank 1$"
    with pytest.raises(UsageError, match=match):
        pydist.parallelize(nn.Sequential(*layers[world.rank]), mesh)
    world.barrier()
