"""Tests of pipelines: meshes of stages, shared weights, random numbers, state, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pydist import Mesh, distribute_tensor, parallelize, run_local
from pydist.errors import NotSupported
from pydist.stages import pipeline
from support.equivalence import Task, assert_equal, randn
from support.networks.small import initialized
from support.staged import (
    DEEP,
    HIGH,
    ONE,
    TWO_GROUPS,
    check_stages,
    in_sequence,
    on_stages,
    results,
    step_of,
)

X, TARGET = randn(4, 1, 6, 4, 4, seed=1), randn(4, 2, 6, 4, 4, seed=2)


class Calls(nn.Module):
    """A convolution, a function, and another convolution."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 2, 3, padding=1)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1),
        nn.BatchNorm3d(3),
        nn.ReLU(inplace=True),
        nn.Conv3d(3, 3, 3, padding=1),
        nn.GroupNorm(3, 3),
        nn.MaxPool3d(2),
        nn.ReLU(inplace=True),
        nn.Upsample(scale_factor=2, mode="trilinear"),
        nn.Conv3d(3, 2, 3, padding=1),
    )


def task_of(model: nn.Module) -> Task:
    return Task(initialized(model), X, TARGET, F.mse_loss)


@pytest.mark.parametrize(
    "meshes",
    [
        [DEEP, DEEP],
        [DEEP, ONE],
        [ONE, DEEP],
        [DEEP, HIGH, ONE],
        [{"spatial": (3, 1, 1)}, DEEP],
        [{"spatial": (2, 2, 1)}, HIGH],
        [TWO_GROUPS, TWO_GROUPS],
        [{"data": 2, **DEEP}, TWO_GROUPS],
        [{"channel": 2}, DEEP],
        [{"channel": 2, **DEEP}, {"channel": 3}],
        [{**DEEP, "shares": {"depth": (2, 1)}}, DEEP],
    ],
    ids=str,
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_stages_of_any_mesh(meshes, micro_batches):
    check_stages(task_of(layers()), meshes, micro_batches)


def test_a_number_goes_from_stage_to_stage():
    class Scaled(Calls):
        def forward(self, x):
            y = self.first(x)
            return self.last(y) / y.abs().max() + y.mean()

    check_stages(task_of(Scaled(None)), [ONE, ONE], 2, cuts=["last"])


def test_a_norm_that_is_called_twice():
    """Its running statistics are on one stage: no cut is planned between its calls."""

    class Twice(Calls):
        def __init__(self):
            super().__init__(None)
            self.norm = nn.BatchNorm3d(2)

        def forward(self, x):
            return self.last(torch.relu(self.norm(torch.tanh(self.norm(self.first(x))))))

    check_stages(task_of(Twice()), [ONE] * 3, 2)
    norm = nn.BatchNorm3d(2)
    model = nn.Sequential(nn.Conv3d(1, 2, 1), norm, nn.Conv3d(2, 2, 1), norm)
    with pytest.raises(NotSupported, match=r"stage 1 uses running statistics .* stage 0 updates"):
        check_stages(task_of(model), [ONE, ONE], cuts=["2"])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_buffers_that_a_forward_pass_reads_and_updates(recompute, schedule):
    """Activations are computed again with the buffers that the forward pass has found."""
    model = Calls(parametrizations.spectral_norm(nn.Conv3d(2, 2, 3, padding=1)))
    check_stages(
        task_of(model), [ONE, ONE], 4, cuts=["last"], recompute=recompute, schedule=schedule
    )


def test_statistics_that_no_call_updates_may_be_on_several_stages():
    norm = nn.BatchNorm3d(2)
    layers = [nn.Conv3d(1, 2, 1), norm, nn.Conv3d(2, 2, 1), norm, nn.Conv3d(2, 2, 1)]
    model = nn.Sequential(*layers)
    task = task_of(model)
    norm.eval()
    check_stages(task, [ONE, ONE], 2, cuts=["2"])


def test_statistics_of_functions_that_a_block_calls():
    """Each buffer is gathered from the stage that updates it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv3d(1, 2, 1), nn.Conv3d(2, 2, 1), nn.Conv3d(2, 2, 1)])
            self.norms = nn.ModuleList([nn.BatchNorm3d(2) for _ in range(3)])

        def forward(self, x):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = F.batch_norm(conv(x), norm.running_mean, norm.running_var, training=True)
            return x

    check_stages(task_of(Block()), [ONE] * 3, 2)
    check_stages(task_of(Block()), [ONE, ONE], cuts=["convs.1"])


@pytest.mark.parametrize("meshes", [[ONE, ONE], [DEEP, ONE, ONE], [TWO_GROUPS] * 3], ids=str)
def test_a_weight_of_several_stages(meshes):
    """Its gradient is the sum; so it stays over steps that accumulate."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 2, 3, padding=1)
            self.last = nn.Conv3d(2, 2, 3, padding=1)
            self.last.weight = self.middle.weight

        def forward(self, x):
            return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))

    task = task_of(Tied())
    cuts = ["middle", "last"][-(len(meshes) - 1) :]
    check_stages(task, meshes, 2, cuts=cuts)
    data = meshes[0].get("data", 1)
    expected = {n: 2 * g for n, g in in_sequence(task, 1, data=data).items() if n != "loss"}

    def twice(stages):
        own = task._replace(model=copy.deepcopy(task.model))
        made, loss = step_of(own, stages, cuts=cuts)
        rows = slice(stages.mesh.data_index * 4 // data, (stages.mesh.data_index + 1) * 4 // data)
        made.step(X[rows], TARGET[rows], F.mse_loss)
        found = results(made, loss)
        del found["loss"]
        assert_equal(found, expected)

    on_stages(meshes, twice)


@pytest.mark.parametrize(
    "norm",
    [parametrizations.weight_norm, parametrizations.spectral_norm],
    ids=lambda norm: norm.__name__,
)
def test_weights_that_are_computed(norm):
    net = nn.Sequential(
        norm(nn.Conv3d(1, 2, 3, padding=1)), nn.ReLU(), norm(nn.Conv3d(2, 2, 3, padding=1))
    ).double()
    check_stages(Task(net, X, TARGET, F.mse_loss), [ONE, ONE], 1, cuts=["2"])


def test_masks_are_those_of_the_whole_batch():
    """Micro-batches of a step draw what one pass over the batch draws, and the next step anew."""
    net = initialized(
        nn.Sequential(nn.Conv3d(1, 4, 1), nn.Dropout(0.4), nn.Conv3d(4, 2, 1), nn.Dropout3d(0.4))
    )

    def whole(world):
        mesh = Mesh(world, 1)
        model, losses = parallelize(copy.deepcopy(net), mesh), []
        for _ in range(2):
            loss = F.mse_loss(model(distribute_tensor(X, mesh)), TARGET)
            loss.backward()
            losses.append(loss.detach())
        return {"a": losses[0], "b": losses[1], **{n: p.grad for n, p in model.named_parameters()}}

    (expected,) = run_local(whole, 1)
    assert not torch.equal(expected["a"], expected["b"])
    for meshes in ([ONE, ONE], [DEEP, ONE], [TWO_GROUPS] * 2):
        data = meshes[0].get("data", 1)

        def rank(stages, data=data):
            made = pipeline(copy.deepcopy(net), stages, X[:1], micro_batches=2, cuts=["1"])
            own = 4 // data
            rows = slice(stages.mesh.data_index * own, (stages.mesh.data_index + 1) * own)
            losses = [made.step(X[rows], TARGET[rows], F.mse_loss) for _ in range(2)]
            found = results(made, losses[1])
            found["b"] = found.pop("loss")
            mean = losses[0].clone().reshape(1)
            stages.mesh.data.all_reduce(mean)
            assert_equal({"a": mean[0] / data, **found}, expected)

        on_stages(meshes, rank)


@pytest.mark.parametrize("group_weight", ["samples", "equal"])
def test_groups_of_unequal_size(group_weight):
    """Three and two samples in two micro-batches: weighted by samples, or the same per group."""
    task = task_of(nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Conv3d(2, 2, 3)))
    x, target = randn(5, 1, 6, 6, 6, seed=1), randn(5, 2, 2, 2, 2, seed=2)
    model = copy.deepcopy(task.model)
    if group_weight == "samples":
        F.mse_loss(model(x), target).backward()
    else:
        (F.mse_loss(model(x[:3]), target[:3]) / 2).backward()
        (F.mse_loss(model(x[3:]), target[3:]) / 2).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    mine = [slice(0, 3), slice(3, 5)]
    losses = [F.mse_loss(task.model(x[rows]), target[rows]).detach() for rows in mine]

    def rank(stages):
        made = pipeline(
            copy.deepcopy(task.model), stages, x[:1], micro_batches=2, cuts=["1"],
            group_weight=group_weight,
        )  # fmt: skip
        rows = mine[stages.mesh.data_index]
        loss = made.step(x[rows], target[rows], F.mse_loss)
        torch.testing.assert_close(loss, losses[stages.mesh.data_index], rtol=1e-12, atol=0)
        found = results(made, loss)
        del found["loss"]
        assert_equal(found, expected)

    on_stages([TWO_GROUPS, TWO_GROUPS], rank)


@pytest.mark.parametrize(
    ("meshes", "order", "options"),
    [([ONE, ONE], None, {}), ([DEEP, ONE], None, {}), ([ONE, DEEP], [0, 1, 1, 0], {}),
     ([ONE, ONE], [1, 0, 1], {}),
     ([ONE, ONE], None, {"schedule": "gems", "running_statistics": "batch"})], ids=str,
)  # fmt: skip
def test_training_saving_and_evaluating(meshes, order, options):
    """Steps of an optimizer with clipped gradients; the network's state is that of one device."""
    task = task_of(layers())
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        F.mse_loss(model(X), TARGET).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = model.state_dict()
    model.eval()
    with torch.no_grad():
        output = model(X)

    def rank(stages):
        made = pipeline(copy.deepcopy(task.model), stages, X[:1], balance="memory", **options)
        own = torch.optim.SGD(made.model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            made.step(X, TARGET, F.mse_loss)
            found = made.clip_grad_norm_(0.5)
            own.step()
            own.zero_grad()
        torch.testing.assert_close(found.double(), norm, rtol=1e-6, atol=0)
        made.gather()
        assert_equal(made.model.state_dict(), expected, dict.fromkeys(expected, 1e-9))
        made.model.eval()
        y = made(X)
        assert (y is None) == (not stages.is_last)
        if y is not None:
            assert_equal({"y": y.full_tensor()}, {"y": output}, {"y": 1e-9})

    on_stages(meshes, rank, order=order)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
@pytest.mark.parametrize(
    ("later", "order"), [([DEEP, ONE, ONE], None), ([ONE, DEEP], [0, 1, 1, 0])], ids=str
)
def test_training_continues_on_another_number_of_stages(kind, later, order):
    """Parameters and the state of the optimizer are those of the whole network."""
    task = task_of(layers())
    options = {"lr": 0.01, **({"momentum": 0.9} if kind == "SGD" else {})}

    def optimizer_of(model):
        last = [p for n, p in model.named_parameters() if n.startswith("8")]
        first = [p for n, p in model.named_parameters() if not n.startswith("8")]
        groups = [{"params": first}, {"params": last, "lr": 0.02}]
        return getattr(torch.optim, kind)(groups, **options)

    def steps(model, optimizer, step):
        for _ in range(2):
            optimizer.zero_grad()
            step()
            optimizer.step()

    whole = copy.deepcopy(task.model)
    optimizer = optimizer_of(whole)
    for _ in range(2):
        steps(whole, optimizer, lambda: F.mse_loss(whole(X), TARGET).backward())
    saved = {}

    def first(stages):
        made = pipeline(copy.deepcopy(task.model), stages, X[:1], balance="memory")
        own = optimizer_of(made.model)
        steps(made.model, own, lambda: made.step(X, TARGET, F.mse_loss))
        made.gather()
        state = made.optimizer_state(own), made.model.state_dict()
        if stages.world.rank == stages.world.size - 1:
            saved["optimizer"], saved["model"] = copy.deepcopy(state)

    def second(stages):
        made = pipeline(copy.deepcopy(task.model), stages, X[:1], balance="memory")
        made.model.load_state_dict(saved["model"])
        own = optimizer_of(made.model)
        own.load_state_dict(copy.deepcopy(saved["optimizer"]))
        steps(made.model, own, lambda: made.step(X, TARGET, F.mse_loss))
        made.gather()
        expected = whole.state_dict()
        # The bias before the batch norm has a gradient of rounding, which Adam makes a step of.
        found = {n: v for n, v in made.model.state_dict().items() if n != "0.bias"}
        del expected["0.bias"]
        assert_equal(found, expected, dict.fromkeys(expected, 1e-6))
        ours, theirs = made.optimizer_state(own), optimizer.state_dict()
        assert ours["state"].keys() == theirs["state"].keys()
        assert ours["param_groups"] == theirs["param_groups"]

    on_stages([ONE, ONE], first, order=[1, 0, 1] if order else None)
    on_stages(later, second, order=order)


def test_ranks_start_from_the_first_one():
    """Also those of other stages, which would use other values in calls on plain tensors."""

    def rank(stages):
        model = initialized(layers(), seed=stages.world.rank)
        made = pipeline(model, stages, X[:1], balance="memory")
        return {n: p.detach().clone() for n, p in made.model.state_dict().items()}

    first, *others = on_stages([ONE, ONE], rank)
    assert_equal(first, dict(initialized(layers(), seed=0).state_dict()))
    for other in others:
        assert_equal(other, first)


def test_only_parameters_of_the_stage_have_gradients():
    def rank(stages):
        made, _ = step_of(task_of(layers()), stages, cuts=["4"])
        return {n.split(".")[0] for n, p in made.model.named_parameters() if p.grad is not None}

    assert on_stages([DEEP, DEEP], rank) == [{"0", "1", "3"}] * 2 + [{"4", "8"}] * 2


def test_frozen_parts():
    for frozen in ("0", "8"):
        task = task_of(layers())
        for name, p in task.model.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
        check_stages(task, [DEEP, ONE], 2)


def test_several_arguments_and_outputs():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(1, 2, 3, padding=1)

        def forward(self, x, pair, scale=None):
            y = torch.relu(self.a(x)) * scale[:, :, None, None, None]
            return {"y": y, "parts": [self.b(pair["more"]) + y.mean((1, 2, 3, 4), keepdim=True), 3]}

    net, scale = initialized(Both()), randn(4, 2, seed=5)
    arguments = (X, {"more": randn(*X.shape, seed=3)}, scale)

    def loss_of(out, wanted):
        assert out["parts"][1] == 3
        return F.mse_loss(out["y"] + out["parts"][0], wanted)

    model = copy.deepcopy(net)
    loss_of(model(*arguments), TARGET).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for meshes in ([ONE, ONE], [ONE, ONE, DEEP]):

        def rank(stages):
            made = pipeline(copy.deepcopy(net), stages, arguments, balance="memory",
                            micro_batches=2)  # fmt: skip
            found = results(made, made.step(arguments, TARGET, loss_of))
            del found["loss"]
            assert_equal(found, expected)

        on_stages(meshes, rank)


class WithTable(nn.Module):
    """A volume and a table, which is plain: its features scale and shift those of the volume."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.more = nn.Linear(4, 6), nn.Linear(6, 6)
        self.first, self.last = nn.Conv3d(1, 6, 3, padding=1), nn.Conv3d(6, 2, 3, padding=1)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        features = torch.tanh(self.more(torch.tanh(self.table(table))))
        x = torch.relu(self.first(x))
        x = x * features[:, :, None, None, None] + features.mean(1)[:, None, None, None, None]
        return self.last(x) + self.head(features)[:, :, None, None, None]


@pytest.mark.parametrize("cuts", [["more"], ["last"]], ids=str)
@pytest.mark.parametrize(
    ("meshes", "order"),
    [([DEEP, ONE], None), ([ONE, DEEP], None), ([DEEP, DEEP], None),
     ([{"spatial": (3, 1, 1)}, DEEP], None), ([DEEP, ONE], [1, 0])], ids=str,
)  # fmt: skip
def test_plain_tensors_between_stages_of_several_ranks(meshes, order, cuts):
    """Every rank of a stage has all of one, and a part of its gradient or all of it."""
    net = initialized(WithTable())
    x, table, target = randn(4, 1, 7, 4, 4), randn(4, 4, seed=1), randn(4, 2, 7, 4, 4, seed=2)
    alone = copy.deepcopy(net)
    F.mse_loss(alone(x, table), target).backward()
    grads = {n: p.grad for n, p in alone.named_parameters()}

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, (x[:1], table[:1]), micro_batches=2, cuts=cuts)
        made.step((x, table), target, F.mse_loss)
        return {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    found = on_stages(meshes, rank, order=order)
    assert {name for each in found for name in each} == set(grads)
    for each in found:
        for name, grad in each.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cuts", [["first"], ["last"]], ids=str)
@pytest.mark.parametrize("meshes", [[ONE, DEEP], [DEEP, ONE]], ids=str)
def test_several_gradients_of_a_step_that_raised_are_dropped(meshes, cuts, recompute):
    """They have other shapes, and come from several ranks."""
    net = initialized(WithTable())
    x, table, target = randn(6, 1, 7, 4, 4), randn(6, 4, seed=1), randn(6, 2, 7, 4, 4, seed=2)
    bad = target.clone()
    bad[4:] = torch.nan
    alone = copy.deepcopy(net)
    F.mse_loss(alone(x, table), target).backward()
    grads = {n: p.grad for n, p in alone.named_parameters()}

    def loss_of(y, t):
        if t.isnan().any():
            raise ArithmeticError("NaN in the target")
        return F.mse_loss(y, t)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(
            own, stages, (x[:1], table[:1]), micro_batches=3, cuts=cuts, recompute=recompute
        )
        for given in (bad, bad, target):
            own.zero_grad()
            if given is bad:
                with pytest.raises(ArithmeticError, match="NaN"):
                    made.step((x, table), given, loss_of)
            else:
                made.step((x, table), given, loss_of)
        return {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    for found in on_stages(meshes, rank):
        for name, grad in found.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-11, atol=1e-14, msg=name)
