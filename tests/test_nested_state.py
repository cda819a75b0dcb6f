"""Tests of state trees: bit-exact through JSON and tensors, and nothing else is accepted."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from pydist import nested_state
from pydist.errors import CheckpointError

scalars = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
keys = st.text() | st.integers() | st.booleans()
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.dictionaries(keys, inner).map(partial(defaultdict, list))
        | st.dictionaries(keys, inner).map(partial(defaultdict, None))
        | st.dictionaries(keys, st.integers()).map(Counter)
        | st.dictionaries(st.sampled_from(["$tensor", "$float", "$dict"]), inner)
    ),
    max_leaves=20,
)


def through_json(state):
    skeleton, tensors = nested_state.flatten_state(state)
    return nested_state.unflatten_state(json.loads(nested_state.dumps(skeleton)), tensors)


@given(states)
def test_plain_values_come_back_equal_and_of_the_same_type(state):
    again = through_json(state)
    assert again == state
    assert repr(again) == repr(state)


def test_nan_and_infinities_come_back():
    again = through_json([math.nan, math.inf, -math.inf])
    assert math.isnan(again[0])
    assert again[1:] == [math.inf, -math.inf]


def test_flat_state_dict_keeps_its_names_and_bits():
    state = torch.nn.Conv3d(2, 3, 3).state_dict()
    skeleton, tensors = nested_state.flatten_state(dict(state))
    assert list(tensors) == ["weight", "bias"]
    again = nested_state.unflatten_state(skeleton, tensors)
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_adam_state_comes_back_to_the_bit():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    again = through_json(optimizer.state_dict())
    assert again["param_groups"] == optimizer.state_dict()["param_groups"]
    assert again["param_groups"][0]["betas"] == (0.8, 0.9)
    for index, slots in optimizer.state_dict()["state"].items():
        for name, value in slots.items():
            assert torch.equal(again["state"][index][name], value)


def test_schedules_with_milestones_go_on():
    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
        parts = [LinearLR(optimizer, 0.1, total_iters=3), MultiStepLR(optimizer, [1, 3], 0.5)]
        return optimizer, SequentialLR(optimizer, parts, milestones=[3])

    def rates(optimizer, schedule, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            found += schedule.get_last_lr()
        return found

    pair = made()
    rates(*pair, 2)
    states = [through_json(each.state_dict()) for each in pair]
    again = made()
    for each, state in zip(again, states, strict=True):
        each.load_state_dict(state)
    expected = rates(*pair, 6)
    assert rates(*again, 6) == expected
    assert len(set(expected)) == 3


def test_dicts_of_other_types_come_back_plain():
    class Own(dict):
        pass

    for found in (Own(a=1), defaultdict(lambda: 1, a=1)):
        again = through_json(found)
        assert type(again) is dict
        assert again == {"a": 1}


def test_paths_that_read_alike_get_names_of_their_own():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.full((1,), 2.0)}
    again = through_json(state)
    assert again["a.b"] == 0
    assert again["a"]["b"] == 1
    assert again[1] == 2


def test_tied_and_strided_tensors_are_stored_as_copies():
    whole = torch.arange(6.0).reshape(2, 3)
    _, tensors = nested_state.flatten_state({"whole": whole, "turned": whole.T})
    assert torch.equal(tensors["turned"], whole.T)
    assert tensors["turned"].is_contiguous()
    assert len({t.data_ptr() for t in tensors.values()}) == 2


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), print, b"bytes", 1j, np.float64(1), np.float64("nan")]
)
def test_anything_else_is_refused_by_its_path(value):
    with pytest.raises(CheckpointError, match=r"can't store hooks\.0: a "):
        nested_state.flatten_state({"hooks": [value]})


def test_unknown_kinds_and_missing_tensors_are_refused():
    with pytest.raises(CheckpointError, match="unknown kind"):
        nested_state.unflatten_state({"$object": "os.system"}, {})
    with pytest.raises(CheckpointError, match="no tensor 'weight'"):
        nested_state.unflatten_state({"$tensor": "weight"}, {})
    with pytest.raises(CheckpointError, match="a str in place of a dict"):
        nested_state.unflatten_state({"$Counter": "text"}, {})
