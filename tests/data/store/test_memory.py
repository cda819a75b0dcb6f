"""Tests of the sample store: the batches of reading files, from one copy in memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pydist.comm import Transport, run_local
from pydist.data import BadSample, Batch, Loader, PassRule
from pydist.errors import PydistError, UsageError
from pydist.mesh import Mesh
from pydist.partition import Box
from support.data.stored import Stored, seen

MESHES = [
    (1, (1, 1, 1), 1), (2, (1, 1, 1), 1), (3, (1, 1, 1), 1), (4, (1, 1, 1), 1), (2, (2, 1, 1), 1),
    (1, (1, 2, 2), 1), (2, (1, 1, 1), 2), (2, (2, 1, 1), 2), (2, (1, 3, 1), 1), (1, (6, 1, 1), 1),
]  # fmt: skip
"""Sample groups, parts along depth, height and width (some are empty), and channel."""


@dataclass(frozen=True)
class Run:
    """A data set, a mesh, and options of loaders."""

    samples: int
    batch: int
    mesh: tuple[int, tuple[int, int, int], int] = (2, (2, 1, 1), 1)
    labeled: bool = False
    mixed: bool = False
    training: bool = True
    budget: int | None = None
    prefetch: int = 2
    pad: bool = False
    drop_last: bool = False
    passes: int = 1
    shares: tuple[float, ...] | None = None
    bad: tuple[int, ...] = ()
    poor: tuple[int, ...] = ()
    on_bad_sample: str = "stop"

    @property
    def ranks(self) -> int:
        data, spatial, channel = self.mesh
        return data * math.prod(spatial) * channel

    def mesh_on(self, transport: Transport) -> Mesh:
        data, spatial, channel = self.mesh
        shares = {"data": self.shares} if self.shares else {}
        return Mesh(transport, data, spatial, 5, axes={"channel": channel}, shares=shares)

    def source(self) -> Stored:
        return Stored(
            self.samples,
            labeled=self.labeled,
            mixed=self.mixed,
            bad=self.bad,
            poor=self.poor,
        )

    def loader(self, source: Any, mesh: Mesh, store: str = "memory", **more: Any) -> Loader:
        options = {
            "training": self.training, "prefetch": self.prefetch, "pad": self.pad,
            "drop_last": self.drop_last, "on_bad_sample": self.on_bad_sample,
            "passes": PassRule(self.batch, self.passes), "store": store,
            "store_memory": self.budget if store == "memory" else None,
        }  # fmt: skip
        return Loader(source, mesh, self.batch, **options | more)


Seen = tuple[Any, ...]


def epochs_of(loader: Loader, count: int, training: bool = True) -> list[list[Seen]]:
    if training:
        return [[seen(batch) for batch in loader] for _ in range(count)]
    return [[seen(batch) for batch in loader.batches(0)] for _ in range(count)]


def on_ranks(run: Run, job: Callable[..., Any]) -> list[Any]:
    return run_local(job, run.ranks, timeout=60)


def both_ways(run: Run) -> list[tuple[Loader, Stored, Mesh]]:
    """Compares batches with those of files on all ranks; returns the loaders with a store."""

    def job(transport: Transport) -> tuple[Loader, Stored, Mesh]:
        mesh, source = run.mesh_on(transport), run.source()
        with run.loader(run.source(), mesh, "off") as loader:
            expected = epochs_of(loader, 3, run.training)
        with run.loader(source, mesh) as loader:
            assert loader.store is not None
            found = epochs_of(loader, 3, run.training)
            kept = dict(loader.store.entries)
        loader.store.entries.update(kept)  # for the checks, as `close` has dropped them
        assert found == expected
        return loader, source, mesh

    return on_ranks(run, job)


def parts_of(found: Sequence[tuple[Loader, Stored, Mesh]]) -> dict[tuple[int, ...], list[int]]:
    """Returns the samples that are held of each part of a sample, by the ranks together."""
    held: dict[tuple[int, ...], list[int]] = {}
    for loader, _, mesh in found:
        part = tuple(mesh.coords[axis] for axis in ("depth", "height", "width"))
        assert loader.store is not None
        held.setdefault(part, []).extend(loader.store.entries)
    return held


@st.composite
def runs(draw: st.DrawFn) -> Run:
    mesh = draw(st.sampled_from(MESHES))
    mixed = draw(st.booleans())
    training = draw(st.booleans())
    passes = draw(st.integers(1, 2)) if training else 1
    # Samples of different shapes can't be in one batch of a group.
    least = mesh[0] * passes
    batch = least if mixed else draw(st.integers(least, least + 4))
    return Run(
        samples=draw(st.integers(batch, 13)) if batch < 13 else batch,
        batch=batch,
        mesh=mesh,
        labeled=draw(st.booleans()),
        mixed=mixed,
        training=training,
        budget=draw(st.sampled_from([None, None, 1, 300, 1000, 2500])),
        prefetch=draw(st.integers(1, 4)),
        pad=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        passes=passes,
    )


@given(runs())
def test_batches_are_those_of_files(run: Run) -> None:
    found = both_ways(run)
    for loader, _, _ in found:
        assert loader.store is not None
        if run.budget is not None:
            assert loader.store.held_bytes <= run.budget
    if run.training or run.mesh[0] == 1:
        for samples in parts_of(found).values():
            assert max(Counter(samples).values(), default=1) == 1, "held by one rank only"


@pytest.mark.parametrize("labeled", [False, True])
@pytest.mark.parametrize("mesh", MESHES)
def test_each_block_is_read_once_and_held_by_one_rank(
    mesh: tuple[int, tuple[int, int, int], int], labeled: bool
) -> None:
    """The last batches of the 11 samples are short."""
    run = Run(11, 4, mesh, labeled=labeled)
    found = both_ways(run)
    for samples in parts_of(found).values():
        assert sorted(samples) == list(range(11))
    data, spatial, channel = mesh
    reads = sum((source.reads for _, source, _ in found), Counter())
    assert set(reads.values()) == {math.prod(spatial) * channel}
    blocks = 3 * 11 * math.prod(spatial) * channel
    figures = [loader.store.counted() for loader, _, _ in found if loader.store]
    assert sum(each.blocks for each in figures) == blocks
    assert sum(each.file_blocks for each in figures) == blocks // 3
    assert (sum(each.received_bytes for each in figures) > 0) == (data * channel > 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mesh", [(2, (2, 1, 1), 1), (2, (1, 1, 1), 2), (4, (1, 1, 1), 1)])
def test_memory_is_the_data_set_and_two_buffers(
    mesh: tuple[int, tuple[int, int, int], int], training: bool
) -> None:
    """An entry has 8 bytes of targets and a mark, in steps of 64 bytes."""
    run = Run(12, 4, mesh, training=training)
    found = both_ways(run)
    stores = [loader.store for loader, _, _ in found if loader.store]
    depths = [5] if mesh[1] == (1, 1, 1) else [3, 2]
    blocks = {depth: 2 * depth * 3 * 4 * 2 for depth in depths}
    held = sum(store.held_bytes for store in stores)
    assert sum(blocks.values()) * 12 <= held <= sum(12 * (each + 128) for each in blocks.values())
    for store in stores:
        buffers = [store._buffers.get_nowait() for _ in range(2)]
        assert store._buffers.empty()
        of_a_batch = 4 // mesh[0] * (max(blocks.values()) + 128)
        assert all(buffer.nbytes <= of_a_batch for buffer in buffers)


def test_stored_values_are_kept_where_they_are_smaller() -> None:
    """Counts of int16 stay such, inputs that no smaller type is known of are kept as they are."""

    def job(transport: Transport) -> tuple[torch.dtype, ...]:
        class Wide(Stored):
            stored_dtype = torch.int64

        class Narrow(Stored):
            label_dtype = torch.uint8

        mesh, found = Mesh(transport), []
        for source in (Stored(3, labeled=True), Wide(3), Narrow(3, labeled=True)):
            with Loader(source, mesh, 1, store="memory") as loader:
                assert loader.store is not None
                entry = loader.store.form.of(0)
                found += [entry.dtype, entry.targets_dtype]
        return tuple(found)

    assert run_local(job, 1) == [
        (torch.int16, torch.int64, torch.float32, torch.float32, torch.int16, torch.uint8)
    ]


def test_a_budget_leaves_the_rest_in_files() -> None:
    """A fixed part stays in memory, and each rank has its own budget."""
    run = Run(12, 4, (2, (1, 1, 1), 1))

    def job(transport: Transport) -> tuple[list[float], list[int], int]:
        mesh, source = run.mesh_on(transport), run.source()
        with run.loader(source, mesh, "off") as loader:
            expected = epochs_of(loader, 4)
        size = 320  # of an entry: 2 x 5 x 3 x 4 int16, and 8 bytes, in steps of 64
        with run.loader(source, mesh, store_memory=(2 + transport.rank) * size) as loader:
            assert loader.store is not None
            rates, held = [], []
            for epoch in range(4):
                assert epochs_of(loader, 1) == expected[epoch : epoch + 1]
                figures = loader.store.counted().over(transport)
                rates.append(figures.hit_rate)
                held.append(sorted(loader.store.entries))
                assert figures.file_blocks == 12 - 5 * (epoch > 0)
                assert figures.file_bytes == figures.file_blocks * 240
            assert held[0] == held[-1]
        return rates, held[0], sum(loader.store.directory.held[transport.rank])

    (rates, first, _), (_, second, _) = on_ranks(run, job)
    assert rates == pytest.approx([0, 5 / 12, 5 / 12, 5 / 12])
    assert (len(first), len(second)) == (2, 3)


def test_resume_amid_an_epoch_starts_cold() -> None:
    run = Run(11, 4)

    def job(transport: Transport) -> None:
        mesh = run.mesh_on(transport)
        with run.loader(run.source(), mesh, "off") as loader:
            expected = [each for epoch in epochs_of(loader, 3) for each in epoch]
        with run.loader(run.source(), mesh) as loader:
            batches: Iterator[Batch] = iter(loader)
            found = [seen(next(batches)) for _ in range(2)]
            state = loader.state_dict()
        source = run.source()
        with run.loader(source, mesh) as loader:
            loader.load_state_dict(state)
            found += [each for epoch in epochs_of(loader, 3) for each in epoch]
            assert found[: len(expected)] == expected
            assert max(source.reads.values()) == 1
            loader.load_state_dict(state)  # once more, warm
            assert [seen(batch) for batch in loader] == expected[2:3]
        assert max(source.reads.values()) == 1

    on_ranks(run, job)


def test_a_change_of_the_batch_forgets_what_was_ordered() -> None:
    run = Run(11, 4, prefetch=3)

    def job(transport: Transport) -> None:
        mesh = run.mesh_on(transport)

        def changing(store: str) -> tuple[list[Seen], Loader]:
            found = []
            with run.loader(run.source(), mesh, store) as loader:
                for step, batch in enumerate(batch for _ in range(4) for batch in loader):
                    found.append(seen(batch))
                    if step in (0, 4):
                        loader.change_batch(5 + step)
                kept = {} if loader.store is None else dict(loader.store.entries)
            if loader.store is not None:
                loader.store.entries.update(kept)
            return found, loader

        expected, _ = changing("off")
        found, loader = changing("memory")
        assert found == expected
        return loader, None, mesh

    for samples in parts_of(on_ranks(run, job)).values():
        assert sorted(samples) == list(range(11))


def test_unequal_shares_of_the_groups() -> None:
    both_ways(Run(13, 6, (2, (2, 1, 1), 1), shares=(2.0, 1.0)))


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bad", "poor"])
@pytest.mark.parametrize("training", [True, False])
def test_skipped_samples_are_those_of_files(kind: str, training: bool) -> None:
    both_ways(
        replace(Run(110, 8, on_bad_sample="skip", training=training), **{kind: (17,)})  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kind", ["bad", "poor"])
def test_a_bad_sample_ends_all_ranks_with_the_error_of_files(kind: str) -> None:
    run = replace(Run(12, 4), **{kind: (7,)})  # type: ignore[arg-type]
    messages = []
    for store in ("off", "memory"):

        def job(transport: Transport, store: str = store) -> None:
            mesh = run.mesh_on(transport)
            with run.loader(run.source(), mesh, store) as loader:
                for _ in range(2):
                    for _ in loader:
                        transport.barrier()

        with pytest.raises(BadSample) as caught:
            on_ranks(run, job)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "sample 7" in messages[0]


def test_a_failed_rank_releases_those_that_wait_for_its_blocks() -> None:
    run = Run(12, 4)

    def job(transport: Transport) -> None:
        with run.loader(run.source(), run.mesh_on(transport)) as loader:
            for epoch in range(3):
                for batch in loader:
                    if transport.rank == 1 and (epoch, batch.step) == (1, 1):
                        raise PydistError("out of luck")

    with pytest.raises(PydistError, match="out of luck"):
        on_ranks(run, job)


def test_a_failed_read_is_raised_at_its_batch_though_other_ranks_wait_for_the_block() -> None:
    """They get an entry without approval, and would read the file. 3 samples, 4 batches ahead."""

    class Broken(Stored):
        broken = -1

        def target(self, index: int) -> Tensor:
            if index == self.broken:
                raise OSError("the disk is gone")
            return super().target(index)

    def job(transport: Transport) -> None:
        mesh, source = Mesh(transport, 2, seed=5), Broken(3)
        with Loader(source, mesh, 2, prefetch=4, store="memory") as loader:
            if transport.rank == 0:
                source.broken = loader.sampler.batch(0, 1).indices[0]
            taken = []
            try:
                for _ in range(3):
                    for batch in loader:
                        taken.append(batch.indices)
            except OSError:
                assert len(taken) == 1
                raise

    with pytest.raises(OSError, match="the disk is gone"):
        run_local(job, 2, timeout=30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "disk"}, "store = 'disk': possible are off, memory"),
        ({"store_memory": "4GB"}, "store_memory = '4GB' with store = 'off': possible with"),
        ({"store": "memory", "store_memory": "4 apples"}, 'a size is expected, such as "4GB"'),
        ({"store": "memory", "store_memory": "0.1B"}, "a size is at least one byte"),
        ({"store": "memory", "store_memory": 0}, "store_memory = 0: a number of bytes >= 1"),
        ({"store": "memory", "store_memory": 1.5}, "store_memory = 1.5: a number of bytes >= 1"),
        ({"store_disk": "4GB"}, "store_disk = '4GB' with store = 'off'"),
        ({"store": "memory", "store_disk": "4GB"}, "store_disk = '4GB' without store_folder"),
        ({"store": "memory", "store_folder": "/x"}, "store_folder = '/x' without store_disk"),
        ({"store": "memory", "store_reuse": True}, "store_reuse = True without store_disk"),
        ({"store": "memory", "store_codec": "zstd"}, "store_codec = 'zstd' without store_disk"),
        ({"store": "memory", "store_codec": "gzip"}, "'gzip': possible are raw, zstd, lz4, blosc"),
        (
            {"store": "memory", "store_disk": "4GB", "store_folder": "/x"},
            "store_disk = '4GB' without store_memory: all blocks would stay in memory",
        ),
        (
            {"store": "memory", "store_disk": "4 apples", "store_folder": "/x"},
            "store_disk = '4 apples': a size is expected",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    def job(transport: Transport) -> None:
        with pytest.raises(UsageError) as caught:
            Loader(Stored(3), Mesh(transport), 1, **options)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    run_local(job, 1)


def test_ranks_with_different_settings_are_told() -> None:
    def job(transport: Transport) -> None:
        store = ("off", "memory")[transport.rank]
        with pytest.raises(UsageError, match="store differs between the ranks: off on rank 0, mem"):
            Loader(Stored(3), Mesh(transport), 2, store=store)

    run_local(job, 2)


def test_ranks_that_would_keep_different_types_are_told() -> None:
    """Messages have the bytes of what is kept, so the types must be equal."""

    class Narrow(Stored):
        label_dtype = torch.uint8

    def job(transport: Transport) -> None:
        source = (Stored, Narrow)[transport.rank](3, labeled=True)
        with pytest.raises(
            UsageError, match=r"labels torch.int64 on rank 0, .*torch.uint8 on rank 1"
        ):
            Loader(source, Mesh(transport), 2, store="memory")

    run_local(job, 2)


def test_sources_without_stored_values() -> None:
    """Their inputs are kept, also those that are no memory of the loader."""

    class Plain:
        sample_shape, num_targets, labeled = (1, 4, 2, 2), 1, False
        dtype, identity = torch.float64, "plain"

        def __len__(self) -> int:
            return 7

        def shape_of(self, index: int) -> tuple[int, int, int, int]:
            return self.sample_shape

        def read_block(self, index: int, box: Box, out: Tensor) -> Tensor:
            return torch.full(out.shape, float(index), dtype=torch.float64)

        def target(self, index: int) -> Tensor:
            return torch.tensor([float(index)], dtype=torch.float64)

    def job(transport: Transport) -> None:
        with Loader(Plain(), Mesh(transport), 3, pad=False, store="memory") as loader:
            assert loader.store is not None
            for epoch in range(3):
                for batch in loader:
                    for n, index in enumerate(batch.indices):
                        assert bool((batch.inputs.to_local()[n] == index).all())
                        assert batch.targets[n].tolist() == [index]
                figures = loader.store.counted().over(transport)
                assert figures.file_blocks == (0 if epoch else 7)
                assert figures.held_bytes == 7 * (128 + 64)

    run_local(job, 3)
