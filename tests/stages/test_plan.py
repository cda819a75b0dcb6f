"""Tests of plans: exact cuts, cuts that are not legal, and calls that plans can't know."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, distribute_tensor, parallelize
from pydist.comm import LocalTransport
from pydist.errors import NotSupported, UsageError
from pydist.models import UNet2d
from pydist.stages import pipeline
from pydist.stages.calls import Key
from pydist.stages.part_memory import PartMemory
from pydist.stages.plan import make_plan
from pydist.stages.record import Cost, RecordedPass, Wait, record
from support.equivalence import randn
from support.staged import DEEP, ONE, on_stages, ranks_of

X = randn(1, 1, 4, 4, 4)
LARGE = randn(1, 1, 16, 16, 16)  # beside which the weights of a convolution are small


class Calls(nn.Module):
    """A network whose forward pass is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


CALLS = st.tuples(
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 4),
    st.sets(st.integers(0, 5), max_size=3),
    st.sets(st.integers(0, 3), max_size=2),
)
WAITS = st.tuples(st.integers(1, 9), st.sets(st.integers(0, 7), min_size=2, max_size=4))


def passes(calls, legal=(), sent=(), waits=()) -> RecordedPass:
    """Returns a pass of calls: their seconds, gradients, what they free for these, saved memories,
    of 1 to 6 bytes, and parameters, of 1 to 4."""
    costs = [Cost(Key("", i), s, g, min(f, g)) for i, (s, g, f, *_) in enumerate(calls)]
    saved, trained = ([{each: each + 1 for each in call[i]} for call in calls] for i in (3, 4))
    none = np.zeros(len(calls), bool)
    return RecordedPass(
        costs, np.asarray(sent), np.asarray(legal), none, saved, [], list(waits), trained
    )


def saved_by(calls, a, b):
    return set().union(*(call[3] for call in calls[a:b]))


def most_at_once(calls, waits, a, b, frees, ranks):
    """Returns the bytes of the backward pass of calls [a, b), counted call by call, or of what
    they keep, and have made or received that later calls use, if these are more; of a rank."""

    def at(i):
        before = saved_by(calls, a, i)
        saved = before | calls[i][3]
        own = sum(memory + 1 for memory in calls[i][3] - before)
        waiting = sum(
            w.nbytes
            for w in waits
            if a <= w.made < i < w.uses[0]
            or any(a <= one <= i < other < b for one, other in itertools.pairwise(w.uses))
        )
        gradients = calls[i][1] - (min(own, *calls[i][1:3]) if frees else 0)
        of_tensors = sum(memory + 1 for memory in saved) + gradients + waiting
        return of_tensors / ranks + sum(parameter + 1 for parameter in calls[i][4])

    kept = saved_by(calls, a, b)
    held = [w for w in waits if w.uses[-1] >= b and {w.made, *w.uses} & {*range(a, b)}]
    sending = sum(memory + 1 for memory in kept)
    sending += sum(w.nbytes for w in held if w.memory not in kept)
    return max(sending / ranks, *map(at, range(a, b)))


@pytest.mark.parametrize("balance", ["time", "memory"])
@given(
    st.lists(CALLS, min_size=2, max_size=8),
    st.lists(WAITS, max_size=4),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.randoms(use_true_random=False),
)
def test_partitions_are_the_best(balance, calls, waits, stages, state, numbers):
    places = ((nbytes, sorted(i for i in at if i < len(calls))) for nbytes, at in waits)
    waits = [Wait(n, at[0], at[1:], i) for i, (n, at) in enumerate(places) if len(at) > 1]
    legal = [i > 0 and numbers.random() < 0.8 for i in range(len(calls))]
    sent = [float(numbers.randint(0, 9)) for _ in calls]
    starts = [i for i, is_legal in enumerate(legal) if is_legal]
    if len(starts) < len(stages) - 1:
        return

    frees = all(ranks == 1 for ranks, _ in stages)

    def cost(a, b, ranks, alive):
        if balance == "time":
            return sum(seconds for seconds, *_ in calls[a:b]) / ranks
        kept = (alive - 1) * sum(memory + 1 for memory in saved_by(calls, a, b)) / ranks
        trained = set().union(*(call[4] for call in calls[a:b]))
        stays = state * sum(parameter + 1 for parameter in trained)
        return kept + stays + most_at_once(calls, waits, a, b, frees, ranks)

    def value(at):
        parts = itertools.pairwise([0, *at, len(calls)])
        largest = max(cost(*part, *stage) for part, stage in zip(parts, stages, strict=True))
        return largest, sum(sent[i] for i in at)

    every = [value(at) for at in itertools.combinations(starts, len(stages) - 1)]
    best = min(largest for largest, _ in every)
    least = min(bytes_ for largest, bytes_ in every if largest <= best * 1.02)
    ranks, alive = zip(*stages, strict=True)
    plan = make_plan(passes(calls, legal, sent, waits), ranks, balance, alive=alive, state=state)
    found = [key.number for key in plan.starts]
    assert set(found) <= set(starts)
    assert value(found)[0] <= best * 1.02 + 1e-9
    assert value(found)[1] == least
    for (_, _, mib, _), part, n in zip(
        plan.rows, itertools.pairwise([0, *found, len(calls)]), ranks, strict=True
    ):
        if balance == "memory":
            assert mib * 2**20 == pytest.approx(cost(*part, n, 1))


def test_memory_is_balanced():
    """A convolution needs its argument, and the gradients of argument and result."""
    layers = nn.Sequential(*(nn.Conv3d(1, 1, 3, padding=1) for _ in range(7))).double()
    plan = make_plan(record(layers, (LARGE,)), [1] * 3, "memory")
    assert [key.module for key in plan.starts] == ["3", "5"]
    needed = [row[2] * 2**20 / LARGE.nbytes for row in plan.rows]
    assert needed == pytest.approx([2 + 2, 2 + 2, 2 + 2], rel=0.01)
    assert re.search(r"2 +2 .*call 0 in 5$", str(plan).splitlines()[-1])


@pytest.mark.parametrize(("state", "calls"), [(0.0, [5, 4]), (1.0, [6, 3]), (3.0, [7, 2])])
def test_what_stays_of_parameters_is_balanced_too(state, calls):
    """The weight of the last convolution is as large as an activation, the others are small."""

    def planned(stages):
        small = (nn.Conv3d(4, 4, 1) for _ in range(8))
        layers = nn.Sequential(*small, nn.Conv3d(4, 4, 5, padding=2)).double()
        x = randn(1, 4, 8, 8, 8)
        made = pipeline(layers, stages, x, balance="memory", state=state)
        return [row[0] for row in made.plan.rows]

    assert on_stages([ONE, ONE], planned) == [calls] * 2


def test_what_stays_of_parameters_is_a_number_from_0_on():
    def body(stages):
        for state in (-1.0, float("nan"), float("inf")):
            with pytest.raises(UsageError, match=r"state=.*: bytes for each byte of parameters"):
                pipeline(nn.Sequential(nn.ReLU(), nn.ReLU()), stages, X, state=state)

    on_stages([ONE, ONE], body)


def test_memory_that_backward_passes_need():
    gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def function(x):
        y = (x.exp() * gain).tanh()
        return (torch.cat([y, y.sin()], 1) + 1).relu_().mean()

    found = record(Calls(function), (X,))
    exp, times, tanh, sin, cat, plus, relu, mean = found.saved
    assert tanh == sin
    assert list(tanh.values()) == list(times.values()) == [X.nbytes]
    assert list(relu.values()) == [2 * X.nbytes]
    assert not any((exp, cat, plus, mean))
    gradients = [cost.gradients / X.nbytes for cost in found.costs]
    assert gradients == [0, 2, 2, 2, 4, 4, 4, 2 + 8 / X.nbytes]


def test_memory_is_that_of_the_allocator():
    torch.manual_seed(0)
    net, x = UNet2d(1, 2, 16, 2), torch.rand(1, 1, 128, 128)
    found = record(net, (x,), repeats=1)
    model = parallelize(net, Mesh(LocalTransport()))
    x = distribute_tensor(x, Mesh(LocalTransport()), {})
    model(x).mean().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model(x).mean().backward()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    ((_, most),) = PartMemory(found).columns([0])
    assert most[0] == pytest.approx(max(held), rel=0.1)


@pytest.mark.parametrize(
    ("meshes", "options", "calls"),
    [
        ([ONE, ONE], {"schedule": "gpipe"}, [4, 3]),
        ([DEEP, ONE], {"schedule": "gpipe"}, [5, 2]),
        ([ONE, ONE], {"schedule": "1f1b"}, [3, 4]),
        ([DEEP, ONE], {"schedule": "1f1b"}, [5, 3]),
        ([ONE, ONE], {"schedule": "1f1b", "recompute": True}, [4, 3]),
    ],
)
def test_memory_is_that_of_the_micro_batches_alive(meshes, options, calls):
    """Of two stages, 1F1B keeps two micro-batches on the first, and one on the second."""

    def planned(stages):
        layers = nn.Sequential(*(nn.Conv3d(1, 1, 3, padding=1) for _ in range(sum(calls)))).double()
        made = pipeline(layers, stages, LARGE, micro_batches=4, balance="memory", **options)
        return [row[0] for row in made.plan.rows]

    assert on_stages(meshes, planned) == [calls] * ranks_of(meshes)


def test_a_mesh_is_balanced_as_a_whole():
    """Of the order (0, 1, 0) one mesh has the memory of two stages."""

    def planned(stages):
        layers = nn.Sequential(*(nn.Conv3d(1, 1, 3, padding=1) for _ in range(11))).double()
        return [row[0] for row in pipeline(layers, stages, LARGE, balance="memory").plan.rows]

    assert on_stages([ONE, ONE], planned, order=[0, 1, 0]) == [[3, 6, 2]] * 2


def test_stages_begin_at_named_modules():
    layers = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.ReLU(), nn.Tanh()))
    plan = make_plan(record(layers, (X,)), [1] * 3, cuts=["0.1", "1"])
    assert [key.module for key in plan.starts] == ["0.1", "1.0"]
    for cuts, message in ((["2"], "3 stages have 2 cuts"), (["1", "0"], "module '0' makes no")):
        with pytest.raises(UsageError, match=message):
            make_plan(record(layers, (X,)), [1] * 3, cuts=cuts)


def test_a_record_changes_nothing():
    net = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2), nn.Dropout()).double()
    before = {name: b.clone() for name, b in net.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    record(net, (X,))
    assert torch.equal(torch.rand(1), expected)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, before[name])
    for parameter in net.parameters():
        assert parameter.grad is None
        assert not parameter._post_accumulate_grad_hooks
        assert not vars(parameter)
    assert not any("_pydist_path" in module.__dict__ for module in net.modules())


class Remembering(nn.Module):
    """Counts and keeps what it sees, and makes a mask of the first batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.number, self.mask = nn.Linear(4, 4), 0, None
        self.seen, self.by_number, self.total = ["none"], {0: "none"}, torch.zeros(4)
        self.recent = OrderedDict(b=1, a=2)

    def forward(self, x):
        self.number += 1
        self.seen.append(x)
        self.by_number[self.number] = x.shape
        self.total += 1
        self.recent.move_to_end("b")
        if self.mask is None:
            self.mask = torch.ones(len(x), 1)
            self.register_buffer("places", torch.arange(len(x)))
        return self.linear(x) * self.mask


def test_a_record_restores_what_modules_remember():
    net = Remembering()
    record(net, (randn(3, 4).float(),))
    assert (net.number, net.mask, net.seen, net.by_number) == (0, None, ["none"], {0: "none"})
    assert list(net.recent.items()) == [("b", 1), ("a", 2)]
    assert not net.total.any()
    assert "places" not in dict(net.named_buffers())
    assert net(torch.ones(5, 4)).shape == (5, 4)  # the mask is made of this batch's size


def test_no_cut_between_a_view_and_a_change_of_its_memory():
    def function(x):
        y = x + 1
        view = y.flatten(2)
        y.relu_()
        return view.exp().sin()

    found = record(Calls(function), (X,))
    assert [cost.gradients > 0 for cost in found.costs] == [False, False, True, True, True]
    assert found.legal.tolist() == [False, False, False, False, True]
    with pytest.raises(UsageError, match="can be cut at 1 calls"):
        make_plan(found, [1] * 3, "memory")


def test_no_cut_within_a_checkpointed_part():
    def part(x):
        return x.sin().cos()

    def function(x):
        return checkpoint(part, checkpoint(part, x, use_reentrant=False), use_reentrant=False).exp()

    def nested(x):
        return checkpoint(lambda x: function(x).exp(), x, use_reentrant=False).exp()

    assert record(Calls(function), (X,)).legal.tolist() == [False, False, True, False, True]
    assert record(Calls(nested), (X,)).legal.tolist() == [False] * 6 + [True]


def test_a_part_that_is_checkpointed_only_where_a_gradient_flows():
    class Block(nn.Conv3d):
        def forward(self, x):
            inner = super().forward
            flows = x.requires_grad and torch.is_grad_enabled()
            return (
                checkpoint(lambda x: inner(x).tanh(), x, use_reentrant=False) if flows else inner(x)
            )

    net = nn.Sequential(Block(1, 1, 1), Block(1, 1, 1), nn.Flatten()).double()
    found = record(net, (X,))
    assert [str(cost.key) for cost in found.costs] == [
        "call 0 in 0", "call 0 in 1", "call 1 in 1", "call 0 in 2"
    ]  # fmt: skip
    assert found.legal.tolist() == [False, True, False, True]


def test_named_modules_are_not_within_a_checkpointed_part():
    net = nn.Sequential(nn.Conv3d(1, 1, 1), nn.Sequential(nn.Conv3d(1, 1, 1), nn.Conv3d(1, 1, 1)))

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return checkpoint(self.net[1], self.net[0](x), use_reentrant=False)

    found = record(Whole().double(), (X,))
    assert [key.module for key in make_plan(found, [1] * 2, cuts=["net.1"]).starts] == ["net.1.0"]
    with pytest.raises(UsageError, match=r"'net\.1\.1' is within a part under torch\.utils\.check"):
        make_plan(found, [1] * 2, cuts=["net.1.1"])


def test_bytes_that_cuts_send():
    def function(x):
        y = x.exp()
        z = y.sum((2, 3, 4))
        return y.mean() + z.mean()

    found = record(Calls(function), (X,))
    assert len(found.costs) == 5
    assert found.sent.tolist() == [0, X.nbytes, X.nbytes + 8, 8 + 8, 8 + 8]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.max() > 0 else -x,
        lambda x: x * float(x.sum()),
        lambda x: x[x > 0],
        lambda x: x * x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x if torch.equal(x, x) else -x,
        lambda x: torch.from_numpy(x.numpy()),
    ],
)
def test_networks_that_read_values_are_refused(function):
    with pytest.raises(NotSupported, match="reads values"):
        record(Calls(function), (X,))


def test_shapes_and_dtypes_may_be_read():
    def function(x):
        assert (x.ndim, x.numel(), x.device.type, x.dtype) == (5, 64, "cpu", torch.float64)
        assert (x.is_cpu, x.is_cuda, x.is_meta, x.grad) == (True, False, False, None)
        assert x.to(torch.float32).dtype is torch.float32
        assert x.stride() == (64, 64, 16, 4, 1)
        y = torch.zeros_like(x, device=x.device) + x.new_ones(x.shape)
        assert len(x) == 1
        assert [each.shape for each in y] == [y.shape[1:]]
        return y + torch.arange(x.size(2), device=x.device)

    record(Calls(function), (X,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nextafter(x, x.sin()),
        lambda x: x // 0.3,
        lambda x: x.argmax(1).to(x.dtype),
        torch.ones_like,
        lambda x: x.topk(2).indices,
        lambda x: x.mul_(2),
    ],
)
def test_calls_without_a_backward_pass_are_recorded(function):
    found = record(Calls(lambda x: function(x.exp())), (randn(4, 8),))
    assert all(cost.seconds > 0 for cost in found.costs)


def test_calls_whose_gradients_are_of_no_parameter_are_recorded():
    gain = torch.ones((), requires_grad=True)
    assert len(record(Calls(lambda x: x * gain), (randn(4, 8),)).costs) == 1


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage", "grad_fn"])
def test_memory_and_graphs_are_refused(name):
    def function(x):
        found = getattr(x, name)
        return found() if callable(found) else found

    with pytest.raises(NotSupported, match="on one stage only"):
        record(Calls(function), (X,))


def test_calls_that_differ_between_passes_are_refused():
    turns = itertools.count()
    net = Calls(lambda x: x.exp() if next(turns) % 2 else x.exp().sin())
    with pytest.raises(UsageError, match="call 1 in Calls in one, none in the other"):
        record(net, (X,))


@pytest.mark.parametrize("sample", [(), (3,)])
def test_a_sample_has_a_tensor(sample):
    with pytest.raises(UsageError, match="sample: expected the network's arguments"):
        record(nn.ReLU(), sample)
