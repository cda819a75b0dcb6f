"""Tests of the cost model: times computed by hand, and what must grow or shrink with what."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations

from pydist.errors import NotSupported, UsageError
from pydist.grid import Grid
from pydist.hardware import CPU, PROFILES, Hardware, Interconnect
from pydist.models import CosmoFlow
from pydist.plan import StepModel, Training, estimate_step, trace_network
from pydist.plan.blocks import Blocks
from pydist.plan.on_mesh import StepOnMesh

SLOW = Hardware(
    name="slow", source="this test", ranks_per_node=2, memory=1 << 30, reserved=0, slack=1.0,
    flops={"float32": 1.0}, bandwidth=1e9, optimizing=1e9,
    call=100.0, exchange=1000.0,
    within=Interconnect(10.0, 2.0), between=Interconnect(30.0, 1.0), reading=4.0, overlap=0.0,
)  # fmt: skip
FLOPS = 2 * 27 * 1 * 2 * 8**3
"""Of a convolution 1 → 2 channels of 8³, forward; its input needs no gradient."""
WEIGHTS = 2 * 27 * 4


def conv() -> nn.Module:
    return nn.Conv3d(1, 2, 3, padding=1, bias=False)


def model(network: nn.Module, sample: tuple[int, ...] = (1, 8, 8, 8), **training) -> StepModel:
    return StepModel(trace_network(network, sample), Training(**training), SLOW)


def seconds(found: StepModel, **sizes: int) -> dict[str, float]:
    return dict(estimate_step(found, Grid.of(sizes)).seconds)


def test_a_convolution_on_one_rank_takes_its_flops() -> None:
    found = seconds(model(conv()))
    # Forward and the gradient of the weight; the call, and that of the loss.
    assert found.pop("compute") == pytest.approx(2 * FLOPS + SLOW.call, rel=1e-6)
    assert found.pop("optimizer") == pytest.approx(7 * WEIGHTS / SLOW.bandwidth)
    assert found == dict.fromkeys(found, 0.0)


def test_a_cut_convolution_adds_a_face_and_the_sum_of_its_gradient() -> None:
    found = seconds(model(conv()), depth=2)
    # A face of 8 × 8 values reaches one of three taps of the planes next to it, of 4.
    assert found["compute"] == pytest.approx(FLOPS * (1 + 1 / 12) + SLOW.call, rel=1e-6)
    assert found["halo"] == pytest.approx(1000 + 10 + 8 * 8 * 4 / 2)
    # Short messages: one round of recursive doubling.
    assert found["gradients"] == pytest.approx(1000 + 10 + WEIGHTS / 2)


def test_corners_are_messages_of_their_own() -> None:
    found = seconds(model(conv()), depth=2, height=2)
    # 4 ranks on 2 nodes: width and height are within a node, depth is between.
    depth, height = 8 * 4 * 4, 8 * (4 + 1) * 4
    assert found["halo"] == pytest.approx(1000 + 3 * 30 + depth / (1 / 2) + height / 2)


def test_computation_hides_messages_as_far_as_the_hardware_lets_it() -> None:
    found = model(conv())
    for overlap, left in ((0.25, 0.75), (1.0, 0.0)):
        found.hardware = replace(SLOW, overlap=overlap)
        assert seconds(found, depth=2)["halo"] == pytest.approx(1000 + left * (10 + 128))
        found.hardware = replace(found.hardware, is_asynchronous=True)  # then the host is free
        assert seconds(found, depth=2)["halo"] == pytest.approx(left * (1000 + 10 + 128))
    found.flops = 1e9  # only the call's own time in forward is left
    left = 1000 + 10 + 128 - SLOW.call / 3
    assert seconds(found, depth=2)["halo"] == pytest.approx(left, rel=1e-3)


def test_long_gradients_are_reduced_by_rabenseifners_algorithm() -> None:
    wide = nn.Conv3d(4, 32, 3, padding=1, bias=False)
    nbytes = 4 * 32 * 27 * 4
    found = seconds(model(wide, (4, 8, 8, 8), batch=2), data=2)
    assert found["gradients"] == pytest.approx(1000 + 2 * (10 + 0.5 * nbytes / 2))


def test_channels_are_split_by_outputs_then_by_inputs() -> None:
    pair = nn.Sequential(conv(), nn.Conv3d(2, 4, 1, bias=False))
    found = seconds(model(pair), channel=2)
    second = 2 * 2 * 4 * 8**3
    assert found["compute"] == pytest.approx((2 * FLOPS + 3 * second) / 2 + 200, rel=1e-6)
    # The first layer's input needs no gradient.
    # Of the forms, a sum of the result has the fewest messages.
    of_result = 4 * 8**3 * 4
    assert found["channels"] == pytest.approx(1000 + 2 * (10 + 0.5 * of_result / 2))


def test_files_count_where_they_take_longer_than_the_step() -> None:
    found = model(conv(), file_bytes=8**3)
    assert seconds(found)["reading"] == 0.0
    found = model(conv(), file_bytes=10**6)
    found.flops = 1e9
    step = estimate_step(found, Grid.of({"depth": 2})).step
    assert step == pytest.approx(10**6 / 2 / SLOW.reading)


@pytest.fixture(scope="module")
def cosmoflow() -> StepModel:
    with torch.device("meta"):
        network = CosmoFlow(128, batch_norm=True)
    trace = trace_network(network, (4, 128, 128, 128))
    return StepModel(trace, Training(batch=16), PROFILES["v100"])


@pytest.mark.parametrize("axis", ["data", "depth", "height", "width", "channel"])
def test_more_ranks_take_no_more_memory(cosmoflow: StepModel, axis: str) -> None:
    kinds = ("activations", "transient")
    found = [estimate_step(cosmoflow, Grid.of({axis: n})).memory for n in (1, 2, 4, 8)]
    sums = [sum(each[kind] for kind in kinds) for each in found]
    assert sums == sorted(sums, reverse=True)
    assert sums[1] < sums[0]


def test_slower_hardware_is_never_faster(cosmoflow: StepModel) -> None:
    grid = Grid.of({"data": 2, "depth": 8, "width": 2})
    fast, before = cosmoflow.hardware, estimate_step(cosmoflow, grid).step
    worse = {
        "bandwidth": fast.bandwidth / 2, "call": fast.call * 20, "exchange": fast.exchange * 2,
        "within": Interconnect(fast.within.latency, fast.within.bandwidth / 9),
        "between": Interconnect(fast.between.latency * 99, fast.between.bandwidth),
        "overlap": 0.0,
    }  # fmt: skip
    for name, value in worse.items():
        slow = replace(fast, **{name: value})
        step = estimate_step(StepModel(cosmoflow.trace, cosmoflow.training, slow), grid).step
        assert step > before, name


def test_a_larger_batch_takes_longer_and_more_memory(cosmoflow: StepModel) -> None:
    grid = Grid.of({"data": 2, "depth": 2})
    found = []
    for batch in (2, 4, 8):
        training = replace(cosmoflow.training, batch=batch)
        found.append(estimate_step(StepModel(cosmoflow.trace, training, cosmoflow.hardware), grid))
    assert [e.step for e in found] == sorted(e.step for e in found)
    assert [e.peak for e in found] == sorted(e.peak for e in found)


def test_the_paper_networks_numbers(cosmoflow: StepModel) -> None:
    """Parameters and Gflop of CosmoFlow 128³ as in the paper (9.44 M, 55.55)."""
    trace = cosmoflow.trace
    assert sum(trace.parameters) == 4 * (9_437_636 + 2_016)
    convs = [call for call in trace.calls if call.kind == "conv"]
    assert 3 * sum(call.flops for call in convs) / 2 == pytest.approx(55.55e9, rel=1e-3)
    assert math.prod(trace.tensors[0].shape) == 2 * 4 * 128**3


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_kernel_computed_from_parameters_is_a_weight(norm) -> None:
    plain, found = (model(network) for network in (conv(), norm(conv())))
    layer = found.trace.calls[0]
    assert layer.weight == (2, 1, 3, 3, 3)
    assert layer.parameters == [*range(len(found.trace.parameters))]
    for sizes in ({}, {"depth": 2}, {"channel": 2}):
        assert seconds(found, **sizes)["compute"] == seconds(plain, **sizes)["compute"]
        memories = [estimate_step(each, Grid.of(sizes)).memory for each in (plain, found)]
        assert memories[0]["activations"] == memories[1]["activations"]


def test_frozen_weights_and_buffers_take_memory_and_no_time_of_backward() -> None:
    network = nn.Sequential(
        nn.Conv3d(1, 2, 3, padding=1),
        nn.BatchNorm3d(2),
        nn.MaxPool3d(2),
        nn.Conv3d(2, 3, 3, padding=1),
    )
    network.register_buffer("unread", torch.zeros(1000))
    state = sum(each.nbytes for each in (*network.parameters(), *network.buffers()))
    trained = sum(each.nbytes for each in network[3].parameters())
    network[:3].requires_grad_(False)
    found = model(network)
    step = StepOnMesh(found, Grid.of({"depth": 2}))
    *first, last = range(len(found.trace.calls))
    memory = step.memory()
    assert memory["parameters"] == state
    assert memory["optimizer"] == 2 * trained
    of_calls = [step.memory_of(range(i, i + 1), ())["parameters"] for i in (*first, last)]
    assert sum(of_calls) == state - trained
    assert of_calls[-1] == 0.0
    assert found.trace.calls[last].backward == 1.0  # of the weight
    assert memory["activations"] == step.blocks.nbytes(found.trace.calls[last].inputs[0])
    for seconds in step.backward.values():
        assert not np.any([seconds[i] for i in first])
    assert step.backward["compute"][last] > 0


def test_backward_passes_frozen_layers_after_trained_ones() -> None:
    frozen = nn.Conv3d(2, 2, 3, padding=1).requires_grad_(False)
    frozen.bias.requires_grad_(True)
    calls = model(nn.Sequential(conv(), frozen, nn.ReLU())).trace.calls
    assert [call.backward for call in calls[:2]] == [1.0, 1.0]
    assert [call.has_wgrad for call in calls[:2]] == [True, False]


@pytest.mark.parametrize("profile", ["cpu", "h100"])
@pytest.mark.parametrize("channels", [1, 4])
def test_autocast_leaves_inputs_and_copies_the_first_one(profile: str, channels: int) -> None:
    trace = trace_network(nn.Conv3d(channels, 8, 3, padding=1), (channels, 8, 8, 8))
    batch = channels * 8**3 * 4
    for dtype in (torch.float32, torch.bfloat16):
        training = Training(dtype=dtype, prefetch=2)
        found = estimate_step(StepModel(trace, training, PROFILES[profile]), Grid.of({})).memory
        assert found["input"] == 3 * batch
        # In the memory format of convolutions, or in 16 bits.
        has_format = profile == "cpu" and channels > 1
        copy = batch if has_format else 0
        assert found["copies"] == (copy if dtype == torch.float32 else batch / 2)


@pytest.mark.parametrize("sizes", [{"depth": 4}, {"channel": 2}])
@pytest.mark.parametrize("groups", [1, 2])
def test_layouts_of_several_groups_are_chosen_for_one_sample(
    groups: int, sizes: dict[str, int]
) -> None:
    """As ranks choose them, see `pydist.ops.coarsening`."""
    trace = trace_network(
        nn.Sequential(nn.Conv3d(16, 4, 3, padding=1), nn.Conv3d(4, 64, 3, padding=1)),
        (16, 2, 8, 8) if "depth" in sizes else (16, 4, 4, 4),
    )
    chosen = list[object]()
    for samples in (1, 64):
        training = Training(batch=samples * groups)
        step = StepOnMesh(StepModel(trace, training, CPU), Grid.of({"data": groups} | sizes))
        chosen.append((step.gathered, step.blocks.has_part))
    assert (chosen[0] == chosen[1]) is (groups > 1)


class OwnKernel(nn.Module):
    """Network that convolves each batch with a kernel made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(2, 2 * 2 * 27)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.make(x.mean((0, 2, 3, 4)))
        return F.conv3d(x, kernel.view(2, 2, 3, 3, 3), padding=1)


def test_a_kernel_computed_from_the_input_is_planned() -> None:
    found = model(OwnKernel(), (2, 8, 8, 8))
    assert found.trace.calls[-1].weight == (2, 2, 3, 3, 3)
    assert all(seconds(found, **{axis: 2})["compute"] > 2 * FLOPS for axis in ("depth", "channel"))


class Assigned(nn.Module):
    """Network that writes a layer's result into a new tensor, from which the next layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(), nn.Conv3d(2, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(len(x), 2, *x.shape[2:])
        y[:, :, ::2] = self.first(x)[:, :, ::2]
        return self.second(y)


def test_a_tensor_that_is_written_into_is_followed() -> None:
    trace = model(Assigned()).trace
    layers = [call for call in trace.calls if call.kind == "conv"]
    assert [call.parameters for call in layers] == [[0], [1]]
    assert trace.tensors[layers[1].inputs[0]].gradient is not None


class Beside(nn.Module):
    """A layer that calls another one, which returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Read(lambda x: None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input."""
        self.seen(x)
        return x


class Read(nn.Module):
    """Network that is a function."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x)


class Scaled(nn.Module):
    """Computes with constants that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = conv(), torch.ones(2, 1, 1, 1)
        self.cuts, self.wanted = torch.tensor([1]), torch.tensor([True, False])

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) * self.scale + torch.from_numpy(np.ones((2, 1, 1, 1), np.float32))
        return torch.cat([x[:, self.wanted], *torch.tensor_split(x, self.cuts, 1)], 1)


def test_a_plan_takes_constants() -> None:
    calls = [call.name for call in trace_network(Scaled(), (1, 8, 8, 8)).calls]
    assert calls == ["conv3d", "mul", "add", "__getitem__", "tensor_split", "cat"]


def test_a_network_in_float64_takes_the_rate_of_float64() -> None:
    found = model(conv().double())
    assert seconds(found)["compute"] == pytest.approx(2 * 2 * FLOPS + SLOW.call, rel=1e-6)
    found = StepModel(
        found.trace,
        Training(dtype=torch.bfloat16),
        replace(SLOW, flops={"float32": 1.0, "float64": 0.25, "bfloat16": 8.0}),
    )
    assert seconds(found)["compute"] == pytest.approx(4 * 2 * FLOPS + SLOW.call, rel=1e-6)
    problem = Blocks(found, Grid.of({})).problem(found.trace.calls[0], False, False)
    assert problem is not None
    assert problem.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_input_has_the_dtype_of_the_network(dtype: torch.dtype) -> None:
    trace = trace_network(conv().to(dtype), (1, 8, 8, 8))
    assert trace.tensors[0].nbytes == 2 * 8**3 * dtype.itemsize


@pytest.mark.parametrize(
    ("network", "error", "complaint"),
    [
        (nn.LazyConv3d(2, 3), UsageError, "'weight' of this LazyConv3d has no shape yet"),
        (nn.Identity(), UsageError, "Identity computes nothing from its input"),
        (Read(lambda x: x.numpy()), NotSupported, "Read reads values of tensors in its forward"),
        (Read(lambda x: x if x.max() > 0 else -x), NotSupported, "Read reads values"),
        (
            nn.Sequential(conv(), nn.Sequential(Read(lambda x: x if x.max() > 0 else -x))),
            NotSupported,
            "Sequential reads values of tensors in 1.0, so",
        ),
        (
            nn.Sequential(conv(), Read(lambda x: x.view(1, 2, 8, 8, 8))),
            NotSupported,
            "Sequential fails in 1 on shapes of 2 samples: RuntimeError: shape",
        ),
        (
            nn.Sequential(conv(), Beside(), Read(lambda x: x.view(1, 2, 8, 8, 8))),
            NotSupported,
            "Sequential fails in 2 on shapes",
        ),
        (Read(lambda x: x.nothing), NotSupported, "its forward on shapes of 2 samples: Attribute"),
    ],
)
def test_a_network_that_has_no_plan_is_refused_with_a_reason(
    network: nn.Module, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        trace_network(network, (1, 8, 8, 8))


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        network = utils.weight_norm(conv())
    with pytest.raises(NotSupported, match="Conv3d can't be copied, so there is no plan: Only"):
        trace_network(network, (1, 8, 8, 8))
