"""Tests of the convolution autotuner: measurement, agreement of ranks, cache, fallbacks."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pydist import Mesh
from pydist.backend import autotuner, conv_kernels, conv_tuning, records
from pydist.backend.autotuner import autotuner_of
from pydist.backend.conv import candidates
from pydist.backend.conv_kernels import CONVERT, Candidate, ConvKernels, by_rule, pick
from pydist.backend.conv_tuning import ConvSubject, measured_part
from pydist.backend.problem import ROLES, ConvProblem
from pydist.comm import LocalTransport
from pydist.errors import UsageError
from pydist.ops.conv.local_conv import ConvChooser
from support.equivalence import layout_at, on_ranks, randn, shard

SHAPE = (1, 8, 12, 8, 8)
WEIGHT = (16, 8, 3, 3, 3)
EVEN, UNEVEN = [0, 6, 12], [0, 5, 12]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Returns an empty cache folder; every convolution counts as worth measuring."""
    monkeypatch.setenv("PYDIST_TUNE", "1")
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conv_tuning, "_MEASURED_FLOPS", 0)
    return tmp_path / "cache"


class Clock:
    """Replacement of measurements by given times.

    Attributes:
        visits: the problems and candidates that were measured.
        seconds: by candidate; by default later kernels in the list are faster, and plain ones
            twice as fast.
        load: factor on the times, as on a busy machine.
    """

    def __init__(self) -> None:
        self.visits: list[tuple[ConvProblem, Candidate]] = []
        self.load = lambda candidate: 1.0

    def seconds(self, problem: ConvProblem, candidate: Candidate) -> float:
        if candidate.role == CONVERT:
            return 1e-9
        names = candidates(problem, candidate.channels_last)[ROLES.index(candidate.role)]
        return (len(names) - names.index(candidate.kernel)) * (1.0 + candidate.channels_last)

    def visit(self, visits: conv_tuning.Visits, name: str) -> float:
        problem, candidate = visits._subject.problem, visits._subject.by_name[name]
        self.visits.append((problem, candidate))
        return self.seconds(problem, candidate) * self.load(candidate)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()

    def visit(self, name):
        return made.visit(self, name)

    monkeypatch.setattr(conv_tuning.Visits, "__call__", visit)
    return made


@pytest.fixture
def forbidden(monkeypatch):
    """Returns a function that makes every further measurement fail."""

    def visit(*args):
        raise AssertionError("measured")

    return lambda: monkeypatch.setattr(conv_tuning.Visits, "__call__", visit)


def step(
    mesh: Mesh, points: Sequence[int], grad: bool = True, shape: Sequence[int] = SHAPE
) -> ConvKernels:
    """Runs one convolution; returns the kernels that this rank used."""
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


def problem(depth: int, edge: int = 8, channels: int = 8) -> ConvProblem:
    one = (1, 1, 1)
    weight = (16, channels, 3, 3, 3)
    return ConvProblem((1, channels, depth, edge, edge), weight, one, one, one, 1, torch.float32)


def names(kernels: ConvKernels) -> tuple[object, ...]:
    return kernels.channels_last, kernels.forward, kernels.dgrad, kernels.wgrad


# -- agreement ------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [EVEN, UNEVEN, [0, 1, 2, 11, 12]])
def test_what_measures_best_is_used_by_all(clock, points):
    found = on_ranks((len(points) - 1, 1, 1), lambda mesh: step(mesh, points))
    assert {k.channels_last for k in found} == {False}  # the rule would choose channels-last
    assert ruled(points, 0).channels_last
    for rank, kernels in enumerate(found):
        assert kernels.problem == problem(points[rank + 1] - points[rank])
        wanted = [each[-1] for each in candidates(kernels.problem, False)]
        assert [kernels.forward, kernels.dgrad, kernels.wgrad] == wanted
        assert kernels.threads == 1


def seconds(plain: float, last: float, blocked: float = 1.0, convert: float = 0.0):
    """Returns times of forward in both formats, and of wgrad by "blocked" and "folded" (1.5)."""
    found = {}
    for channels_last, forward in ((True, last), (False, plain)):
        kernels = {
            CONVERT: {"copy": convert if channels_last else 0.0},
            "forward": {"onednn": forward},
            "dgrad": {"onednn": 1.0},
            "wgrad": {"folded": 1.5, "blocked": blocked},
        }
        for role, times in kernels.items():
            for name, time in times.items():
                found[Candidate(channels_last, 1, role, name)] = time
    return found


def test_the_memory_format_is_the_best_for_all_ranks_together():
    """The total time decides, not the majority of ranks."""
    problems = [problem(6), problem(5), problem(4)]
    picked = pick(problems, [seconds(1, 2), seconds(9, 1), seconds(1, 2)])
    assert [k.channels_last for k in picked] == [True] * 3
    picked = pick(problems, [seconds(1, 3), seconds(1, 3), seconds(2, 1)])
    assert [k.channels_last for k in picked] == [False] * 3
    assert [k.wgrad for k in picked] == ["blocked"] * 3


def test_a_best_guess_stays_unless_another_is_clearly_faster():
    (kernels,) = pick([problem(6)], [seconds(1, 1, blocked=1.4)])
    assert (kernels.channels_last, kernels.wgrad) == (True, "folded")


def test_conversion_counts():
    (kernels,) = pick([problem(6)], [seconds(2, 1, convert=5.0)])
    assert kernels.channels_last is False


def test_ranks_with_equal_blocks_share_what_they_measure(monkeypatch, folder):
    """They use equal kernels, whatever each rank measured."""

    def visit(self, name):
        return 1.0 + hash((id(self), name)) % 7

    monkeypatch.setattr(conv_tuning.Visits, "__call__", visit)
    found = on_ranks((3, 1, 1), lambda mesh: step(mesh, [0, 5, 10, 12]))
    assert names(found[0]) == names(found[1])
    assert len(list(folder.glob("conv-*.json"))) == 2


def test_split_ranks_measure_for_real_and_agree():
    found = on_ranks((3, 1, 1), lambda mesh: step(mesh, [0, 5, 10, 12]))
    assert len({k.channels_last for k in found}) == 1
    assert names(found[0]) == names(found[1])  # their blocks are equal


def test_all_ranks_measure_at_the_same_time(clock):
    """Each candidate begins when all ranks have reached it."""
    at = []
    visit = clock.visit
    clock.visit = lambda *given: (at.append(len(clock.visits)), visit(*given))[1]
    on_ranks((2, 1, 1), lambda mesh: step(mesh, EVEN))
    assert len(at) % 2 == 0
    for first, second in zip(clock.visits[::2], clock.visits[1::2], strict=True):
        assert first == second


# -- measuring ------------------------------------------------------------------------------


def test_every_candidate_is_measured_for_real():
    subject = ConvSubject(problem(12), (1,), 1)
    visits = conv_tuning.Visits(subject, randn(*SHAPE).float(), randn(*WEIGHT).float())
    for name in subject.candidates:
        assert 0 < visits(name) < 60, name
    roles = {subject.by_name[name].role for name in subject.candidates}
    assert roles == {CONVERT, *ROLES}
    assert {subject.by_name[name].channels_last for name in subject.candidates} == {False, True}


@pytest.mark.parametrize("edge", [24, 64, 256])
def test_a_large_convolution_is_measured_on_a_part(edge):
    """The part has the same candidates."""
    whole = problem(edge, edge, 16)
    part = measured_part(whole)
    if edge == 24:
        assert part == whole
        return
    assert part.flops < whole.flops / 2
    assert part.flops >= conv_tuning._PART_FLOPS
    for channels_last in (False, True):
        assert candidates(part, channels_last) == candidates(whole, channels_last)


def test_seconds_of_a_part_count_as_those_of_the_whole(monkeypatch):
    monkeypatch.setattr(conv_tuning, "_PART_FLOPS", 1)
    monkeypatch.setattr(conv_tuning, "seconds_of", lambda run: (run(), 0.5)[1])
    subject = ConvSubject(problem(24), (1,), 1)
    visits = conv_tuning.Visits(subject, randn(1, 8, 24, 8, 8).float(), randn(*WEIGHT).float())
    assert visits._part.input[2] < 24
    for name in subject.candidates:
        assert visits(name) == 0.5 * 24 / visits._part.input[2]


# -- memory ---------------------------------------------------------------------------------


def test_later_runs_choose_from_what_the_first_measured(clock):
    first = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    visits = len(clock.visits)
    assert on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN)) == first
    later = len(clock.visits) - visits
    assert 0 < later <= 2 * autotuner._REVISED


def test_a_mesh_measures_once(clock):
    on_ranks((2, 1, 1), lambda mesh: [step(mesh, EVEN) for _ in range(3)])
    subject = ConvSubject(problem(6), (1,), 2)
    assert len(clock.visits) <= 2 * autotuner._TURNS * len(subject.candidates)


@pytest.mark.parametrize(("data", "depth"), [(1, 2), (2, 1), (2, 2)])
def test_times_are_kept_by_the_ranks_of_the_host(data, depth, clock):
    """Sample groups of one host measure at the same time."""
    points = EVEN if depth > 1 else [0, 12]
    on_ranks((depth, 1, 1), lambda mesh: step(mesh, points), data=data)
    for ranks in (1, 2, 4):
        subject = ConvSubject(problem(12 // depth), (1,), ranks)
        known = records.Records().read(subject.key, subject.candidates)
        assert bool(known.seconds) == (ranks == data * depth)


def test_a_choice_fits_any_number_of_groups(clock, forbidden):
    """So a run of two groups keeps the kernels of a file, or of its checkpoint, of one."""

    def kept(mesh: Mesh) -> list[dict[str, list[object]]]:
        step(mesh, EVEN)
        return autotuner_of(mesh).everyones()

    def resumed(mesh: Mesh) -> ConvKernels:
        autotuner_of(mesh).load(choices)
        return step(mesh, EVEN)

    choices = on_ranks((2, 1, 1), kept)[0]
    forbidden()
    for rank, kernels in enumerate(on_ranks((2, 1, 1), resumed, data=2)):
        assert kernels.channels_last is False  # the rule would choose channels-last
        assert ruled(EVEN, rank % 2).channels_last


def test_a_choice_made_on_a_busy_machine_is_revised(clock):
    """The choice stays the same within a run."""
    quiet = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    for path in records.Records()._folder.iterdir():
        path.unlink()
    clock.load = lambda candidate: 1.0 if candidate.channels_last else 2.2
    busy = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    assert busy[0].channels_last
    assert not quiet[0].channels_last
    clock.load = lambda candidate: 1.0
    for _ in range(10):
        found = on_ranks((2, 1, 1), lambda mesh: [step(mesh, UNEVEN), step(mesh, UNEVEN)])
        assert all(first == second for first, second in found)
    assert [first for first, _ in found] == quiet


def test_what_was_measured_often_is_measured_no_more(clock):
    for _ in range(40):
        visits = len(clock.visits)
        on_ranks((1, 1, 1), lambda mesh: step(mesh, [0, 12]))
    assert len(clock.visits) == visits


def test_records_are_shared_between_meshes(clock, folder):
    """Blocks of one size are one problem on every rank."""
    on_ranks((2, 1, 1), lambda mesh: step(mesh, [0, 5, 12]))
    visits = len(clock.visits)
    on_ranks((2, 1, 1), lambda mesh: step(mesh, [0, 7, 12]))
    assert len(clock.visits) - visits <= 2 * autotuner._REVISED
    assert len(list(folder.glob("conv-*.json"))) == 2
    assert len(list(folder.iterdir())) == 2  # no partly written file remains


DAMAGED = {
    "empty": "",
    "cut off": '{"plain 1 forw',
    "a list": "[]",
    "null": "null",
    "no seconds": None,
    "seconds that are none": None,
    "seconds without end": None,
    "an unknown kernel": None,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_a_damaged_file_lacks_is_measured_anew(clock, folder, damage):
    first = on_ranks((1, 1, 1), lambda mesh: step(mesh, [0, 12]))
    (file,) = folder.iterdir()
    good = json.loads(file.read_bytes())
    kept = dict(good)
    name = next(iter(kept))
    if damage == "no seconds":
        kept[name] = []
    elif damage == "seconds that are none":
        kept[name] = [-1.0, 2]
    elif damage == "seconds without end":
        kept[name] = [10**400, 3]
    elif damage == "an unknown kernel":
        kept = {f"{name} of old": value for name, value in kept.items()}
    file.write_text(json.dumps(kept) if DAMAGED[damage] is None else DAMAGED[damage])
    assert on_ranks((1, 1, 1), lambda mesh: step(mesh, [0, 12])) == first
    assert json.loads(file.read_bytes()).keys() == good.keys()


# -- pinned ---------------------------------------------------------------------------------


def test_pinned_choices_are_taken_whatever_the_records_say(clock, forbidden, tmp_path, monkeypatch):
    def trained(mesh):
        return step(mesh, UNEVEN), autotuner_of(mesh).everyones()

    (first, choices), *_ = on_ranks((2, 1, 1), trained, data=2)
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps(choices))
    assert len(choices) == 2  # one per sample group
    for path in records.Records()._folder.iterdir():
        path.unlink()
    forbidden()
    monkeypatch.setenv("PYDIST_TUNING", str(file))
    found = on_ranks((2, 1, 1), trained, data=2)
    assert found[0] == (first, choices)
    # The rule chooses for problems that are not in the file.
    others = on_ranks((2, 1, 1), lambda mesh: step(mesh, [0, 4, 12]))
    assert [names(k) for k in others] == [names(ruled([0, 4, 12], rank)) for rank in (0, 1)]


def test_a_pipe_in_the_place_of_a_tuning_file_is_named(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "tuning.json")
    monkeypatch.setenv("PYDIST_TUNING", str(tmp_path / "tuning.json"))
    with pytest.raises(UsageError, match="can't be used: it is no regular file"):
        autotuner_of(Mesh(LocalTransport()))


@pytest.mark.parametrize("content", ["", "7", "[]", "[3]", '{"a": 1}'])
def test_what_is_no_tuning_file_is_named(content, tmp_path, monkeypatch):
    file = tmp_path / "tuning.json"
    file.write_text(content)
    monkeypatch.setenv("PYDIST_TUNING", str(file))
    with pytest.raises(UsageError, match=r"the tuning file .*tuning\.json can't be used"):
        autotuner_of(Mesh(LocalTransport()))


def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(clock, folder):
    first = on_ranks((1, 1, 1), lambda mesh: step(mesh, [0, 12]))
    (file,) = folder.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert on_ranks((1, 1, 1), lambda mesh: step(mesh, [0, 12])) == first


@pytest.mark.parametrize("change", [{"wgrad": "no such kernel"}, {"channels_last": [1]}, {"a": {}}])
def test_pinned_choices_that_are_not_possible_are_left_out(clock, tmp_path, monkeypatch, change):
    def trained(mesh):
        return step(mesh, UNEVEN), autotuner_of(mesh).everyones()

    (_, choices), *_ = on_ranks((2, 1, 1), trained)
    for each in choices[0].values():
        each[1].update(change)
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps(choices))
    monkeypatch.setenv("PYDIST_TUNING", str(file))
    found = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    assert found == [ruled(UNEVEN, rank) for rank in (0, 1)]


# -- where nothing is measured --------------------------------------------------------------


def test_by_rule_where_the_folder_cannot_be_made(forbidden, tmp_path, monkeypatch):
    forbidden()
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "file" / "cache"))
    for rank, kernels in enumerate(on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))):
        assert kernels == ruled(UNEVEN, rank)


def test_by_rule_where_the_folder_is_not_writable(forbidden, monkeypatch):
    forbidden()
    monkeypatch.setattr(records.os, "access", lambda path, mode: False)  # root may write anywhere
    for rank, kernels in enumerate(on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))):
        assert kernels == ruled(UNEVEN, rank)


def test_by_rule_if_told_so(clock, folder, monkeypatch):
    on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    visits = len(clock.visits)
    monkeypatch.setenv("PYDIST_TUNE", "0")
    for rank, kernels in enumerate(on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))):
        assert kernels == ruled(UNEVEN, rank)  # the cache is not read either
    assert len(clock.visits) == visits
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept


def test_small_convolutions_are_not_worth_it(forbidden, folder, monkeypatch):
    monkeypatch.setattr(conv_tuning, "_MEASURED_FLOPS", 10**9)
    forbidden()
    on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN))
    assert not folder.exists()


def test_evaluation_measures_nothing_and_takes_what_training_chose(clock, forbidden):
    def evaluate_then_train(mesh):
        before = step(mesh, UNEVEN, grad=False)
        again = step(mesh, UNEVEN, grad=False)
        assert before == again == ruled(UNEVEN, mesh.sample_index)
        count = len(clock.visits)
        mesh.sample.barrier()
        trained = step(mesh, UNEVEN)
        assert step(mesh, UNEVEN, grad=False) == trained
        return count, trained

    found = on_ranks((2, 1, 1), evaluate_then_train)
    assert [count for count, _ in found] == [0, 0]
    forbidden()
    fresh = on_ranks((2, 1, 1), lambda mesh: step(mesh, UNEVEN, grad=False))
    assert fresh == [trained for _, trained in found]


@pytest.mark.parametrize("learner", [0, 1])
def test_ranks_in_different_grad_modes_do_not_wait_for_each_other(clock, learner):
    """The group's first rank decides whether to measure."""

    def body(mesh):
        x = shard(randn(*SHAPE).float(), layout_at(mesh, SHAPE, [UNEVEN, None, None]))
        with torch.set_grad_enabled(mesh.rank == learner):
            F.conv3d(x, randn(*WEIGHT).float().requires_grad_(), padding=1)
        return used(mesh)

    found = on_ranks((2, 1, 1), body)
    assert bool(clock.visits) == (learner == 0)
    assert len({k.channels_last for k in found}) == 1


# -- threads --------------------------------------------------------------------------------


def test_the_chosen_number_of_threads_computes_and_is_put_back(monkeypatch):
    seen = []

    def forward(p, x, weight, bias):
        seen.append(torch.get_num_threads())
        return x

    monkeypatch.setitem(conv_kernels.FORWARD, "onednn", forward)
    before = torch.get_num_threads()
    x, weight = randn(*SHAPE), randn(*WEIGHT)
    for threads in (2, 1, None):
        ConvKernels(problem(12), False, "onednn", "onednn", "blocked", threads).run_forward(
            x, weight, None
        )
        assert torch.get_num_threads() == before
    assert seen == [2, 1, before]


def test_ranks_with_unequal_threads_use_the_rule(monkeypatch, folder):
    """As where they are divided unevenly over nodes: each would look for records of its own."""
    x, weight = randn(*SHAPE).float(), randn(*WEIGHT).float()
    here = threading.local()
    monkeypatch.setattr(conv_tuning, "thread_counts", lambda problems: here.counts)

    def rank(mesh):
        here.counts = (2, 1) if mesh.world.rank == 0 else (1,)
        part = shard(x, layout_at(mesh, SHAPE, [EVEN, None, None])).requires_grad_()
        y = F.conv3d(part, torch.nn.Parameter(weight.clone()), padding=1)
        y.square().mean().backward()
        return y.full_tensor().detach()

    for y in on_ranks((2, 1, 1), rank):
        assert torch.allclose(y, F.conv3d(x, weight, padding=1), atol=1e-4)
    assert not [*folder.rglob("*.json")]
