"""Tests of the mesh: positions of ranks and groups, and refusals of impossible meshes."""

from __future__ import annotations

import copy
import itertools
import re

import numpy as np
import pytest
import torch

from pydist import Mesh, run_local
from pydist.comm import LocalTransport
from pydist.errors import UsageError, exit_code_of
from pydist.grid import AXES
from pydist.stages import Stages


def on_world(size, body):
    return run_local(body, size)


def test_ranks_count_row_by_row_width_fastest():
    meshes = on_world(12, lambda t: (t.rank, Mesh(t, 2, (3, 1, 2)).coords))
    expected = itertools.product(range(2), range(1), range(3), range(1), range(2))
    for (rank, coords), place in zip(meshes, expected, strict=True):
        assert coords == dict(zip(AXES, place, strict=True)), rank


def test_what_the_mesh_says_of_itself():
    def body(world):
        mesh = Mesh(world, 2, (3, 1, 2))
        assert mesh.grid.shape == (2, 1, 3, 1, 2)
        assert mesh.spatial == (3, 1, 2)
        assert (mesh.size, mesh.data_size, mesh.sample_size) == (12, 2, 6)
        assert (mesh.rank, mesh.data_index, mesh.sample_index) == (
            world.rank, world.rank // 6, world.rank % 6,
        )  # fmt: skip
        assert mesh.sample.size == 6
        assert mesh.sample.rank == mesh.sample_index
        assert mesh.data.size == 2
        assert mesh.data.rank == mesh.data_index
        assert "data 2 × depth 3 × width 2" in repr(mesh)

    on_world(12, body)


@pytest.mark.parametrize(
    "axes", [c for n in range(6) for c in itertools.combinations(AXES, n)], ids="-".join
)
def test_a_group_holds_the_ranks_that_differ_along_its_axes(axes):
    def body(world):
        mesh = Mesh(world, 2, (1, 1, 2), axes={"channel": 2})
        members = mesh.group(axes).all_gather(torch.tensor([mesh.rank])).flatten().tolist()
        return mesh.coords, members

    everyone = on_world(8, body)
    for coords, members in everyone:
        assert members == [
            rank
            for rank, (other, _) in enumerate(everyone)
            if all(other[a] == coords[a] for a in AXES if a not in axes)
        ]


def test_axes_of_a_group_may_come_in_any_order():
    def body(world):
        mesh = Mesh(world, 1, (2, 1, 2))
        assert mesh.group(("width", "depth")) is mesh.group(("depth", "width")) is mesh.sample

    on_world(4, body)


def test_copies_of_what_holds_a_mesh_have_the_same_one():
    class Holds(torch.nn.Linear):
        def __init__(self, mesh):
            super().__init__(2, 2)
            self.mesh = mesh

    def body(world):
        model = Holds(Mesh(world, 2))
        assert copy.deepcopy(model).mesh is model.mesh
        assert torch.optim.swa_utils.AveragedModel(model).module.mesh is model.mesh
        assert copy.deepcopy(stages := Stages(world, [{}, {}])) is stages

    on_world(2, body)


def test_data_fills_the_world_by_default():
    assert on_world(6, lambda t: Mesh(t, spatial=(1, 3, 1)).data_size)[0] == 2
    assert on_world(12, lambda t: Mesh(t, spatial=(1, 3, 1), axes={"channel": 2}).data_size)[0] == 2


DO_NOT_FIT = {
    "too few ranks": (2, None, (2, 2, 1), ["2×2×1 needs 4 ranks a sample", "2 ranks were started"]),
    "no multiple": (6, None, (2, 2, 1), ["2×2×1 needs 4", "6 ranks", "1 or 2 or 3 or 6"]),
    "data given, too few": (4, 3, (2, 1, 1), ["data=3", "6 ranks in all", "4 were", "start 6"]),
    "data given, too many": (8, 2, (2, 1, 1), ["data=2", "4 ranks in all", "8 were started"]),
    "zero": (2, None, (0, 1, 1), [r"spatial=\(0, 1, 1\)", ">= 1"]),
    "two counts": (2, None, (2, 1), [r"spatial=\(2, 1\)", "three counts"]),
    "negative data": (2, -1, (2, 1, 1), ["data=-1"]),
    "data zero": (2, 0, (2, 1, 1), ["data=0"]),
    "one count": (2, None, 2, ["spatial=2: expected three counts"]),
    "a text": (2, None, "211", ["spatial='211': expected three counts"]),
    "data a text": (2, "1", (2, 1, 1), ["data='1': expected a whole number"]),
    "a truth": (1, None, (True, 1, 1), [r"spatial=\(True, 1, 1\): expected three counts"]),
    "a true data": (1, True, (1, 1, 1), ["data=True: expected a whole number"]),
    "half a group": (2, 0.5, (2, 1, 1), ["data=0.5: expected a whole number"]),
}  # fmt: skip


def test_counts_may_be_of_any_integer_type():
    counts = (np.int64(2), np.uint8(1), torch.tensor(1))
    found = on_world(4, lambda t: Mesh(t, np.int32(2), counts, seed=np.int64(3)))[0]
    assert (found.data_size, found.sample_size, found.seed) == (2, 2, 3)


def test_what_is_no_transport_or_seed_is_named():
    with pytest.raises(UsageError, match=r"Mesh\(NoneType\): expected the transport"):
        Mesh(None)
    with pytest.raises(UsageError, match="seed='a': expected a whole number"):
        Mesh(LocalTransport(), seed="a")


@pytest.mark.parametrize(("ranks", "data", "spatial", "named"), DO_NOT_FIT.values(), ids=DO_NOT_FIT)
def test_a_mesh_that_does_not_fit_the_world_names_both(ranks, data, spatial, named):
    def body(world):
        with pytest.raises(UsageError) as caught:
            Mesh(world, data, spatial)
        return caught.value

    for error in on_world(ranks, body):
        assert exit_code_of(error) == 2
        assert "\n" not in str(error)
        for text in named:
            assert re.search(text, str(error)), error


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"chanel": 2}, ["'chanel'", "of channel"]),
        ({"channel": 0}, [">= 1"]),
        ({"channel": 2.5}, ["channel=2.5: expected a count >= 1"]),
        ({"channel": "2"}, ["channel='2': expected a count"]),
        ({"channel": 2.0}, ["channel=2.0: expected a count"]),
        ({"channel": None}, ["channel=None: expected a count"]),
        ({"channel": True}, ["channel=True: expected a count"]),
        ("channel", ["axes='channel'", "expected counts of channel"]),
        ({"data": 2}, ["data and spatial are arguments"]),
        ({"channel": 3}, ["channel 3", "needs 6 ranks a sample", "4 ranks were started"]),
    ],
)
def test_an_axis_that_does_not_fit_is_named(axes, named):
    def body(world):
        with pytest.raises(UsageError) as caught:
            Mesh(world, spatial=(2, 1, 1), axes=axes)
        return str(caught.value)

    for error in on_world(4, body):
        for text in named:
            assert text in error


def test_groups_are_made_for_the_axes_that_are_used():
    """Each group costs memory on a device."""

    def body(world):
        mesh = Mesh(world, 2, (2, 2, 2))
        first = set(mesh.groups)
        mesh.group(("height", "depth"))
        mesh.group(("data", "width"))
        mesh.group(("depth", "height"))
        return first, set(mesh.groups), len(mesh.transports)

    sample = ("depth", "height", "width")
    always = {("data", *sample), sample, ("data",)}
    asked = {("depth", "height"), ("data", "width")}
    assert on_world(16, body) == [(always, always | asked, 5)] * 16


def test_sample_groups_make_groups_of_their_own_ranks_at_their_own_time():
    def body(world):
        mesh = Mesh(world, 2, (2, 2, 1))
        if mesh.data_index:
            for axis in ("height", "depth"):
                mesh.group((axis,))
        mesh.sample.barrier()
        members = [
            mesh.group((axis,)).all_gather_bytes(b"%d" % mesh.rank) for axis in ("depth", "height")
        ]
        return [[int(each) for each in group] for group in members]

    found = on_world(8, body)
    assert found[0] == [[0, 2], [0, 1]]
    assert found[7] == [[5, 7], [6, 7]]
