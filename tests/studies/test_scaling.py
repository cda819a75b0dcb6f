"""Tests of the scaling study: its points, a job, the comparison of losses, tables and figures."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from pydist import ShardedTensor, layout_for_sample, parallelize
from pydist.cli import main as cli
from pydist.cli.jobs import module_command, on_pack
from pydist.comm import Transport, run_local
from pydist.data import ShardDataset, UniverseOptions, generate_universes
from pydist.hardware import Interconnect, load_hardware
from pydist.mesh import Mesh
from pydist.partition import Box
from pydist.plan import Estimate
from pydist.studies import scaling_job
from pydist.studies import scaling_report as report
from pydist.studies.awaited import without_overlap
from pydist.studies.file_rates import (
    NODES,
    SIZES,
    file_rates,
    file_rates_table,
    published_files_table,
)
from pydist.studies.modeled import PaperPoint, modeled, paper_points, series_estimates
from pydist.studies.options import ScalingOptions
from pydist.studies.runs import OUTPUT_FILE, finished, run_all
from pydist.studies.scaling import (
    CHECK,
    COSMOFLOW,
    KEPT,
    PACKS,
    STORE,
    STRONG,
    UNET,
    WEAK_BATCH,
    WEAK_SAMPLE,
    WHOLE,
    Measured,
    Scaling,
    cuts_for,
    loss_difference,
    loss_differences,
    scaling_efficiency,
)
from pydist.studies.scaling_job import KeptBlocks, main

OPTIONS = ScalingOptions(width=32, edge=16, features=2, batch=1, steps=2, warmup=2)


def made(folder, ranks: int) -> Scaling:
    return Scaling(folder, OPTIONS, ranks)


def test_the_series(tmp_path):
    study = made(tmp_path, 8)
    points = study.points()
    assert [cuts_for(n) for n in (1, 2, 4, 8, 64)] == [
        (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 4, 4),
    ]  # fmt: skip
    cosmoflow = [p for p in points if p.network == COSMOFLOW]
    usual = [p for p in cosmoflow if p.overlap and p.source == "split files"]
    found = [(p.series, p.ranks, p.extents[0], p.batch) for p in usual if p.series != CHECK]
    assert found == [
        (STRONG, 1, 32, 1), (STRONG, 2, 32, 1), (STRONG, 4, 32, 1), (STRONG, 8, 32, 1),
        (WEAK_BATCH, 2, 32, 2), (WEAK_BATCH, 4, 32, 4), (WEAK_BATCH, 8, 32, 8),
        (WEAK_SAMPLE, 8, 64, 1),
    ]  # fmt: skip
    others = [(p.ranks, p.overlap, p.source) for p in cosmoflow if p not in usual]
    assert others == [
        (8, False, "split files"),
        (8, True, WHOLE),
        (8, True, PACKS),
        (8, True, STORE),
        (8, True, KEPT),
    ]
    larger = [p.extents for p in points if p.network == UNET and p.series == WEAK_SAMPLE]
    assert larger == [(32, 16, 16), (32, 32, 16), (32, 32, 32)]
    assert all(math.prod(p.extents) == p.ranks * 16**3 for p in points if p.network == UNET
               and p.series == WEAK_SAMPLE)  # fmt: skip
    for point in points:  # a check precedes what it is compared with
        if point.series in (WEAK_BATCH, WEAK_SAMPLE):
            assert points.index(point.alone) < points.index(point)
    assert len({p.name for p in points}) == len(points)
    assert made(tmp_path, 1).counts == [1]
    assert len(made(tmp_path, 1).points()) == 9  # both networks, with their sources


@pytest.mark.parametrize("network", [COSMOFLOW, UNET])
def test_all_steps_have_the_samples_that_rates_count(tmp_path, network):
    """Also the batch of 12 on 4 ranks, and the last step of an epoch."""
    options = ScalingOptions((network,), width=32, edge=8, features=2, batch=3)
    study = Scaling(tmp_path, options, 4)
    points = [p for p in study.points() if p.series in (STRONG, WEAK_BATCH, CHECK)]
    study.make_data()
    for point in points:
        count = len(ShardDataset(study.data(point), "train", normalize="none"))
        assert count % point.batch == 0, point.name
    assert max(p.batch for p in points) == 12


def test_efficiency_counts_the_work():
    strong, weak = (next(p for p in made(None, 2).points() if p.series == s and p.ranks == 2)
                    for s in (STRONG, WEAK_BATCH))  # fmt: skip
    assert scaling_efficiency(strong, 0.5, 1.0) == 1.0
    assert scaling_efficiency(weak, 1.25, 1.0) == 0.8


def test_losses_are_compared_with_those_of_one_rank(tmp_path):
    points = [p for p in made(tmp_path, 2).points() if p.network == UNET]
    found = [Measured(p, [1.0], {}, [2.0, 1.0]) for p in points]
    assert set(loss_differences(found).values()) == {0.0}
    assert CHECK not in {p.series for p in loss_differences(found)}
    assert loss_difference([2.0, 1.1], [2.0, 1.0, 5.0]) == pytest.approx(0.05)
    strong = next(i for i, p in enumerate(points) if p.series == STRONG and p.ranks == 2)
    found[strong] = Measured(points[strong], [1.0], {}, [2.0, float("nan")])
    results = report.ScalingResults(found, {}, load_hardware("cpu"), [])
    assert report.unequal(results) == [points[strong].name]
    unchecked = [each for each in found if each.point.series != CHECK]
    assert None in loss_differences(unchecked).values()


def test_the_model_is_asked_for_the_point(tmp_path):
    hardware = load_hardware("v100")
    study = Scaling(tmp_path, ScalingOptions(("cosmoflow",), width=32, batch=2), 1)
    found = series_estimates(study, 4, hardware)
    assert [p.series for p in found].count(STRONG) == 3
    strong = {p.ranks: e for p, e in found.items() if p.series == STRONG}
    assert strong[1].batch == 2
    assert strong[1].seconds["halo"] == 0 < strong[2].seconds["halo"]
    assert str(strong[4].grid) == "depth 2 × height 2"
    point = next(p for p in found if p.series == WEAK_BATCH and p.ranks == 4)
    assert modeled(point, study.options, hardware).step == found[point].step


def test_the_papers_experiments_begin_where_a_sample_fits(monkeypatch):
    monkeypatch.setattr("pydist.studies.modeled.EXPERIMENTS", ((COSMOFLOW, 512),))
    monkeypatch.setattr("pydist.studies.modeled.MOST_GPUS", 8)
    hardware = load_hardware("v100")
    found = list(paper_points(hardware))
    first = {
        series: next(p for p in found if p.series == series) for series in (STRONG, WEAK_BATCH)
    }
    assert {p.efficiency for p in first.values()} == {1.0}
    assert first[WEAK_BATCH].gpus > 1  # 512³ fits no V100
    assert all(p.estimate.peak <= hardware.memory for p in found)
    assert all(0 < p.efficiency <= 1.01 for p in found)
    assert {p.estimate.batch for p in found if p.series == STRONG} == {64}
    assert found[-1].gpus == 8
    assert found[-1].estimate.batch == 8 // first[WEAK_BATCH].gpus


def test_the_rates_of_files():
    """One node reads what its ranks read; many are limited by the slower of link and server."""
    hardware = load_hardware("cpu")
    found = {(r.size, r.nodes): r for r in file_rates(hardware)}
    assert len(found) == len(SIZES) * len(NODES)
    for size in SIZES.values():
        alone = hardware.ranks_per_node * hardware.reading / size
        assert found[size, 1].files_per_second == pytest.approx(alone)
        rates = [found[size, nodes].files_per_second for nodes in NODES]
        assert rates == sorted(rates)
        own = found[size, 512].files_per_second / 512
        assert own * size < hardware.between.bandwidth * 512 / 511 + 1
        assert found[size, 512].efficiency == pytest.approx(own / alone)
    slow = replace(hardware, between=Interconnect(1.0, 1e9))
    assert file_rates(slow)[1].files_per_second == pytest.approx(16 * 2 / (15 / 16 * 2.0), rel=0.01)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Returns a study on one rank; jobs ran in this process, but for that on a pack."""
    study = Scaling(tmp_path_factory.mktemp("scaling"), OPTIONS, 1)
    study.make_data()
    points = [p for p in study.points() if p.network == COSMOFLOW or p.source == "split files"]
    for point in points:
        run = study.run(point)

        def command(run, point=point):
            arguments = study.arguments(point)
            if (pack := study.packed(point)) is not None:
                job = module_command(run, "auto", scaling_job.__name__, arguments)
                return on_pack(job, pack, study.mount(point))
            main([str(run.settings), *arguments])
            return ["true"]

        (outcome,) = run_all([run], 1, command, lambda *_: None)
        assert outcome.status == "done", (run.folder / OUTPUT_FILE).read_text()
    return study, [study.measured(point) for point in points]


def test_all_sources_give_equal_losses(ran):
    study, found = ran
    assert {each.point.source for each in found} == {"split files", WHOLE, PACKS, STORE, KEPT}
    assert all(len(each.seconds) == 2 and len(each.losses) == 4 for each in found)
    assert max(v for v in loss_differences(found).values() if v is not None) < 1e-5
    assert all(each.parts["compute"] > 0 for each in found)
    assert all(finished(study.run(each.point)) is not None for each in found)


def test_results_are_shown(ran):
    study, measured = ran
    estimates = series_estimates(study, 2, load_hardware("cpu"))
    paper = [PaperPoint(COSMOFLOW, 128, s, next(iter(estimates.values())), 1.0)
             for s in (STRONG, WEAK_BATCH)]  # fmt: skip
    hardware = load_hardware("cpu")
    results = report.ScalingResults(measured, estimates, hardware, paper, file_rates(hardware))
    head, *lines = report.measured_table(results).splitlines()
    assert head.split()[:5] == ["measured", "series", "mesh", "voxels", "batch"]
    assert len(lines) == len(measured)
    assert all("100%" in line for line in lines if "strong" in line and "split files" in line)
    head, *lines = report.modeled_table(results).splitlines()
    assert head.startswith("modeled")
    assert len(lines) == len(estimates)
    assert len(report.paper_table(paper).splitlines()) == 3
    assert "105,800" in report.published_table()
    assert len(file_rates_table(results.files, "cpu").splitlines()) == 1 + len(results.files)
    assert "15,100" in published_files_table()
    record = json.loads(json.dumps(report.scaling_record(study, results)))
    assert {"measured", "modeled", "paper", "published", "files"} < record.keys()
    assert record["measured"][0]["mesh"] == dict.fromkeys(record["measured"][0]["mesh"], 1)
    pytest.importorskip("matplotlib")
    assert report.draw_scaling(study, results).read_bytes().startswith(b"\x89PNG")
    assert isinstance(next(iter(estimates.values())), Estimate)


def test_kept_blocks_are_those_of_the_files(tmp_path):
    generate_universes(tmp_path, UniverseOptions(count=1, width=8, validation=0))
    plain, kept = ShardDataset(tmp_path, normalize="log1p"), KeptBlocks(tmp_path, "train", "log1p")
    box = Box([0, 2, 0, 0], [4, 6, 8, 8])
    for _ in range(2):
        for index in (0, 3):
            assert kept.read_block(index, box).equal(plain.read_block(index, box))
            out, expected = (torch.empty(4, 4, 8, 8, dtype=plain.stored_dtype) for _ in range(2))
            kept.read_stored(index, box, out)
            plain.read_stored(index, box, expected)
            assert out.equal(expected)
    read = kept.bytes_read
    assert kept.read_block(3, box, torch.empty(4, 4, 8, 8)).equal(plain.read_block(3, box))
    assert kept.bytes_read == read


def test_without_overlap_messages_have_arrived_and_results_are_equal():
    whole = torch.randn(
        1, 1, 8, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    before = {name: getattr(Transport, name) for name in ("channel", "all_reduce_async")}
    made = torch.nn.Conv3d(1, 2, 3, padding=1).double()  # not by the ranks, which share a generator

    def step(world):
        mesh = Mesh(world, 1, (2, 1, 1))
        model = parallelize(copy.deepcopy(made), mesh)
        layout = layout_for_sample(mesh, tuple(whole.shape))
        lo, hi = layout.box.lo, layout.box.hi
        block = whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))].contiguous()
        model(ShardedTensor.from_local(block, layout)).square().mean().backward()
        return model.weight.grad.clone()

    plain = run_local(step, 2)
    with without_overlap():
        assert Transport.channel is not before["channel"]
        awaited = run_local(step, 2)
    assert all(a.equal(b) for a, b in zip(plain, awaited, strict=True))
    assert {name: getattr(Transport, name) for name in before} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "3"], "-n 3: powers of two are possible"),
        (["-n", "4096"], "-n 4096: this machine has cores for"),
        (["--modeled", "12"], "--modeled 12: powers of two"),
        (["--edge", "12"], "edge = 12: multiples of 8"),
        (["--steps", "0"], "steps = 0: at least 1"),
        (["--networks", "unet3d", "unet3d"], "each once"),
        (["--hardware", "k80"], "hardware 'k80': possible are auto, cpu, v100"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(arguments, message, tmp_path, capsys):
    assert cli.main(["bench", "scaling", "--folder", str(tmp_path / "s"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "s").exists()
