"""Tests that scripts of benchmarks/python run at a tiny size and write complete JSON.

The scripts themselves refuse contestants whose results differ. Times of a test run mean nothing.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from pydist.hardware import CPU
from pydist.launch.backends import available
from support.jobs.benchmarks import check_times, run

pytestmark = pytest.mark.skipif(
    available()[0].name == "gloo", reason="the benchmarks compare with MPI, and there is none"
)


def test_conv_stack(tmp_path):
    """Covers one contestant of each kind; the package need not be installed."""
    by_hand, package = "handwritten, gloo + malloc + oneDNN", "physicsnemo ShardTensor + malloc"
    bounds = ["no exchange, pydist", "no exchange, oneDNN-blocked + malloc"]
    result = run("conv_stack", tmp_path, "--only", by_hand, package, *bounds)
    rows = {row["name"]: row for row in result["rows"]}
    assert rows.keys() >= {"pydist", by_hand, *bounds}
    for row in rows.values():
        check_times(row)
        assert row["error"] < 1e-4
        assert row["over_pydist"] > 0
    assert rows["pydist"]["over_pydist"] == 1
    refused = {each["name"]: each["reason"] for each in result["not_run"]}
    assert (package in rows) != bool(refused.get(package))


def test_cosmoflow_step(tmp_path):
    result = run("cosmoflow_step", tmp_path, "--ranks", "2")
    rows = {row["name"]: row for row in result["rows"]}
    split, local, silent = (
        "pydist, 2 ranks, depth" + way
        for way in ("", ", gradients not reduced", ", nothing exchanged")
    )
    for name in ("plain torch, 2 threads", split, local, silent):
        check_times(rows[name])
        # Only contestants that exchange everything are compared.
        assert (rows[name]["error"] is None) == (name in (local, silent))
    assert rows[split]["error"] < 1e-4
    parameters = 9_437_636  # of the model; all have gradients
    kept = result["bytes_kept"]
    assert kept[silent] > kept[local] >= 4 * parameters
    (cost,) = result["costs"]
    assert cost["name"] == split
    assert cost["ratio"] == cost["gradients"] / cost["all_reduce"]
    assert cost["halo_and_statistics"] > 0


@pytest.mark.parametrize("network", ["monai", "paper"])
def test_unet_step(tmp_path, network):
    if network == "monai":
        pytest.importorskip("monai")
    result = run("unet_step", tmp_path, "--network", network)
    rows = {row["name"]: row for row in result["rows"]}
    split = "pydist, 2 ranks, depth"
    silent = split + ", nothing exchanged"
    assert rows.keys() >= {"plain torch, 2 threads", "pydist, 1 rank", split, silent}
    for row in rows.values():
        check_times(row)
        assert (row["error"] is None) == (row["name"] == silent)
    assert rows[split]["of_bound"] == rows[silent]["median"] / rows[split]["median"]


def test_halo_exchange(tmp_path):
    result = run("halo_exchange", tmp_path)
    faces = {(row["face"], row["layout"], row["bytes"]) for row in result["rows"]}
    assert faces == {
        (face, layout, nbytes)
        for face in ("depth", "height", "width")
        for layout in ("plain", "channels-last")
        for nbytes in (4096, 16384)
    }
    for row in result["rows"]:
        for way in ("pydist", "persistent", "isend", "pack", "memcpy"):
            check_times(row[way])
        best = min(row["persistent"]["median"], row["isend"]["median"])
        assert row["over_bare"] == row["pydist"]["median"] / best


def test_sample_store(tmp_path):
    result = run("sample_store", tmp_path)
    disks = ["disk raw", "disk zstd", "disk lz4"]
    feeds = ["synthetic", "store", *disks, "blocks", "whole files"]
    block = 4 * 32**3 * 2  # of 4 samples
    for what in ("input", "training"):
        rows = result[what]
        for mesh in ("2 groups", "depth in 2"):
            assert [row["feed"] for row in rows if row["mesh"] == mesh] == feeds
        for row in rows:
            check_times(row)
            assert row["waited"] >= 0
            read = {"blocks": 4 * block, "whole files": 4 * block}
            if (row["mesh"], row["feed"]) == ("depth in 2", "whole files"):
                read["whole files"] *= 2
            assert row["file_bytes"] >= read.get(row["feed"], 0)
            assert row["file_bytes"] <= 2 * read.get(row["feed"], 0)
            assert (row["disk_bytes"] > 0) == (row["feed"] in disks)
            assert (row["compression"] > 1) == (row["feed"] in disks[1:])
    for row in result["fetch"]:
        check_times(row["store"])
        check_times(row["bare"])
        assert row["over_bare"] == row["store"]["median"] / row["bare"]["median"]


def test_collectives(tmp_path):
    result = run("collectives", tmp_path)
    calls = {(row["transport"], row["call"]) for row in result["rows"]}
    transports = {transport for transport, _ in calls}
    assert transports | set(result["not_run"]) == {
        "local (threads)", "mpi (Open MPI)", "mpi (MPICH)", "c10d (gloo)"
    }  # fmt: skip
    assert len(calls) == 12 * len(transports)
    for row in result["rows"]:
        check_times(row)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory(tmp_path):
    result = run("memory", tmp_path)
    rows = {(row["name"], row["ranks"], row["malloc"]): row for row in result["rows"]}
    default, given_back = "as it comes", "given back in backward"
    one, two = rows["pydist", 1, default], rows["pydist", 2, default]
    assert rows["plain torch", 1, default]["step_mb"] > 0
    assert rows["pydist", 2, given_back]["step_mb"] > 0
    assert one["ratio"] == 1
    # The partitioned optimizer holds half of the state per rank; the rest must shrink too.
    assert 0 < two["step_mb"] < one["step_mb"]
    for row in rows.values():
        assert row["peak_mb"] == pytest.approx(row["model_mb"] + row["step_mb"])
        assert row["optimizer_mb"] <= row["step_mb"]


def test_activations(tmp_path):
    pytest.importorskip("monai")
    result = run("activations", tmp_path, "--ranks", "2")
    rows = {(row["name"], row["ranks"]): row for row in result["rows"]}
    assert rows.keys() == {("plain torch", 1), ("pydist", 1), ("pydist", 2)}
    assert rows["plain torch", 1]["peak_mb"] > 0
    # In so small a cube the unsplit gradients of the deepest weights outweigh the shards: two ranks
    # save little over one, but much over plain torch.
    assert rows["pydist", 2]["peak_mb"] < 0.6 * rows["plain torch", 1]["peak_mb"]


def test_fusions(tmp_path):
    pytest.importorskip("monai")
    rows = run("fusions", tmp_path)["rows"]
    variants = {(row["network"], row["ranks"]): set() for row in rows}
    for row in rows:
        variants[row["network"], row["ranks"]].add(row["variant"])
        assert row["step"]["median"] > 0
    assert len(variants) == 6
    assert all({"all on", "all off"} < found for found in variants.values())
    # Without a fusion the activation that it would avoid takes memory.
    peaks = {(row["network"], row["ranks"], row["variant"]): row["peak_mb"] for row in rows}
    on, off = (peaks["MONAI UNet 96³", 2, v] for v in ("all on", "without norm + PReLU"))
    assert on < off


def test_tuning(tmp_path):
    result = run("tuning", tmp_path)
    first, busy, *later = result["corrected"]
    assert first["measured"] > 0
    assert busy["measured"] > 0
    assert len(later) == 4  # two later runs, then one with each cache
    assert all(row["step"] > 0 for row in later)
    assert len(result["cost"]["steps"]) == 12
    assert result["cost"]["measuring"] > 0


def test_pipelines(tmp_path):
    """All contestants have the same gradients, which the script itself compares."""
    result = run("pipelines", tmp_path)
    rows = {row["contestant"]: row["step"] for row in result["rows"]}
    assert rows.keys() == {
        "alone, torch", "alone, pydist", "torch, GPipe", "torch, 1F1B",
        *(f"pydist, {cut}, {s}" for cut in ("same cut", "own plan") for s in ("gpipe", "1f1b")),
        "pydist, own plan, zero-bubble", "pydist, in turn, 1f1b",
        "pydist, forth and back, 1f1b", "pydist, forth and back, zero-bubble",
    }  # fmt: skip
    assert all("begins with" in plan for plan in result["plans"].values())
    for row in rows.values():
        check_times(row)


def test_memory_frontier(tmp_path):
    """The peak of the largest edge is within the limit, and that of the next edge is not."""
    result = run("memory_frontier", tmp_path)
    limit, rows = result["limit_mib"], result["rows"]
    one = ["plain torch", "one rank"]
    four = ["naive", "model-aware", "spatial", "composed", "composed, levels"]
    found = [(row["ranks"], row["division"]) for row in rows]
    assert found == [*((1, division) for division in one), *((4, division) for division in four)]
    for row in rows:
        assert len(row["peaks_mib"]) == row["ranks"]
        assert 0 < max(row["peaks_mib"]) <= limit < row["next_mib"]
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4)
    edges = {(row["ranks"], row["division"]): row["edge"] for row in rows}
    assert edges[4, "spatial"] > edges[1, "one rank"] > 0


def test_image_overhead(tmp_path):
    (row,) = run("memory_frontier", tmp_path, "--overhead")["rows"]
    for name in ("one rank", "model-aware"):
        check_times(row[name])
    assert row["ratio"] == row["model-aware"]["median"] / row["one rank"]["median"]


def test_channel_forms(tmp_path):
    rows = run("channel_forms", tmp_path)["rows"]
    assert [row["form"] for row in rows[:5]] == ["sum", "scatter", "gather", "chosen", "depth"]
    assert len(rows) == 5 * 5
    for row in rows:
        check_times(row["step"])
        if row["form"] == "chosen":
            assert row["chosen"] == "sum"  # of tiny layers


def test_data_sources(tmp_path):
    pytest.importorskip("zarr")
    rows = run("data_sources", tmp_path)["rows"]
    assert len({row["storage"] for row in rows}) == 9
    for row in rows:
        check_times(row)
        assert row["bytes"] == 4 * 16**3 * 2 // {"depth 2 × height 2": 4}.get(row["cut"], 2)
        assert row["over_reader"] > 0


def test_attention(tmp_path):
    rows = run("attention", tmp_path)["rows"]
    names = ["ring", "gather", "chosen", "written out", "no exchange", "one rank"]
    assert [row["form"] for row in rows] == names * 3
    for row in rows:
        check_times(row["step"])
        if row["form"] == "chosen":
            assert row["chosen"] in ("ring", "gather")


def test_manifest(tmp_path):
    first, second = run("manifest", tmp_path)["rows"]
    assert (first["version"], second["version"]) == (1, 2)
    assert second["bytes"] < first["bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="delays are emulated by LD_PRELOAD")
def test_small_files(tmp_path):
    rows = {(row["do"], row["what"]): row for row in run("small_files", tmp_path)["rows"]}
    assert len(rows) == 4 + 6
    assert rows["read", "folder"]["over_folder"] == 1
    # Two look-ups a file, 200 us each: the delay is there, and a pack has none.
    assert rows["read", "folder"]["median"] > 200 * 2 * 200e-6
    assert rows["read", "pack, fsspec"]["stats_per_s"] > rows["read", "folder"]["stats_per_s"]


def test_pack_reads(tmp_path):
    rows = run("pack_reads", tmp_path)["rows"]
    assert len(rows) == 4 * 2 * (1 + 3 * 3)  # sizes, epochs, readers
    for row in rows:
        check_times(row)


def test_block_reads(tmp_path):
    for row in run("block_reads", tmp_path)["rows"]:
        check_times(row["pydist"])
        assert all(1 <= read < 1.1 for read in row["read_over_file"].values())


@pytest.mark.skipif(sys.platform != "linux", reason="delays are emulated by LD_PRELOAD")
def test_resnet_mix(tmp_path):
    folder, packed = run("resnet_mix", tmp_path)["rows"]
    assert folder["reads"] == packed["reads"]
    assert 1.2 < folder["reads"] / folder["opens"] < 1.9


def test_progress(tmp_path):
    rows = run("progress", tmp_path, "--mpi", available()[0].name)["rows"]
    assert {row["way"] for row in rows} == {"off", "calls"}
    assert {row["calls"] for row in rows} == {1, 4, 16, 64}
    assert all(row["wait"]["min"] >= 0 and row["wait"]["rounds"] == 2 for row in rows)


@pytest.mark.parametrize(
    ("layout", "forms"),
    [("2 hosts of 1 rank, 2 groups", 5), ("2 hosts of 2 ranks, 4 groups", 7),
     ("2 hosts of 2 ranks, 2 groups", 7)],
)  # fmt: skip
def test_slow_link(tmp_path, layout, forms):
    """Bytes are as computed, and times are no shorter than the link's."""
    result = run("slow_link", tmp_path, "--layout", layout)
    rows = result["rows"]
    assert len(rows) == forms
    for row in rows:
        # Beside gradients ranks exchange which of them exist.
        assert 0 <= row["bytes"] - row["computed"] < 10_000, row["form"]
        slow = row["steps"]["1 Gb/s"]
        assert slow["min"] > row["link"]["1 Gb/s"] > 0, row["form"]
        assert row["steps"]["none"]["median"] > 0
    sent = {row["form"]: row["bytes"] for row in rows}
    assert sent["bf16"] == sent["fp16"] < sent["dense"]
    assert result["break_even"]["groups"]["dense"] == pytest.approx(1000, rel=0.05)


def test_transposition(tmp_path):
    rows = run("transposition", tmp_path)["rows"]
    assert [row["form"] for row in rows] == ["split", "gathered", "one rank"] * 4
    for row in rows:
        check_times(row["step"])


def test_augmentation(tmp_path):
    result = run("augmentation", tmp_path)
    assert [row["who"] for row in result["rows"]] == ["plain", "augmented"]
    plain, augmented = result["rows"]
    assert plain["changed"] == 0.0
    assert augmented["changed"] >= 0.5  # flips alone change 7 of 8; the script compares each sample
    for row in result["rows"]:
        check_times(row)
        assert 0 <= row["waited"] <= sum(row["quartiles"])


def test_augmented_dice(tmp_path):
    rows = run("augmented_dice", tmp_path)["rows"]
    assert [row["augment"] for row in rows] == ["none", "flips", "nnunet"]
    assert all(0 <= row[name] <= 1 for row in rows for name in ("liver", "tumor"))


def test_two_profiles_are_compared_by_what_they_predict(tmp_path):
    for name, profile in (("calm.json", CPU), ("busy.json", replace(CPU, optimizing=8e9))):
        profile.save(tmp_path / name)
    result = run("plan_accuracy", tmp_path, "--profiles", "calm.json", "busy.json")
    ratios = {mesh: ratio for _, mesh, _, _, ratio in result["rows"]}
    assert ratios.keys() >= {"1 rank", "data 2", "channel 2", "depth 2", "height 2", "width 2"}
    assert all(1 < ratio < 2 for ratio in ratios.values())
