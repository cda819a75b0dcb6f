"""Tests of slab kernels: torch's convolution against the native kernel, and their autotuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist import _native as native
from pydist.backend import slab_tuning, slabs
from pydist.backend.autotuner import _TURNS
from pydist.backend.problem import ROLES
from pydist.backend.slabs import SlabProblem
from support.equivalence import layout_at, on_ranks, randn, shard

triples = st.tuples(*[st.integers(1, 3)] * 3)


@st.composite
def problems(draw) -> SlabProblem:
    """Draws slabs before, after and within the outputs, or out of their reach."""
    kernel = draw(st.tuples(*[st.integers(1, 4)] * 3))
    stride, dilation = draw(triples), draw(triples)
    padding = draw(st.tuples(*[st.integers(0, 2)] * 3))
    inputs, outputs = (draw(st.tuples(*[st.integers(1, 6)] * 3)) for _ in range(2))
    groups, batch = draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 2))
    ci, co = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    in_lo = draw(st.tuples(*[st.integers(-2, 4)] * 3))
    out_lo = tuple(i // s + draw(st.integers(-1, 1)) for i, s in zip(in_lo, stride, strict=True))
    x, y = (batch, groups * ci, *inputs), (batch, groups * co, *outputs)
    w = (groups * co, ci, *kernel)
    role = draw(st.sampled_from(ROLES))
    shapes = {"forward": (x, w, y), "dgrad": (y, w, x), "wgrad": (x, y, w)}[role]
    lo = (out_lo, in_lo) if role == "dgrad" else (in_lo, out_lo)
    return SlabProblem(
        role, *shapes, *lo, stride, padding, dilation, groups, torch.float64, False
    )  # fmt: skip


@settings(max_examples=200)
@given(problem=problems())
def test_the_library_adds_what_the_native_kernel_adds(problem):
    first, second, target = (
        randn(*shape, seed=i)
        for i, shape in enumerate((problem.first, problem.second, problem.target))
    )
    found = []
    for name in ("plain", "library"):
        result = target.clone()
        where = problem.first_lo, problem.target_lo
        slabs.run_slab(name, problem, first, second, result, *where)
        found.append(result)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def problem(device: str = "cuda", dtype=torch.float32, **changes) -> SlabProblem:
    shapes = (1, 4, 1, 8, 8), (8, 4, 3, 3, 3), (1, 8, 4, 8, 8)
    one = (1, 1, 1)
    given = {"tf32": False, "channels_last": False, **changes}
    return SlabProblem(
        "forward", *shapes, (-1, 0, 0), (0, 0, 0), one, one, one, 1, dtype,
        given["channels_last"], device, given["tf32"],
    )  # fmt: skip


def test_what_there_is_to_choose_from():
    assert problem("cpu").candidates == ["plain"]
    assert problem().candidates == ["library", "plain", "mma"]
    assert problem(tf32=True).candidates == ["library", "plain", "mma", "tf32"]
    assert problem(dtype=torch.bfloat16, tf32=True).candidates == ["library", "plain", "mma"]
    assert problem(dtype=torch.float64).candidates == ["library", "plain"]


def test_measurements_leave_the_programs_random_numbers():
    before = torch.get_rng_state()
    made = slab_tuning.operands(problem("cpu"), torch.empty(0))
    assert torch.equal(torch.get_rng_state(), before)
    again = slab_tuning.operands(problem("cpu"), torch.empty(0))
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(made, again, strict=True))


# -- the choice -----------------------------------------------------------------------------

SHAPE, WEIGHT = (1, 3, 9, 6, 5), (4, 3, 3, 3, 3)


@pytest.fixture
def chosen(monkeypatch, tmp_path) -> list[SlabProblem]:
    """Offers two kernels on the CPU and makes the library's appear faster.

    Returns:
        The problems measured from now on.
    """
    monkeypatch.setenv("PYDIST_TUNE", "1")
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(SlabProblem, "candidates", ["plain", "library"])
    seen: list[SlabProblem] = []

    def seconds_on(problem, name, like):
        seen.append(problem)
        return 1.0 + (name == "plain")

    monkeypatch.setattr(slab_tuning, "seconds_on", seconds_on)
    return seen


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """Returns the list of (kernel, role) of the slabs added from now on."""
    made: list[tuple[str, str]] = []
    run = slabs.run_slab

    def recorded(name, problem, *args):
        made.append((name, problem.role))
        run(name, problem, *args)

    monkeypatch.setattr("pydist.ops.conv.slab_kernels.run_slab", recorded)
    return made


def step(mesh, transposed: bool = False):
    cut = [[0, 4, 9] if mesh.sample_size == 2 else None, None, None]
    x = shard(randn(*SHAPE).float(), layout_at(mesh, SHAPE, cut)).requires_grad_()
    if transposed:
        weight = randn(3, 4, 3, 3, 3, seed=1).float().requires_grad_()
        y = F.conv_transpose3d(x, weight, padding=1)
    else:
        weight = randn(*WEIGHT, seed=1).float().requires_grad_()
        y = F.conv3d(x, weight, padding=1)
    loss = y.square().sum()
    gradients = torch.autograd.grad(loss, (x, weight))
    return y.full_tensor(), gradients[0].full_tensor(), gradients[1]


@pytest.mark.parametrize("transposed", [False, True])
def test_what_measures_best_is_used_and_right(chosen, calls, transposed):
    whole = on_ranks((1, 1, 1), lambda mesh: step(mesh, transposed))[0]
    split = on_ranks((2, 1, 1), lambda mesh: step(mesh, transposed))
    assert len(chosen) == 2 * 3 * 2 * _TURNS
    assert {name for name, _ in calls} == {"library"}
    assert {role for _, role in calls} == set(ROLES)
    for found in split:
        for a, b in zip(found, whole, strict=True):
            scale = float(b.detach().abs().max())
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * scale)


def test_what_was_measured_is_remembered(chosen, calls, tmp_path):
    on_ranks((2, 1, 1), step)
    measured = len(chosen)
    assert len(list((tmp_path / "cache").glob("slab-*.json"))) == 2 * 3
    calls.clear()
    on_ranks((2, 1, 1), step)
    assert len(chosen) - measured < measured
    assert {name for name, _ in calls} == {"library"}


def test_a_damaged_file_is_measured_anew(chosen, tmp_path):
    on_ranks((2, 1, 1), step)
    file, *_ = sorted((tmp_path / "cache").glob("slab-*.json"))
    good = json.loads(file.read_bytes())
    file.write_text(json.dumps(dict.fromkeys(good, "no seconds")))
    on_ranks((2, 1, 1), step)
    assert json.loads(file.read_bytes()) == good


def test_by_rule_where_nothing_is_measured(chosen, calls, monkeypatch, tmp_path):
    monkeypatch.setenv("PYDIST_TUNE", "0")
    on_ranks((2, 1, 1), step)
    assert not chosen
    assert {name for name, _ in calls} == {"plain"}
    assert not Path(tmp_path / "cache").exists()


def test_evaluation_measures_nothing(chosen, calls):
    def evaluate(mesh):
        with torch.no_grad():
            x = shard(randn(*SHAPE).float(), layout_at(mesh, SHAPE, [[0, 4, 9], None, None]))
            return F.conv3d(x, randn(*WEIGHT).float(), padding=1).full_tensor()

    on_ranks((2, 1, 1), evaluate)
    assert not chosen
    assert {name for name, _ in calls} == {"plain"}


# -- tensor-core kernels, as far as they are testable without a device ----------------------


def plan(dtype=torch.bfloat16, ci=4, kernel="mma", taps=3, side=64):
    x = torch.zeros(1, ci, 1, side, side, dtype=dtype)
    w = torch.zeros(32, ci, *[taps] * 3, dtype=dtype)
    y = torch.zeros(1, 32, 4, side, side, dtype=dtype)
    one, lo = (1, 1, 1), (0, 0, 0)
    where = ((-1, 0, 0), lo, one, (taps // 2,) * 3, one, 1)
    return {
        "forward": native.boundary_conv_plan("forward", x, w, y, *where, kernel),
        "dgrad": native.boundary_conv_plan("dgrad", y, w, x, lo, (-1, 0, 0), *where[2:], kernel),
        "wgrad": native.boundary_conv_plan("wgrad", x, y, w, *where, kernel),
    }


def test_a_plan_says_what_a_kernel_takes():
    found = plan()
    assert found["forward"] == ("", 0, 36 / 48)  # 4 channels x 9 taps, in products of 16
    assert found["dgrad"] == ("", 0, 4 / 8)
    assert found["wgrad"] == ("", 0, 36 / 48)
    # 36 x 32 sums in 8 parts: of 512 steps of 32 positions, each of 64 blocks does 8.
    assert plan(side=128)["wgrad"] == ("", 36 * 32 * 8, 36 / 48)
    assert plan(torch.float32)["forward"][2] == 36 / 40 / 3  # 3 TF32 products per fp32 one
    assert plan(torch.float32, kernel="tf32")["forward"][2] == 36 / 40


def test_what_tensor_cores_do_not_take_is_named():
    assert plan(torch.float64)["forward"][0] == "float64"
    assert "900 kernel indices" in plan(ci=1, taps=15)["forward"][0]
    x, w, y = torch.zeros(1, 1, 1, 4, 4), torch.zeros(1, 1, 3, 3, 3), torch.zeros(1, 1, 4, 4, 4)
    where = ((0, 0, 0), (0, 0, 0), (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)
    for kernel, message in [("mma", "is for tensor cores"), ("x", "possible are plain, mma")]:
        with pytest.raises(ValueError, match=message):
            native.boundary_conv_forward(x, w, y, *where, kernel=kernel)
        with pytest.raises(ValueError, match=message):
            native.boundary_conv_dgrad(y, w, x, *where, kernel=kernel)
        with pytest.raises(ValueError, match=message):
            native.boundary_conv_wgrad(x, y, w, *where, kernel=kernel)
