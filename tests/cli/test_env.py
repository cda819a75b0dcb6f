"""Tests of `pydist env`: it reports the installation and the choices of `auto`."""

from __future__ import annotations

import os

import pytest

import pydist
from pydist.cli import env, main
from pydist.comm.transports.nccl import device_assignment
from pydist.launch.backends import Backend


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    assert main.main(["env"]) == 0
    return capsys.readouterr().out


def test_versions_hardware_and_variables_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYDIST_TUNE", "0")
    monkeypatch.setenv("PYDIST_PACKS_SECRET", "do not print this")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = shown(capsys)
    assert text.startswith(f"pydist       {pydist.__version__} in ")
    assert f"of {os.cpu_count()} cores, kernels for {pydist._native.cpu_isa()}" in text
    assert "variables    OMP_NUM_THREADS=1\n" in text
    assert "             PYDIST_TUNE=0\n" in text
    assert "PYDIST_PACKS_SECRET=(set)\n" in text
    assert "do not print this" not in text
    names = [line[:13].strip() for line in text.splitlines()]
    assert [name for name in names if name] == [
        "pydist", "Python", "system", "packages", "CPU", "memory", "launchers", "CUDA", "auto",
        "variables",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lacks", "devices", "expected"),
    [
        ("torch sees no GPU", 0, ["1 rank: device cpu (torch sees no GPU)",
         "several ranks: transport c10d, device cpu (torch sees no GPU)"]),
        ("", 1, ["1 rank: device cuda",
         "several ranks: transport c10d, device cpu (fewer than 2 devices)"]),
        ("", 4, ["1 rank: device cuda",
         "2 to 4 ranks: transport nccl, device cuda; more: c10d, cpu"]),
    ],
)  # fmt: skip
def test_what_auto_takes(
    lacks: str, devices: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "available", lambda: [Backend("gloo")])
    monkeypatch.setattr(device_assignment, "missing", lambda: lacks)
    monkeypatch.setattr(device_assignment, "device_missing", lambda: lacks)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    assert list(env._automatic()) == [("auto", "launcher gloo"), *(("", text) for text in expected)]


def test_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["env", "--all"]) == 2
    assert "unrecognized arguments: --all" in capsys.readouterr().err
