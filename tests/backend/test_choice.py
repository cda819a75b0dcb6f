"""The choice of kernels: measured once, the same on all ranks, remembered, never in the way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from pydist import Mesh, ShardedTensor
from pydist.backend import choice
from pydist.backend.choice import ConvKernels, by_rule
from pydist.backend.conv import FORWARD, candidates, formats
from pydist.backend.problem import ConvProblem
from pydist.comm import LocalTransport
from pydist.exchange.formats import is_channels_last
from pydist.ops.convolution import conv, conv_transpose
from pydist.ops.convolution.local_conv import ConvChooser
from support.equivalence import layout_at, on_ranks, randn, shard

SHAPE = (1, 8, 12, 8, 8)
WEIGHT = (16, 8, 3, 3, 3)
EVEN, UNEVEN = [0, 6, 12], [0, 5, 12]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache, and convolutions that are all worth measuring."""
    monkeypatch.setenv("PYDIST_TUNE", "1")
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "_MEASURED_FLOPS", 0)
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch) -> list[ConvProblem]:
    """What is measured from now on; kernels "torch" and "blocked" seem the fastest, plain."""
    seen: list[ConvProblem] = []

    def measure(problem, x, weight):
        seen.append(problem)
        return [
            {"channels_last": cl, "threads": 1, "convert": 0.0}
            | {
                role: {name: (i + 1.0) * (1 + cl) for i, name in enumerate(reversed(names))}
                for role, names in zip(choice._ROLES, candidates(problem, cl), strict=True)
            }
            for cl in formats(problem)
        ]

    monkeypatch.setattr(choice, "_measure", measure)
    return seen


@pytest.fixture
def forbidden(monkeypatch):
    """Measuring fails."""

    def measure(*args):
        raise AssertionError("measured")

    return lambda: monkeypatch.setattr(choice, "_measure", measure)


def step(
    mesh: Mesh, points: Sequence[int], grad: bool = True, shape: Sequence[int] = SHAPE
) -> ConvKernels:
    """One convolution, and what this rank computed it with."""
    cut = [points if mesh.sample_size > 1 else None, None, None]
    x = shard(randn(*shape).float(), layout_at(mesh, shape, cut))
    weight = randn(*WEIGHT, seed=1).float().requires_grad_()
    with torch.set_grad_enabled(grad):
        y = F.conv3d(x, weight, padding=1)
    if grad:
        y.square().sum().backward()
    return used(mesh)


def used(mesh: Mesh) -> ConvKernels:
    (plan,) = (p for key, p in mesh.session.plans.items() if key[0] == "conv")
    chooser: ConvChooser = plan._chooser
    return chooser._chosen or chooser._ruled


def ruled(points: Sequence[int], rank: int) -> ConvKernels:
    return by_rule([problem(b - a) for a, b in itertools.pairwise(points)], rank)


def problem(depth: int) -> ConvProblem:
    one = (1, 1, 1)
    return ConvProblem((1, 8, depth, 8, 8), WEIGHT, one, one, one, 1, torch.float32)


def names(kernels: ConvKernels) -> tuple[object, ...]:
    return kernels.channels_last, kernels.forward, kernels.dgrad, kernels.wgrad


# -- agreement ------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [EVEN, UNEVEN, [0, 1, 2, 11, 12]])
def test_what_measures_best_is_used_by_all(measured, points):
    found = on_ranks((len(points) - 1, 1, 1), lambda mesh: step(mesh, points))
    assert len(measured) == len(found)
    assert {k.channels_last for k in found} == {False}  # the rule would say channels-last
    assert ruled(points, 0).channels_last
    for rank, kernels in enumerate(found):
        assert kernels.problem == problem(points[rank + 1] - points[rank])
        wanted = [each[-1] for each in candidates(kernels.problem, False)]
        assert [kernels.forward, kernels.dgrad, kernels.wgrad] == wanted
        assert kernels.threads == 1


def test_equal_blocks_get_equal_kernels_whatever_each_rank_measures():
    """And the format is the best for all ranks together, not for most."""
    problems = [problem(6), problem(6), problem(5)]

    def times(plain: float, last: float, torch_first: bool):
        first, second = (1.0, 2.0) if torch_first else (2.0, 1.0)
        return [
            {
                "channels_last": cl, "threads": 1, "convert": 0.0, "forward": {"onednn": seconds},
                "dgrad": {"onednn": 1.0}, "wgrad": {"folded": first, "blocked": second},
            }
            for cl, seconds in ((False, plain), (True, last))
        ]  # fmt: skip

    picked = choice._pick(problems, [times(1, 2, True), times(9, 1, False), times(1, 2, False)])
    assert [p["channels_last"] for p in picked] == [False] * 3
    assert [p["wgrad"] for p in picked] == ["folded", "folded", "blocked"]
    picked = choice._pick(problems, [times(1, 2, True), times(1, 2, True), times(9, 1, True)])
    assert [p["channels_last"] for p in picked] == [True] * 3


def test_conversion_counts():
    slow_to_reach = {
        "channels_last": True, "threads": 1, "convert": 5.0, "forward": {"onednn": 1.0},
        "dgrad": {"onednn": 1.0}, "wgrad": {"blocked": 1.0},
    }  # fmt: skip
    slower = slow_to_reach | {"channels_last": False, "convert": 0.0, "forward": {"onednn": 2.0}}
    assert choice._pick([problem(6)], [[slow_to_reach, slower]])[0]["channels_last"] is False


def test_the_real_measure_offers_what_is_possible():
    x, weight = randn(*SHAPE).float(), randn(*WEIGHT).float()
    settings = choice._measure(problem(12), x, weight)
    assert sorted(s["channels_last"] for s in settings) == [False, True]
    for setting in settings:
        for role, allowed in zip(
            choice._ROLES, candidates(problem(12), setting["channels_last"]), strict=True
        ):
            assert list(setting[role]) == allowed
            assert all(0 < seconds < 60 for seconds in setting[role].values())


def test_split_ranks_measure_for_real_and_agree():
    found = on_ranks((3, 1, 1), lambda mesh: step(mesh, [0, 5, 10, 12]))
    assert len({k.channels_last for k in found}) == 1
    assert names(found[0]) == names(found[1])  # as their blocks are equal


# -- memory ---------------------------------------------------------------------------------


def test_a_second_mesh_reads_what_the_first_measured(measured, forbidden):
    first = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    forbidden()
    assert on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN)) == first


def test_a_mesh_measures_once(measured):
    on_ranks((2, 1, 1), lambda mesh: [step(mesh, EVEN) for _ in range(3)])
    assert len(measured) == 2


def test_other_convolutions_are_other_files(measured, folder):
    on_ranks((2, 1, 1), lambda mesh: step(mesh, EVEN))
    on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    assert len(measured) == 4
    assert len(list(folder.glob("conv-*.json"))) == 2
    assert len(list(folder.iterdir())) == 2  # nothing half-written is left


def test_of_two_groups_the_first_file_holds_for_both(measured, folder, monkeypatch):
    """The second group has measured when the first one's file appears."""
    first = on_ranks((1, 1, 1), lambda mesh: step(mesh, [0, 12]))[0]
    (file,) = folder.iterdir()
    kept = json.loads(file.read_bytes())
    file.unlink()
    assert kept[0]["wgrad"] != ruled([0, 12], 0).wgrad
    other = names_of_rule = {
        "channels_last": True, "threads": 1, "forward": "onednn", "dgrad": "onednn",
        "wgrad": ruled([0, 12], 0).wgrad,
    }  # fmt: skip
    measure = choice._measure

    def overtaken(*args):
        file.write_text(json.dumps([other]))
        return measure(*args)

    monkeypatch.setattr(choice, "_measure", overtaken)
    second = on_ranks((1, 1, 1), lambda mesh: step(mesh, [0, 12]))[0]
    assert names(second) == tuple(
        names_of_rule[k] for k in ("channels_last", "forward", "dgrad", "wgrad")
    )
    assert names(second) != names(first)
    assert json.loads(file.read_bytes()) == [other]


def test_two_data_groups_end_up_alike(measured):
    found = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN), data=2)
    assert found[:2] == found[2:]


DAMAGED = {
    "empty": "",
    "cut off": '[{"channels_last": tr',
    "no list": "7",
    "null": "null",
    "for fewer ranks": "[]",
    "unknown kernel": None,
    "no threads": None,
    "a format that is not possible": None,
    "two formats": None,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_measured_anew_and_mended(measured, forbidden, folder, damage):
    first = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    (file,) = folder.iterdir()
    good = file.read_bytes()
    kept = json.loads(good)
    if damage == "unknown kernel":
        kept[1]["wgrad"] = "no such kernel"
    elif damage == "no threads":
        del kept[0]["threads"]
    elif damage == "a format that is not possible":
        kept[0]["channels_last"] = kept[1]["channels_last"] = 3
    elif damage == "two formats":
        kept[0]["channels_last"] = not kept[1]["channels_last"]
    file.write_text(json.dumps(kept) if DAMAGED[damage] is None else DAMAGED[damage])
    assert file.read_bytes() != good
    assert on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN)) == first
    assert len(measured) == 4
    assert file.read_bytes() == good
    forbidden()
    assert on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN)) == first


def test_a_folder_without_hard_links_remembers_as_well(measured, forbidden, folder, monkeypatch):
    def link(*_):
        raise PermissionError("this file system has no hard links")

    monkeypatch.setattr(choice.os, "link", link)
    first = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    forbidden()
    assert on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN)) == first


# -- where nothing is measured --------------------------------------------------------------


def test_by_rule_where_the_folder_cannot_be_made(forbidden, tmp_path, monkeypatch):
    forbidden()
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "file" / "cache"))
    for rank, kernels in enumerate(on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))):
        assert kernels == ruled(UNEVEN, rank)


def test_by_rule_where_the_folder_is_not_writable(forbidden, monkeypatch):
    forbidden()
    monkeypatch.setattr(choice.os, "access", lambda path, mode: False)  # root may write anywhere
    for rank, kernels in enumerate(on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))):
        assert kernels == ruled(UNEVEN, rank)


def test_by_rule_if_told_so(measured, folder, monkeypatch):
    on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setenv("PYDIST_TUNE", "0")
    for rank, kernels in enumerate(on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))):
        assert kernels == ruled(UNEVEN, rank)  # what is remembered is not read either
    assert len(measured) == 2
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept


def test_small_convolutions_are_not_worth_it(forbidden, folder, monkeypatch):
    monkeypatch.setattr(choice, "_MEASURED_FLOPS", 10**9)
    forbidden()
    on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    assert not folder.exists()


def test_evaluation_measures_nothing_and_takes_what_training_chose(measured, forbidden):
    def evaluate_then_train(mesh):
        before = step(mesh, UNEVEN, grad=False)
        again = step(mesh, UNEVEN, grad=False)
        assert before == again == ruled(UNEVEN, mesh.sample_index)
        count = len(measured)
        mesh.sample.barrier()
        trained = step(mesh, UNEVEN)
        assert step(mesh, UNEVEN, grad=False) == trained
        return count, trained

    found = on_ranks((2, 1, 1), evaluate_then_train)
    assert [count for count, _ in found] == [0, 0]
    assert len(measured) == 2
    forbidden()
    fresh = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN, grad=False))
    assert fresh == [trained for _, trained in found]


@pytest.mark.parametrize("learner", [0, 1])
def test_ranks_in_different_grad_modes_do_not_wait_for_each_other(measured, learner):
    """The group's first rank decides whether to measure."""

    def body(mesh):
        x = shard(randn(*SHAPE).float(), layout_at(mesh, SHAPE, [UNEVEN, None, None]))
        with torch.set_grad_enabled(mesh.rank == learner):
            F.conv3d(x, randn(*WEIGHT).float().requires_grad_(), padding=1)
        return used(mesh)

    found = on_ranks((2, 1, 1), body)
    assert len(measured) == (2 if learner == 0 else 0)
    assert len({k.channels_last for k in found}) == 1


# -- threads --------------------------------------------------------------------------------


def test_the_chosen_number_of_threads_computes_and_is_put_back(monkeypatch):
    seen = []

    def forward(p, x, weight, bias):
        seen.append(torch.get_num_threads())
        return x

    monkeypatch.setitem(choice.FORWARD, "onednn", forward)
    before = torch.get_num_threads()
    x, weight = randn(*SHAPE), randn(*WEIGHT)
    for threads in (2, 1, None):
        ConvKernels(problem(12), False, "onednn", "onednn", "blocked", threads).run_forward(
            x, weight, None
        )
        assert torch.get_num_threads() == before
    assert seen == [2, 1, before]


# -- on a device ----------------------------------------------------------------------------


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Convolutions go the way of a device, on the CPU."""
    of_device = partial(ConvProblem, device="cuda")
    for module in (conv, conv_transpose):
        monkeypatch.setattr(module, "ConvProblem", lambda *given: of_device(*given[:7]))


@pytest.mark.parametrize("lies", ["input", "weight", "nothing", "one shard"])
@pytest.mark.parametrize("padding", [1, 0], ids=["corrected", "gathered"])
@pytest.mark.parametrize("function", [F.conv3d, F.conv_transpose3d])
def test_a_device_keeps_the_memory_format_of_the_operands(as_on_a_device, function, padding, lies):
    """On all ranks alike, as halos travel in it, and forward as backward."""
    last = torch.channels_last_3d
    whole, kernel = randn(*SHAPE).float(), randn(8, 8, 3, 3, 3, seed=1).float()
    plain = kernel.clone().requires_grad_()
    expected = function(whole, plain, padding=padding)
    expected.square().sum().backward()

    def body(mesh):
        layout = layout_at(mesh, SHAPE, [EVEN, None, None])
        local = shard(whole, layout).to_local()
        if lies == "input" or (lies == "one shard" and mesh.rank == 0):
            local = local.contiguous(memory_format=last)
        weight = kernel.contiguous(memory_format=last) if lies == "weight" else kernel.clone()
        mine = weight.requires_grad_()
        y = function(ShardedTensor.from_local(local, layout), mine, padding=padding)
        y.square().sum().backward()
        (plan,) = (p for key, p in mesh.session.plans.items() if key[0].startswith("conv"))
        assert plan._chooser._chosen.channels_last == (lies in ("input", "weight"))
        torch.testing.assert_close(y.full_tensor(), expected)
        total = mine.grad.contiguous()
        mesh.world.all_reduce(total)
        torch.testing.assert_close(total / mesh.size, plain.grad, rtol=1e-4, atol=1e-2)

    on_ranks((2, 1, 1), body)


def test_a_device_is_given_the_weight_as_its_activations_lie(as_on_a_device):
    """Or the library would copy it in every call."""
    seen = []
    forward = FORWARD["torch"]

    def watched(problem, x, weight, bias):
        seen.extend((x, weight))
        return forward(problem, x, weight, bias)

    mesh = Mesh(LocalTransport())
    weight = randn(*WEIGHT, seed=1).float().contiguous(memory_format=torch.channels_last_3d)
    with mock.patch.dict(FORWARD, torch=watched):
        F.conv3d(shard(randn(*SHAPE).float(), layout_at(mesh, SHAPE, [])), weight)
    assert all(map(is_channels_last, seen))
    assert seen[1].data_ptr() == weight.data_ptr()
