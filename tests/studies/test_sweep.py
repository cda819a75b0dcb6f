"""Tests of sweeps: the runs that a file describes, mistakes in it, and a sweep with a failure."""

from __future__ import annotations

import json
import os
import signal

import pytest

from pydist.cli import jobs
from pydist.cli import main as cli
from pydist.errors import UsageError
from pydist.studies.runs import Outcome
from pydist.studies.sweep import load_sweep, order_of, sweep_table

BASE = """
[model]
width = 32
[data]
path = "data"
[train]
batch = 2
epochs = 1
"""


def write(folder, text: str, base: str = BASE):
    (folder / "run.toml").write_text(base)
    path = folder / "sweep.toml"
    path.write_text(f'config = "run.toml"\nfolder = "out"\n{text}')
    return path


def test_the_grid_has_every_combination(tmp_path):
    found = load_sweep(write(tmp_path, """
[grid]
"optimizer.lr" = [1e-3, 3e-4]
"mesh.spatial" = [[1, 1, 1], [2, 1, 1]]
"""))  # fmt: skip
    assert [run.name for run in found.runs] == [
        "lr=0.001,spatial=1x1x1", "lr=0.001,spatial=2x1x1",
        "lr=0.0003,spatial=1x1x1", "lr=0.0003,spatial=2x1x1",
    ]  # fmt: skip
    assert [run.ranks for run in found.runs] == [1, 2, 1, 2]
    assert [run.config.optimizer.lr for run in found.runs] == [1e-3, 1e-3, 3e-4, 3e-4]
    assert str(found.runs[1].folder) == "out/runs/lr=0.001,spatial=2x1x1"


def test_listed_runs_are_combined_with_the_grid(tmp_path):
    found = load_sweep(write(tmp_path, """
ranks = 2
[grid]
"train.seed" = [0, 1]
[[runs]]
name = "plain"
[[runs]]
"train.batch" = 4
"model.batch_norm" = true
"""))  # fmt: skip
    assert [run.name for run in found.runs] == [
        "plain,seed=0", "plain,seed=1", "batch=4,batch_norm=True,seed=0",
        "batch=4,batch_norm=True,seed=1",
    ]  # fmt: skip
    assert [run.config.train.batch for run in found.runs] == [2, 2, 4, 4]
    assert {run.ranks for run in found.runs} == {2}
    assert found.settings[2] == {"train.batch": 4, "model.batch_norm": True, "train.seed": 0}


def test_a_table_is_a_setting_of_its_own(tmp_path):
    found = load_sweep(write(tmp_path, """
[grid]
output = [{plot = false}]
"train.seed" = [0, 1]
"""))  # fmt: skip
    assert [run.config.output.plot for run in found.runs] == [False, False]
    assert {str(run.folder.parent) for run in found.runs} == {"out/runs"}
    assert all(given["output"] == {"plot": False} for given in found.settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[grid]\n'train.batches' = [1]", r"batches=1: .*train\.batches"),
        ("[grid]\n'train.batch' = [0]", r"batch=0: .*train\.batch"),
        ("[grid]\n'train.batch' = []", r"grid\.train\.batch: .*at least 1 item"),
        ("[grid]\n'train.batch' = 1", r"grid\.train\.batch: .*list"),
        ("[grid]\n'train.batch.x' = [1]", "batch is no table"),
        ("[grid]\n'train.batch' = [2, 2]", "two runs are 'batch=2': give them names"),
        ("[grid]\n'output.folder' = ['x']", "the sweep chooses the folders"),
        ("[grid]\noutput = [{folder = 'x'}]", "the sweep chooses the folders"),
        (
            "[grid]\n'optimizer.lr' = [1e-2]\noptimizer = [{name = 'sgd'}]",
            "'optimizer' and 'optimizer.lr' are a table and a setting in it: give each",
        ),
        (
            "[grid]\noptimizer = [{name = 'sgd'}]\n[[runs]]\n'optimizer.weight_decay' = 0.1",
            "'optimizer' and 'optimizer.weight_decay' are a table and a setting",
        ),
        ("[grid]\n'train.batch' = [2]\n[[runs]]\n'train.batch' = 3", "in the table grid and in a"),
        ("[[runs]]\nname = 3", "name = 3: a text is expected"),
        ("rank = 2", "unknown key 'rank'; possible are config, folder, ranks"),
        ("ranks = 0", "ranks: input should be greater than or equal to 1"),
        ("ranks = 3\n[[runs]]\n'mesh.spatial' = [2, 1, 1]", "ranks = 3; its mesh needs multiples"),
        ("ranks = 3\n[[runs]]\n'mesh.data' = 2", "ranks = 3; its mesh needs 2"),
        ("x = ", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(text, message, tmp_path):
    with pytest.raises(UsageError, match=message) as raised:
        load_sweep(write(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"can't read .*none\.toml: No such file"):
        load_sweep(tmp_path / "none.toml")
    path = write(tmp_path, "")
    (tmp_path / "run.toml").unlink()
    with pytest.raises(UsageError, match=r"can't read .*run\.toml: No such file"):
        load_sweep(path)


def test_the_table_has_the_best_first_and_failures_last(tmp_path):
    found = load_sweep(write(tmp_path, "[grid]\n'train.seed' = [0, 1, 2, 3]"))
    outcomes = [
        Outcome("done", "", 4, 0.5, {"loss": 0.25, "mae": 0.5}, 2.0),
        Outcome("failed", "why"),
        Outcome("done", "", 4, 0.75, {"loss": 0.125, "mae": 0.25}, 2.0),
        Outcome("done", "", 4, 0.1875, {}, 2.0),
    ]
    assert order_of(outcomes) == [2, 3, 0, 1]
    head, *lines = sweep_table(found, outcomes).splitlines()
    assert head.split()[:5] == ["run", "train.seed", "ranks", "steps", "loss"]
    assert lines[0].split() == ["seed=2", "2", "1", "4", "0.75", "0.125", "0.25", "2.0", "done"]
    assert lines[-1].split() == ["seed=1", "1", "1", "0", "0.0", "failed"]


JOB = """
for settings; do :; done
folder=$(dirname "$settings")
grep -q 'batch = 3' "$settings" && test ! -e fixed && { echo "error: no such data"; exit 65; }
echo "$@" > "$folder/arguments"
log="$folder/log.jsonl"
printf '{"event": "step", "time": 0, "step": 4, "loss": 0.5, "seconds": 1.0}\\n' >> "$log"
printf '{"event": "end", "time": 0, "step": 4, "status": "done", "reason": ""}\\n' >> "$log"
"""


def test_a_sweep_names_the_failed_run_and_repeats_it_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(JOB)
    text = 'launcher = "sh job.sh {ranks}"\nranks = 2\n[grid]\n"train.batch" = [2, 3]'
    path = write(tmp_path, text)
    assert cli.main(["sweep", str(path), "-n", "4", "--json"]) == 71
    ended = capsys.readouterr()
    good, bad = json.loads(ended.out)["runs"]
    assert (good["status"], good["steps"], bad["status"]) == ("done", 4, "failed")
    assert good["settings"] == {"train.batch": 2}
    assert ended.err.splitlines()[-1].startswith(
        "error: 1 of 2 runs failed: batch=3 (error: no such data); the same command repeats"
    )
    ranks, *program, train, settings = (tmp_path / "out/runs/batch=2/arguments").read_text().split()
    assert (ranks, train, settings) == ("2", "train", "out/runs/batch=2/settings.toml")
    assert "pydist.cli.jobs" in " ".join(program)
    (tmp_path / "fixed").touch()
    assert cli.main(["sweep", str(path), "-n", "4"]) == 0
    text = capsys.readouterr().out
    assert "run        batch=3  starts" in text
    assert "run        batch=2  starts" not in text
    assert len(json.loads((tmp_path / "out/results.json").read_text())["runs"]) == 2


def test_a_job_runs_the_command_and_ends_if_its_parent_does(monkeypatch, capsys):
    assert jobs.main(["0", "--version"]) == 0
    assert capsys.readouterr().out.startswith("pydist ")
    sent = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, number)))
    jobs._watch(0)  # no process has this parent
    assert sent == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ('launcher = "srun"', [], "launcher = 'srun': {ranks} is missing"),
        ("ranks = 2", [], "run needs 2 ranks, and 1 are given (-n)"),
        ("", ["--mpi", "none"], "mpi 'none' is none of auto"),
    ],
)
def test_mistakes_of_the_command_are_named(text, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", str(write(tmp_path, text)), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_study_starts_in_a_job_of_one_rank_as_the_shell_of_srun_is(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    jobs.refuse_ranks("pydist sweep")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(UsageError, match="run it once, without a launcher"):
        jobs.refuse_ranks("pydist sweep")
