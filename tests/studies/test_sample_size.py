"""Tests of the study of sample sizes: its data sets, trainings, errors, table and figure."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from pydist.cli import main as cli
from pydist.data import Manifest, ShardDataset
from pydist.errors import DataError, UsageError
from pydist.setup import init
from pydist.studies.claimed import claimed
from pydist.studies.options import SampleSizeOptions
from pydist.studies.sample_size import NETWORK, Row, Study
from pydist.studies.sample_size_report import conclusion, draw_sizes, sizes_record, table_of
from pydist.train.run import train

OPTIONS = SampleSizeOptions(universes=8, width=8, seeds=1, epochs=1, levels=2, features=2)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    found = Study(tmp_path_factory.mktemp("study"), OPTIONS)
    found.make_data()
    mesh = init(1, (1, 1, 1), "local")
    for run in found.runs():
        train(run.config, mesh)
    return found


@pytest.mark.parametrize("cut", [2, 4])
def test_samples_are_the_blocks_of_the_same_universes(study, cut):
    whole = ShardDataset(study.data(1), "val", normalize="standardize")
    parts = ShardDataset(study.data(cut), "val", normalize="standardize")
    assert len(parts) == cut**3 * len(whole)
    width = OPTIONS.width // cut
    for i in range(len(whole)):
        universe, target = whole[i]
        blocks = iter(range(i * cut**3, (i + 1) * cut**3))
        for z in range(0, OPTIONS.width, width):
            for y in range(0, OPTIONS.width, width):
                for x in range(0, OPTIONS.width, width):
                    block, own = parts[next(blocks)]
                    part = universe[:, z : z + width, y : y + width, x : x + width]
                    assert block.equal(part)
                    assert own.equal(target)
    before = Manifest.load(study.data(cut)).digest
    study.make_data()
    assert Manifest.load(study.data(cut)).digest == before


def test_the_budget_is_the_same(study):
    configs = [run.config for run in study.runs()]
    assert [c.train.batch * (8 // int(c.train.batch ** (1 / 3) + 0.5)) ** 0 for c in configs] == [
        4, 32, 256,
    ]  # fmt: skip
    assert (
        len({(c.train.epochs, c.train.seed, str(c.optimizer), str(c.model)) for c in configs}) == 1
    )
    steps = []
    for run in study.runs():
        lines = (run.folder / "log.jsonl").read_text().splitlines()
        steps.append(sum(json.loads(line)["event"] == "step" for line in lines))
    assert steps == [2, 2, 2]  # 6 universes, 4 a step
    split = replace(study, ranks=2).runs()
    assert [r.config.mesh.parts() for r in split[:2]] == [
        {"data": 1, "depth": 2, "height": 1, "width": 1, "channel": 1},
        {"data": 2, "depth": 1, "height": 1, "width": 1, "channel": 1},
    ]


def test_errors_are_those_of_the_tables_of_predictions(study):
    rows = {(r.predictor, r.cut, r.averaged): r for r in study.rows()}
    assert len(rows) == 11
    for cut in (1, 2, 4):
        name = "whole" if cut == 1 else f"parts-{cut**3}"
        with (study.folder / f"runs/{name}-seed-0/predictions.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert len(lines) == 2 * cut**3
        for i, output in enumerate(("Omega_m", "sigma_8", "N_spec", "H_0")):
            error = [float(r[f"predicted {output}"]) - float(r[f"true {output}"]) for r in lines]
            found = rows[NETWORK, cut, False].errors[0][i]
            assert found == pytest.approx(np.mean(np.square(error)))
            if cut > 1:
                of_universe = np.mean(np.reshape(error, (2, -1)), 1)
                found = rows[NETWORK, cut, True].errors[0][i]
                assert found == pytest.approx(np.mean(np.square(of_universe)))


def test_results_are_shown(study):
    rows = study.rows()
    lines = table_of(study, rows).splitlines()
    assert lines[0].split() == [
        "predictor", "input", "seeds", "mean", "Omega_m", "sigma_8", "N_spec", "H_0",
    ]  # fmt: skip
    assert len(lines) == 12
    assert "ridge      1/64: 2³, mean of 64" in lines[-1]
    assert json.loads(json.dumps(sizes_record(study, rows)))["rows"][1]["mean"] == pytest.approx(
        rows[1].mean
    )
    pytest.importorskip("matplotlib")
    assert draw_sizes(study, rows).read_bytes().startswith(b"\x89PNG")


def test_the_ratio_has_a_spread_over_seeds():
    errors = {(1, False): [1.0, 2.0], (2, False): [2.0, 6.0], (2, True): [1.5, 1.0],
              (4, False): [4.0, 8.0], (4, True): [1.0, 2.0]}  # fmt: skip
    rows = [Row(NETWORK, cut, avg, [[e] * 4 for e in each]) for (cut, avg), each in errors.items()]
    assert conclusion(rows)[:2] == [
        "error of 1/8: 2.50 ± 0.71 times that of whole cubes (larger with 2 of 2 seeds)",
        "error of 1/8, averaged over the universe: 1.00 ± 0.71 times that of whole cubes "
        "(larger with 1 of 2 seeds)",
    ]
    assert rows[1].spread == pytest.approx(np.std([2, 6], ddof=1))


def test_a_cut_table_is_refused(study):
    path = study.runs()[0].folder / "predictions.csv"
    text = path.read_text()
    path.write_text("\n".join(text.splitlines()[:2]))
    try:
        with pytest.raises(DataError, match="1 samples instead of 2"):
            study.rows()
    finally:
        path.write_text(text)


def test_a_folder_has_one_study(tmp_path):
    record = {"study": "a", "options": {"width": 8}}
    for _ in range(2):
        with claimed(tmp_path / "new", record):
            pass
    with pytest.raises(UsageError, match="a study with other options"):  # noqa: SIM117
        with claimed(tmp_path / "new", {**record, "options": {"width": 16}}):
            pass
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="has new and no study: choose another"):  # noqa: SIM117
        with claimed(tmp_path, record):
            pass


def test_more_seeds_continue_a_study_and_other_options_do_not(tmp_path):
    def identity(**changes):
        return Study(tmp_path, SampleSizeOptions(**changes)).identity()

    with claimed(tmp_path, identity(seeds=1)):
        pass
    with claimed(tmp_path, identity(seeds=4)):
        pass
    with pytest.raises(UsageError, match="other options"):  # noqa: SIM117
        with claimed(tmp_path, identity(seeds=4, epochs=2)):
            pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30"], "width = 30: multiples of 4 from 8 on are possible"),
        (["--seeds", "0"], "seeds = 0: at least 1"),
        (["--universes", "4"], "3 to train on and 1 to validate"),
        (["--lr", "-1"], "lr = -1.0: a positive number"),
        (["-n", "0"], "-n 0: 1 to 32 ranks are possible"),
        (["--mpi", "none"], "mpi 'none' is none of auto"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(arguments, message, tmp_path, capsys):
    assert cli.main(["bench", "sample-size", "--folder", str(tmp_path / "s"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_more_levels_than_a_cube_can_be_halved_are_refused():
    with pytest.raises(UsageError, match="levels = 4: at most 3 halve a cube of 8 voxels"):
        SampleSizeOptions(width=8, levels=4)
