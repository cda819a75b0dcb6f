"""Tests of the command line: quick answers, one-line errors, and exit codes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pydist.cli import main as cli
from pydist.cli.options import override
from pydist.data.augment.options import AugmentOptions
from pydist.errors import UsageError
from pydist.train.config import Config

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = '[data]\npath = "data"\n[model]\nwidth = 32\n[train]\nsteps = 1\n'


def test_no_help_waits_for_numpy_or_torch(tmp_path):
    program = (
        "import sys\nfrom pydist.cli.main import COMMANDS, main\n"
        "for given in ('--help', '--version', *(f'{name} --help' for name in COMMANDS)):\n"
        "    try:\n        main(given.split())\n    except SystemExit:\n        pass\n"
        "    heavy = {'torch', 'numpy', 'h5py', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, (given, heavy)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,  # here no folder named pydist hides the installed package
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


@pytest.mark.parametrize("command", ["train", "profile"])
def test_ranks_do_not_wait_for_their_launcher_to_import_torch(place, command):
    program = (
        "import sys\nimport pydist.launch.supervisor as supervisor\n"
        "def launch(ranks, argv, *_, **__):\n"
        "    assert ranks == 2 and 'torch' not in sys.modules\n"
        "    print('launched', argv)\n"
        "    return 0\n"
        "supervisor.launch = launch\n"
        "from pydist.cli.main import main\n"
        f"sys.exit(main(['{command}', 'run.toml', '-n', '2']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "launched" in ended.stdout


@pytest.mark.parametrize(
    "example", sorted(path.name for path in EXAMPLES.glob("*.toml")), ids=lambda name: name[:-5]
)
def test_help_shows_the_settings_of_every_example(example, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(EXAMPLES / example), "--help"])
    assert not ended.value.code
    assert "--train.epochs" in capsys.readouterr().out


def test_help_names_every_command_and_exit_code(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for word in (*cli.COMMANDS, "65", "66", "71", "72", "73", "74", "75"):
        assert word in shown
    assert cli.main([]) == 2


def test_version_is_that_of_the_package(capsys):
    import pydist

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pydist {pydist.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trian"], 2, "no command 'trian'; did you mean train?"),
        (["xyz"], 2, "no command 'xyz'; there are: data universes, data ct"),
        (["train"], 2, "no configuration file was given"),
        (["train", "nowhere.toml"], 2, "can't read the configuration nowhere.toml"),
        (["train", "wrong.toml"], 2, 'model.widht is not a setting; did you mean "width"?'),
        (["train", "ok.toml", "--train.stepz", "3"], 2, "did you mean --train.steps?"),
        (["train", "ok.toml", "--output.plot", "false"], 2, "are --output.plot and --output.no-p"),
        (["train", "ok.toml", "--output.plot=no"], 2, "--output.plot no: it takes no value"),
        (["train", "ok.toml", "--mesh.rebalance", "x"], 2, "('None', 'data', 'channel', 'depth', "),
        (["train", "ok.toml", "--model.name", "factory"], 2, "--model.factory"),
        (["profile", "ok.toml", "--step", "3"], 2, "did you mean --steps?"),
        (["profile", "ok.toml", "--warmpu=3"], 2, "did you mean --warmup?"),
        (["profile", "ok.toml", "--train.stepz", "3"], 2, "did you mean --train.steps?"),
        (["train", "ok.toml", "--train.batch", "0"], 2, "train.batch = 0: input should be"),
        (["train", "ok.toml", "-n", "0"], 2, "0 ranks: at least 1 is needed"),
        (["train", "ok.toml", "--mpi", "x", "-n", "2"], 2, "mpi 'x' is none of auto, openmpi"),
        (["train", "ok.toml"], 65, "no such folder"),
        (["run", "-n", "2"], 2, "no script was given"),
        (["run", "-n", "2", "nowhere.py"], 2, "no script 'nowhere.py'"),
        (["run", "-n", "2", "--", "nowhere.py"], 2, "no script 'nowhere.py'"),
        (["run", "-n2", "--mpi=gloo", "nowhere.py"], 2, "no script 'nowhere.py'"),
        (["demo", "--folder", "ok.toml/x"], 74, "can't write into ok.toml/x: Not a directory"),
        (["predict", "none", "a.nii", "-o", "b.nii"], 73, "no checkpoint here"),
        (["predict", "none", "a.nii"], 2, "--output"),
        (["data", "nifti", "nowhere", "x"], 65, "nowhere: no such folder"),
        (["data", "ct", "x", "--count", "0"], 2, "count=0: at least 1 volume"),
        (["data", "verify", "nowhere"], 65, "nowhere: no such folder"),
        (["data", "universes"], 2, "arguments are required: folder; pydist data"),
        (["data", "universes", "x", "--width", "1"], 2, "width=1: at least 2 voxels"),
    ],
)
def test_a_mistake_is_one_line_and_the_right_exit_code(
    tmp_path, monkeypatch, capsys, arguments, code, message
):
    monkeypatch.chdir(tmp_path)
    Path("ok.toml").write_text('[model]\nwidth = 32\n[data]\npath = "none"\n')
    Path("wrong.toml").write_text("[model]\nwidht = 32\n")
    Path("a.nii").touch()
    assert cli.main(arguments) == code
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [([], 65, "none: no such folder"), (["--mesh.data", "2"], 2, "2 ranks in all, but 1 were")],
)
def test_the_exit_code_is_that_of_the_process(tmp_path, arguments, code, message):
    (tmp_path / "ok.toml").write_text('[model]\nwidth = 32\n[data]\npath = "none"\n')
    ended = subprocess.run(
        [sys.executable, "-m", "pydist", "train", "ok.toml", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_handler_can_be_registered_right_after_the_import(tmp_path):
    """Refusals and docs/extending.md promise this."""
    program = (
        "import torch, pydist\n"
        "@pydist.tensor.implements(torch.fft.fftn)\n"
        "def fftn(x, *args, **kwargs):\n"
        "    return torch.fft.fftn(x.full_tensor(), *args, **kwargs)\n"
        "assert pydist.tensor.HANDLERS[torch.fft.fftn] is fftn\n"
        "assert torch.conv3d in pydist.tensor.HANDLERS"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=True)


def test_options_override_the_file():
    config = override(Config(), ["--train.steps", "20", "--mesh.spatial", "2", "1", "1"], "pydist")
    assert config.train.steps == 20
    assert config.mesh.spatial == (2, 1, 1)
    assert config.model == Config().model
    with pytest.raises(UsageError, match="invalid choice '33'"):
        override(Config(), ["--model.width", "33"], "pydist")


def test_an_option_names_a_preset_of_augmentation():
    preset = AugmentOptions.preset
    option = ["--data.augment.preset", "nnunet"]
    config = override(Config(), [*option, "--data.augment.noise", "0.5"], "pydist")
    assert config.data.augment == preset("nnunet", noise=0.5)
    # What a file changes is kept, also of another preset.
    own = preset("nnunet", crop=(8, 8, 8), probabilities={"blur": 0.0})
    before = replace(Config(), data=replace(Config().data, augment=own))
    assert override(before, ["=".join(option)], "pydist").data.augment == own
    with pytest.raises(UsageError, match="preset = 'nnu': possible are nnunet"):
        override(Config(), ["--data.augment.preset=nnu"], "pydist")
    for wrong in (option[:1], [*option, *option]):
        with pytest.raises(UsageError, match=r"--data\.augment\.preset: one name is expected"):
            override(Config(), wrong, "pydist")


def test_options_add_a_factory_and_its_arguments():
    options = ["--model.factory", "a.py:b", "--model.args.norm", '["group", 2]',
               "--model.args.act=relu", "--mesh.rebalance", "depth"]  # fmt: skip
    config = override(Config(), options, "pydist")
    assert (config.model.factory, config.mesh.rebalance) == ("a.py:b", "depth")
    assert config.model.args == {"norm": ["group", 2], "act": "relu"}
    again = override(config, ["--model.args.act", "elu", "--model.args.width=3"], "pydist")
    assert again.model.args == {"norm": ["group", 2], "act": "elu", "width": 3}
    options[3] = '["GROUP", {num_groups = 8}]'
    nested = override(Config(), options, "pydist")
    assert nested.model.args == {"norm": ["GROUP", {"num_groups": 8}], "act": "relu"}
    kept = override(nested, ["--model.args.act=elu"], "pydist")
    assert kept.model.args == {"norm": ["GROUP", {"num_groups": 8}], "act": "elu"}
    changed = override(nested, ["--model.args.norm", '["GROUP", {num_groups = 4}]'], "pydist")
    assert changed.model.args["norm"] == ["GROUP", {"num_groups": 4}]
    with pytest.raises(UsageError, match="a value is expected, in TOML"):
        override(config, ["--model.args.width"], "pydist")
