"""Thin blocks: when a tensor moves to fewer ranks, with results that don't depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from pydist.hardware import CPU, Interconnect, kept_file, this_machine
from pydist.layout import Layout
from pydist.mesh import Mesh
from pydist.ops.coarsening import Workload, coarsen_if_faster
from pydist.ops.windows import Window
from support.equivalence import Task, check_network, layout_at, on_ranks, randn

CONV = Window((3, 3, 3), (1, 1, 1), (1, 1, 1), ((1, 1), (1, 1), (1, 1)))
SHAPE = (1, 4, 8, 4, 4)


def in_depth(mesh: Mesh, points: list[int]) -> Layout:
    return layout_at(mesh, SHAPE, (points, None, None))


def work(flops: float) -> Workload:
    return Workload(CONV, 4, flops)


def points_of(layout: Layout) -> list[int] | None:
    split = layout.splits[2]
    return None if split is None else list(split.partition.points)


def test_blocks_as_thick_as_the_halo_stay():
    def rank(mesh: Mesh) -> None:
        layout = in_depth(mesh, list(range(9)))
        assert coarsen_if_faster(layout, work(0.0)) is layout

    on_ranks((8, 1, 1), rank)


def test_where_computing_costs_nothing_every_rank_takes_the_whole():
    def rank(mesh: Mesh) -> None:
        layout = in_depth(mesh, [0, 0, 2, 4, 8])
        assert points_of(coarsen_if_faster(layout, work(0.0))) is None

    on_ranks((4, 1, 1), rank)


def test_where_computing_costs_much_the_blocks_stay():
    def rank(mesh: Mesh) -> None:
        layout = in_depth(mesh, [0, 0, 3, 5, 8])
        assert coarsen_if_faster(layout, work(1e9)) is layout

    on_ranks((4, 1, 1), rank)


def test_between_the_two_neighbors_share():
    # Only messages and computing have a cost: 4 messages with blocks of 1, 2 with 2, 1 with 4, but
    # the last takes 4 times as long to compute.
    costs = replace(CPU, exchange=0.0, within=Interconnect(1.0, CPU.within.bandwidth))

    def rank(mesh: Mesh) -> None:
        mesh.ranks_per_core, mesh.hardware = 1.0, costs
        layout = in_depth(mesh, [0, 1, 2, 3, 4, 5, 6, 7, 8])
        wide = Workload(Window((5, 5, 5), (1, 1, 1), (1, 1, 1), ((2, 2),) * 3), 4, 1.7e7)
        assert points_of(coarsen_if_faster(layout, wide)) == [0, 4, 4, 4, 4, 8, 8, 8, 8]

    on_ranks((8, 1, 1), rank)


def test_what_all_ranks_repeat_costs_more_where_they_share_cores():
    def rank(mesh: Mesh) -> None:
        layout = in_depth(mesh, [0, 0, 2, 4, 8])
        mesh.ranks_per_core = 1.0
        assert points_of(coarsen_if_faster(layout, work(2e3))) is None
        mesh.session.plans.clear()
        mesh.ranks_per_core = 8.0
        assert coarsen_if_faster(layout, work(2e3)) is layout

    on_ranks((4, 1, 1), rank)


def test_sample_groups_of_different_sizes_choose_identically():
    def rank(mesh: Mesh) -> list[list[int] | None]:
        mesh.ranks_per_core = 1.0
        samples = (100, 1, 0)[mesh.data_index]
        shape, points = (samples, *SHAPE[1:]), [0, 0, 2, 4, 8]
        layout = layout_at(mesh, shape, (points, None, None))
        chosen = [coarsen_if_faster(layout, work(10.0**k)) for k in range(9)]
        assert all(c.shape == shape for c in chosen)
        return [points_of(c) for c in chosen]

    first, *others = on_ranks((4, 1, 1), rank, 3)
    assert any(first)
    assert None in first
    assert all(found == first for found in others)


def test_a_batch_without_samples_has_a_layout():
    def rank(mesh: Mesh) -> None:
        layout = layout_at(mesh, (0, *SHAPE[1:]), ([0, 0, 2, 4, 8], None, None))
        assert coarsen_if_faster(layout, work(0.0)).shape[0] == 0

    on_ranks((4, 1, 1), rank)


def test_thin_blocks_can_be_kept():
    def rank(mesh: Mesh) -> None:
        layout = in_depth(mesh, [0, 0, 2, 4, 8])
        assert coarsen_if_faster(layout, work(0.0)) is layout

    on_ranks((4, 1, 1), rank, keep_thin_blocks=True)


@pytest.mark.parametrize("message_seconds", [0.0, 1e-3, 1.0])
def test_the_result_does_not_depend_on_the_choice(
    message_seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path))
    link = Interconnect(message_seconds, CPU.within.bandwidth)
    replace(CPU, within=link, machine=this_machine()).save(kept_file())
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.LeakyReLU(),
        nn.AvgPool3d(3, 2, 1),
        nn.Conv3d(4, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.MaxPool3d(2),
        nn.Conv3d(4, 2, 5, padding=2),
        nn.Flatten(),
        nn.Linear(2 * 2 * 2 * 2, 3),
    ).double()
    check_network(Task(model, randn(2, 2, 8, 8, 8), randn(2, 3, seed=1), mse_loss), (8, 1, 1))
