"""Tests of chosen meshes: the best that fits, the same on all ranks; and of kept profiles."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch
from torch import nn

import pydist
from pydist import Mesh, hardware
from pydist.comm import Transport, run_local
from pydist.errors import UsageError
from pydist.grid import Grid
from pydist.hardware import (
    CPU,
    PROFILES,
    Hardware,
    kept_file,
    load_hardware,
    memory_limit,
    this_machine,
)  # fmt: skip
from pydist.models import CosmoFlow
from pydist.ops.coarsening import Workload, coarsen_if_faster
from pydist.ops.windows import Window
from pydist.plan import StepModel, Training, best_mesh, plan_meshes, trace_network
from pydist.plan.choosing import choose_mesh
from pydist.setup import chosen_by_rank_0
from support.equivalence import layout_at


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Hardware:
    """Keeps a profile of this machine, on which exchanges take a long time."""
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path))
    slow = replace(CPU, name="here", exchange=1.0, memory=1 << 20, machine=this_machine())
    slow.save(kept_file())
    return slow


def test_a_kept_profile_is_used_on_its_machine_alone(kept: Hardware) -> None:
    assert load_hardware("auto") == kept
    replace(kept, machine="another").save(kept_file())
    assert load_hardware("auto") is CPU
    kept_file().write_text("{")
    assert load_hardware("auto") is CPU


def test_a_kept_profile_has_no_more_memory_than_a_rank_may_use(kept: Hardware, monkeypatch) -> None:
    replace(kept, memory=1 << 60, ranks_per_node=2).save(kept_file())
    assert load_hardware("auto").memory == memory_limit(2) < 1 << 60
    monkeypatch.setattr(resource, "getrlimit", lambda what: (4 << 30, 4 << 30))
    monkeypatch.setattr(hardware, "mapped_and_resident", lambda: (3 << 30, 1 << 30))
    assert load_hardware("auto").memory <= 2 << 30


def test_thin_blocks_move_by_the_costs_that_rank_0_has_kept(kept: Hardware) -> None:
    window = Window((3, 3, 3), (1, 1, 1), (1, 1, 1), ((1, 1),) * 3)

    def rank(world: Transport) -> tuple[Hardware, bool]:
        mesh = Mesh(world, spatial=(4, 1, 1))
        layout = layout_at(mesh, (1, 4, 8, 4, 4), ([0, 0, 3, 5, 8], None, None))
        # Enough work for the blocks to stay by the constants, and not by the kept costs.
        moved = coarsen_if_faster(layout, Workload(window, 4, 1e6))
        return mesh.hardware, moved.splits[2] is None

    assert run_local(rank, 4) == [(kept, True)] * 4
    kept_file().unlink()
    assert run_local(rank, 4) == [(CPU, False)] * 4


def test_crowding_grows_with_the_ranks_of_a_node() -> None:
    four = replace(CPU, ranks_per_node=4, crowding={"bandwidth": 2.5})
    # Alone 1, with all 4 ranks 2.5 times as long; the rates are those of all.
    found = [2.5 * four.crowded("bandwidth", n) for n in (1, 2, 4, 64)]
    assert found == pytest.approx([1.0, 1.5, 2.5, 2.5])
    assert four.crowded("flops", 2) == 1.0


@pytest.fixture(scope="module")
def model() -> StepModel:
    with torch.device("meta"):
        trace = trace_network(CosmoFlow(64), (4, 64, 64, 64))
    return StepModel(trace, Training(batch=2), PROFILES["v100"])


def test_the_choice_is_the_fastest_that_fits_and_has_the_wanted_parts(model: StepModel) -> None:
    best = choose_mesh(model, 4)
    wanted = [
        each for each in plan_meshes(model, 4)
        if each.grid.size(("channel",)) == 1 and each.grid.size(("data",)) <= 2
    ]  # fmt: skip
    assert best.step == min(each.step for each in wanted)
    peaks = sorted(each.peak for each in wanted)
    tight = replace(model.hardware, memory=int(peaks[0]) + 1)
    narrow = StepModel(model.trace, model.training, tight)
    assert choose_mesh(narrow, 4).peak == peaks[0]
    assert choose_mesh(model, 4, data=1, parts={"channel": 2}).grid.size(("channel",)) == 2
    small = StepModel(model.trace, model.training, replace(model.hardware, memory=1 << 20))
    with pytest.raises(UsageError, match=r"no mesh of 4 ranks fits in 0.00\d* GiB per rank"):
        choose_mesh(small, 4)
    with pytest.raises(UsageError, match="no mesh of 4 ranks has channel 3"):
        choose_mesh(model, 4, parts={"channel": 3})


def test_init_takes_the_mesh_that_rank_0_chooses() -> None:
    def rank(world: Transport) -> tuple[object, ...]:
        # Rank 1 would choose another one, as if it had measured other times.
        sizes = {"depth": 2} if world.rank == 0 else {"data": 2}
        return chosen_by_rank_0(world, lambda ranks: Grid.of(sizes))

    assert run_local(rank, 2) == [(1, [2, 1, 1], {"channel": 1})] * 2
    network = nn.Conv3d(1, 1, 3, padding=1)
    choose = best_mesh(network, (1, 8, 8, 8), Training(batch=2), hardware=CPU)
    assert pydist.init(transport="local", mesh=choose).grid == Grid.of({})
    with pytest.raises(UsageError, match="leave out data, spatial and channel, or mesh"):
        pydist.init(spatial=(2, 1, 1), mesh=choose)


def test_an_error_of_the_choice_is_raised_on_all_ranks() -> None:
    def choose(ranks: int) -> Grid:
        raise UsageError(f"no mesh of {ranks} ranks")

    def rank(world: Transport) -> str:
        with pytest.raises(UsageError, match="no mesh of 2 ranks") as caught:
            chosen_by_rank_0(world, choose)
        return str(caught.value)

    assert len(run_local(rank, 2)) == 2
