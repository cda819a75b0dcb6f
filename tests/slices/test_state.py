"""State of models with sharded weights: that of the whole network, whatever the split."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import pydist
import pydist.train.run
from pydist import ShardedTensor, run_local
from pydist.data import UniverseOptions, generate_universes
from pydist.errors import NotSupported, UsageError
from pydist.slices import state_on_rank_0
from pydist.train.config import Config, SharesConfig
from support.equivalence import assert_same, error, on_one_core, on_ranks, randn
from support.training.runs import change, curve, job, last_state, universe_run


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv3d(2, 6, 3, padding=1), nn.Tanh(), nn.ConvTranspose3d(6, 5, 2, 2, bias=False)
    tail = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(5, 7))
    return nn.Sequential(*layers, nn.BatchNorm3d(5), tail).double()


NETWORK = made()
SPLITS = {
    "one device": (1, (1, 1, 1), {}),
    "channel 2": (1, (1, 1, 1), {"axes": {"channel": 2}}),
    "channel 3:1:2": (1, (1, 1, 1), {"axes": {"channel": 3}, "shares": {"channel": (3, 1, 2)}}),
    "channel 2, depth 2": (1, (2, 1, 1), {"axes": {"channel": 2}}),
    "data 2, channel 2": (2, (1, 1, 1), {"axes": {"channel": 2}}),
}


def on(split, body):
    data, spatial, options = SPLITS[split]
    return on_ranks(spatial, body, data, **options)


def parallel(mesh, model=None):
    model = copy.deepcopy(NETWORK) if model is None else model
    return pydist.parallelize(model, mesh, sharded_weights=True)


def train(mesh, model, optimizer, steps):
    x = randn(2, 2, 4, 4, 4).chunk(mesh.data_size)[mesh.data_index]
    for _ in range(steps):
        optimizer.zero_grad()
        model(pydist.distribute_tensor(x, mesh)).square().mean().backward()
        optimizer.step()


WRITES = {
    "copy_": lambda state, key, new: state[key].copy_(new),
    "a view": lambda state, key, new: state[key].view(-1)[:].copy_(new.view(-1)),
    "part by part": lambda state, key, new: [
        own.mul_(0).add_(row) for own, row in zip(state[key], new, strict=True)
    ],
    "item": lambda state, key, new: state[key].__setitem__(slice(None), new),
    "data": lambda state, key, new: setattr(state[key], "data", state[key].data.copy_(new)),
    "out": lambda state, key, new: torch.mul(new, 1, out=state[key]),
    "foreach": lambda state, key, new: torch._foreach_copy_([state[key]], [new]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_what_is_written_into_the_state_reaches_the_weights(split, write):
    """As in torch, whose state_dict() has the parameters' memory."""
    other = copy.deepcopy(NETWORK)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3).add_(1)

    def body(mesh):
        model, key = parallel(mesh), "0.weight"
        state, new = model.state_dict(), other.state_dict()
        write(state, key, new[key])
        assert torch.equal(state[key], new[key])
        assert_same(model[0].weight.full_tensor(), new[key])
        for name, value in model.state_dict().items():
            value.copy_(new[name])
        assert_same([p.detach() for p in model.cpu().state_dict().values()], list(new.values()))
        x = randn(2, 2, 4, 4, 4).chunk(mesh.data_size)[mesh.data_index]
        assert model.eval()(pydist.distribute_tensor(x, mesh)).shape[1] == 7

    on(split, body)


def test_a_state_that_is_older_than_the_weights_is_no_way_to_change_them():
    def body(mesh):
        model, key = parallel(mesh), "0.weight"
        old, other = model.state_dict(), model.state_dict()
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(NotSupported, match=r"'0\.weight' in a state_dict\(\) that is older"):
            old[key][0] = 0
        assert_same(model[0].weight.full_tensor(), NETWORK[0].weight * 2)
        model.state_dict()[key].mul_(0.5)
        with pytest.raises(NotSupported, match="older"):
            other[key].zero_()
        assert_same(model[0].weight.full_tensor(), NETWORK[0].weight)

    on("channel 2", body)


def test_a_weight_with_two_names_has_one_state():
    def body(mesh):
        model = parallel(mesh)
        model[1].tied = model[0].weight
        state = model.state_dict()
        for name in ("0.weight", "1.tied"):
            state[name].mul_(2)
        assert_same(model[0].weight.full_tensor(), NETWORK[0].weight * 4)
        with torch.no_grad():
            model[0].weight.mul_(2)
        again = model.state_dict(destination=state)
        assert_same([again["0.weight"], again["1.tied"]], [NETWORK[0].weight * 8] * 2)

    on("channel 2", body)


def added_buffers(model):
    model.register_buffer("start", model[0].weight.detach().clone())
    model[1].register_buffer("total", model[0].weight.detach().sum())


def added_module(model):
    model.add_module("later", nn.Sequential(nn.Conv3d(2, 6, 3, bias=False)))
    model.later[0].weight = model[0].weight


def pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.3)


@pytest.mark.parametrize("add", [added_buffers, added_module, pruned])
def test_what_is_made_of_weights_later_is_whole_in_the_state(add):
    whole = copy.deepcopy(NETWORK)
    add(whole)
    expected = whole.state_dict()

    def body(mesh):
        model = parallel(mesh)
        add(model)
        state = model.state_dict()
        torch.save(state, io.BytesIO())
        found = {key: value.clone() for key, value in state.items()}
        for value in state.values():
            value.zero_()
        model.load_state_dict(found)
        with state_on_rank_0():
            again = model.state_dict()
        return found, again

    (first, again), (second, _) = on("channel 2", body)
    for found in (first, second, again):
        assert found.keys() == expected.keys()
        assert_same(list(found.values()), list(expected.values()))


def test_state_in_inference_mode_and_in_plain_models():
    def body(mesh):
        model, key = parallel(mesh), "0.weight"
        with torch.inference_mode():
            state = model.state_dict()
            state[key].mul_(2)
            assert torch.equal(state[key].cpu(), NETWORK[0].weight * 2)
        assert_same(model[0].weight.full_tensor(), NETWORK[0].weight * 2)
        plain = made()
        plain.load_state_dict(model.state_dict(), assign=True)
        other = copy.deepcopy(plain)
        assert all(isinstance(p, nn.Parameter) for p in other.parameters())
        other(randn(2, 2, 4, 4, 4)).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
        assert_same(model[0].weight.full_tensor(), NETWORK[0].weight * 2)
        call = partial(torch.func.functional_call, plain.eval(), dict(model.state_dict()))
        x = randn(3, 1, 2, 4, 4, 4)
        assert_same(torch.vmap(call)(x), torch.stack([call(each) for each in x]))

    on("channel 2", body)


def test_copies_of_the_state_are_their_own():
    def body(mesh):
        model = parallel(mesh)
        state, key = model.state_dict(), "0.weight"
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for each in (loaded[key], copy.deepcopy(state)[key], state[key] * 1, state[key].clone()):
            assert type(each) is torch.Tensor
            assert torch.equal(each, NETWORK[0].weight)
            each.zero_()
        with pytest.raises(ValueError, match="read-only"):
            state[key].numpy()[:] = 0
        plain = made()
        plain.load_state_dict(state)
        with torch.no_grad():
            plain[0].weight.zero_()
        assert_same(model[0].weight.full_tensor(), NETWORK[0].weight)

    on("channel 2", body)


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_state_is_that_of_the_network(split):
    def body(mesh):
        model = parallel(mesh)
        found = model.state_dict()
        assert found.keys() == NETWORK.state_dict().keys()
        assert_same(list(found.values()), list(NETWORK.state_dict().values()))
        assert_same(model[0].state_dict()["weight"], NETWORK[0].weight)
        kept = model.state_dict(keep_vars=True)
        assert kept["0.weight"] is model[0].weight
        copied = copy.deepcopy(model)
        copied[1].tied = copied[0].weight
        found = copied.state_dict()
        assert_same([found["0.weight"], found["1.tied"]], [NETWORK[0].weight] * 2)

    on(split, body)


@pytest.mark.parametrize("target", SPLITS)
@pytest.mark.parametrize("source", SPLITS)
def test_state_loads_on_any_other_split(source, target):
    def save(mesh):
        model = parallel(mesh)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
        train(mesh, model, optimizer, 2)
        model, optimizer = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        return {"model": model, "optimizer": optimizer}

    def load(mesh, state):
        model = parallel(mesh)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # ranks are threads
        again = optimizer.state_dict()["state"]
        assert_same(again[0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
        train(mesh, model, optimizer, 2)
        return [*model.state_dict().values(), *moments(optimizer)]

    def through(mesh):
        model = parallel(mesh)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
        train(mesh, model, optimizer, 4)
        return [*model.state_dict().values(), *moments(optimizer)]

    expected = on("one device", through)[0]
    saved = on(source, save)
    for found in on(target, lambda mesh: load(mesh, saved[0])):
        for mine, other in zip(found, expected, strict=True):
            assert error(mine, other) < 1e-11


def moments(optimizer):
    return [each["exp_avg_sq"] for each in optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize("split", ["channel 2", "channel 2, depth 2", "data 2, channel 2"])
def test_state_on_one_rank_alone_is_refused_by_name(split, what):
    def body(mesh):
        model = parallel(mesh)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        train(mesh, model, optimizer, 1)
        if mesh.rank == 0:
            (model if what == "model" else optimizer).state_dict()
        train(mesh, model, optimizer, 1)

    called = r"with the sharded weight '0.weight'|of an optimizer of sharded weights"
    with pytest.raises(UsageError, match=rf"different calls.*state_dict\(\) ({called})"):
        on(split, body)


@pytest.mark.parametrize("split", ["channel 3:1:2", "channel 2, depth 2", "data 2, channel 2"])
def test_state_is_gathered_on_rank_0_only(split):
    def body(mesh):
        model = parallel(mesh)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        train(mesh, model, optimizer, 1)
        with state_on_rank_0():
            states = model.state_dict(), optimizer.state_dict()["state"]
        wholes = model.state_dict(), optimizer.state_dict()["state"]
        return *states, *wholes

    for rank, (weights, state, whole, whole_state) in enumerate(on(split, body)):
        tensors = [*weights.values(), *(each["exp_avg"] for each in state.values())]
        assert any(isinstance(tensor, ShardedTensor) for tensor in tensors) == (rank > 0)
        if rank == 0:
            others = (each["exp_avg"] for each in whole_state.values())
            assert_same(tensors, [*whole.values(), *others])


def test_loading_compares_and_refuses():
    def body(mesh):
        model = parallel(mesh)
        state = model.state_dict()
        with pytest.raises(UsageError, match=r"assign=True\) of '0.weight', a sharded weight"):
            model.load_state_dict(copy.deepcopy(state), assign=True)
        state["0.weight"] = state["0.weight"][:3]
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
            model.load_state_dict(state)

    on("channel 2", body)


def test_initialization_is_that_of_rank_0():
    """Each rank has drawn other weights."""

    def body(mesh):
        model = copy.deepcopy(NETWORK)
        with torch.no_grad():
            model[0].weight.add_(mesh.rank)
        return parallel(mesh, model).state_dict()["0.weight"]

    for found in on("channel 3:1:2", body):
        assert_same(found, NETWORK[0].weight)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder: Path = tmp_path_factory.mktemp("universes")
    generate_universes(folder, UniverseOptions(count=6, width=32, box_width=32, validation=1 / 3))
    return change(universe_run(folder, folder / "run"), train={"batch": 2, "clip_norm": 1.0})


def test_a_run_resumes_from_checkpoints_of_other_splits(config, tmp_path):
    """Every step on another split: channels, channels by shares and depth, one device."""
    config = change(config, checkpoint={"every": 1}, output={"folder": tmp_path / "run"})
    through = change(config, output={"folder": tmp_path / "through"})
    splits = [(2, 2, (1, 1, 1)), (4, 2, (2, 1, 1)), (1, 1, (1, 1, 1)), (4, 2, (1, 1, 1))]
    with on_one_core():
        run_local(job, 1, through, 1, (1, 1, 1))
        for step, (ranks, channel, spatial) in enumerate(splits, 1):
            shares = SharesConfig(channel=(1.0, 3.0) if step == 2 else None)
            mesh = {"spatial": spatial, "channel": channel, "shares": shares,
                    "sharded_weights": channel > 1}  # fmt: skip
            part = change(config, train={"steps": step}, mesh=mesh)
            run_local(job, ranks, part, None, spatial)
    first, last = last_state(through), last_state(config)
    assert last["step"] == first["step"] == 4
    for name, tensor in first["model"].items():
        assert error(last["model"][name], tensor) < 1e-2  # float32: Adam amplifies rounding
    assert curve(config) == pytest.approx(curve(through), abs=1e-4)
