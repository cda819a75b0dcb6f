"""Boundary convolution on tensor cores and by the library, against the CPU kernel in float64."""

from __future__ import annotations

import pytest
import torch

from pydist import Mesh
from pydist import _native as native
from pydist.backend import slab_tuning
from pydist.backend.autotuner import autotuner_of
from pydist.backend.conv import in_format
from pydist.backend.problem import ROLES
from pydist.backend.slabs import SlabProblem, run_slab
from pydist.comm import LocalTransport

KERNELS = {
    "library": [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    "plain": [torch.float16, torch.bfloat16, torch.float32, torch.float64],
    "mma": [torch.float16, torch.bfloat16, torch.float32],
    "tf32": [torch.float32],
}
# Relative to the sum of the products' magnitudes. Factors are exact except in TF32; the result is
# rounded once, the library's twice.
BOUNDS = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}

# in and out channels of a group, groups, stride, dilation, spatial extents of the slab
CASES = {
    "4 channels": (4, 32, 1, 1, 1, (1, 37, 41)),
    "8 to 16": (8, 16, 1, 1, 1, (33, 1, 29)),
    "width face": (16, 40, 1, 1, 1, (30, 31, 1)),
    "deep": (96, 130, 1, 1, 1, (1, 5, 6)),
    "odd channels": (3, 7, 1, 1, 1, (1, 20, 21)),
    "groups": (8, 8, 3, 1, 1, (2, 17, 19)),
    "stride 2": (16, 24, 1, 2, 1, (2, 33, 30)),
    "large": (4, 12, 1, 1, 1, (1, 90, 83)),
    "dilation 2": (16, 24, 1, 1, 2, (2, 21, 30)),
}


def case(name: str, role: str, dtype: torch.dtype, channels_last: bool, tf32: bool):
    """Returns a problem on CUDA and its operands on the CPU, in float64."""
    ci, co, groups, stride, dilation, slab = CASES[name]
    thin = slab.index(min(slab))
    generator = torch.Generator().manual_seed(0)
    outs = [3 if d == thin else (n + stride - 1) // stride for d, n in enumerate(slab)]
    shapes = {
        "x": (2, groups * ci, *slab),
        "w": (groups * co, ci, 3, 3, 3),
        "y": (2, groups * co, *outs),
    }
    order = {"forward": "xwy", "dgrad": "ywx", "wgrad": "xyw"}[role]
    operands = [torch.randn(shapes[k], generator=generator).to(dtype).double() for k in order]
    in_lo = tuple(-dilation if d == thin else 0 for d in range(3))
    lo = ((0, 0, 0), in_lo) if role == "dgrad" else (in_lo, (0, 0, 0))
    each = tuple((n,) * 3 for n in (stride, dilation, dilation))
    problem = SlabProblem(
        role, *(tuple(t.shape) for t in operands), *lo, *each, groups, dtype, channels_last,
        "cuda", tf32,
    )  # fmt: skip
    return problem, operands


def on_device(problem: SlabProblem, operands):
    return [in_format(t.to("cuda", problem.dtype), problem.channels_last) for t in operands]


def add(name: str, problem: SlabProblem, operands):
    run_slab(name, problem, *operands, problem.first_lo, problem.target_lo)
    return operands[2]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("kernel", "dtype"), [(name, dtype) for name, dtypes in KERNELS.items() for dtype in dtypes]
)
def test_every_kernel_adds_what_the_cpu_adds(kernel, dtype, role, name, channels_last):
    problem, operands = case(name, role, dtype, channels_last, kernel == "tf32")
    device = on_device(problem, operands)
    sizes = add("plain", problem, [t.abs() for t in operands])
    wanted = add("plain", problem, operands)
    bound = BOUNDS[dtype] + (2**-10 if kernel == "tf32" else 0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        again = [t.clone() for t in device]
        found = add(kernel, problem, device)
        error = (found.cpu().double() - wanted).abs() / sizes
        assert float(error.max()) <= bound
        if kernel != "library":
            assert torch.equal(add(kernel, problem, again), found), "not deterministic"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["8 to 16", "large"])
def test_the_kernel_on_tensor_cores_can_be_captured(name, role):
    problem, operands = case(name, role, torch.bfloat16, True, False)
    device = on_device(problem, operands)
    before = device[2].clone()
    wanted = add("mma", problem, device).clone()  # loads the kernels, which can't be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add("mma", problem, device)
    device[2].copy_(before)
    graph.replay()
    assert torch.equal(device[2], wanted)


def test_a_workspace_is_asked_for():
    problem, operands = case("large", "wgrad", torch.bfloat16, True, False)
    device = on_device(problem, operands)
    arguments = (*device, problem.first_lo, problem.target_lo, *problem.geometry)
    _, elements, _ = native.boundary_conv_plan("wgrad", *arguments, "mma")
    assert elements > 0
    with pytest.raises(ValueError, match=f"workspace of {elements} float32"):
        native.boundary_conv_wgrad(*arguments, kernel="mma")
    short = torch.empty(elements - 1, device="cuda")
    with pytest.raises(ValueError, match=f"needed are {elements}"):
        native.boundary_conv_wgrad(*arguments, kernel="mma", workspace=short)


def test_the_choice_is_never_slower_than_the_library():
    problem, _ = case("8 to 16", "forward", torch.bfloat16, True, False)
    like = torch.empty(1, device="cuda")
    times = {name: slab_tuning.seconds_on(problem, name, like) for name in problem.candidates}
    assert set(times) == {"library", "plain", "mma"}
    assert all(0 < seconds < slab_tuning.NEVER for seconds in times.values())
    mesh = Mesh(LocalTransport())
    tuner, world = autotuner_of(mesh), mesh.world
    (name,) = slab_tuning.choose(tuner, [[problem]], world, like, learns=True)
    assert name in problem.candidates
