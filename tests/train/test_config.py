"""Tests that mistakes in a configuration are named, with their place and a suggestion."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydist.errors import UsageError
from pydist.train import config_io
from pydist.train.config import (
    AdamConfig,
    Config,
    DataConfig,
    MeshConfig,
    SharesConfig,
    TrainConfig,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_default_survives_the_way_through_toml(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(config_io.dumps(Config()))
    assert config_io.load(file) == Config()


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    st.floats(min_value=1e-300, max_value=1e300),
    st.integers(1, 2**31 - 1),
    st.none() | st.integers(1, 100),
)
def test_any_values_survive_the_way_through_toml(path, lr, batch, groups):
    config = Config(
        data=DataConfig(path=Path(path)),
        optimizer=AdamConfig(lr=lr, end_lr=min(lr, 1e-7)),
        mesh=MeshConfig(data=groups, spatial=(1, 2, 3), shares=SharesConfig(height=(lr, 1.0))),
        train=TrainConfig(batch=batch, class_weights=(min(lr, 1e6), 0.0), ignore_label=groups),
    )
    tables = config_io.tomllib.loads(config_io.dumps(config))
    assert config_io.from_tables(tables, "test") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nwidht = 32", 'model.widht is not a setting; did you mean "width"?'),
        ("[modle]\nwidth = 32", 'modle is not a setting; did you mean "model"?'),
        ("[train]\nxyz = 1", "train.xyz is not a setting: choose from epochs, steps, batch"),
        ("[model]\nwidth = 33", "model.width = 33: input should be 32, 64, 128, 256 or 512"),
        ("[model]\nbatch_norm = 1", "model.batch_norm = 1: input should be a valid boolean"),
        ('[train]\nbatch = "8"', "train.batch = '8': input should be a valid integer"),
        ("[mesh]\nspatial = 2", "mesh.spatial = 2: a list is expected"),
        ("train = 3", "train = 3: a table is expected"),
        ("[model]\nfactory = 'a.py:b'\nargs = 3", "model.args = 3: a table is expected"),
        ("[output]\nfolder = 3", "output.folder = 3: a string is expected"),
        ("[train]\nepochs = true", "train.epochs = True: input should be a valid integer"),
        ("[mesh]\nspatial = [1, 2]", "mesh.spatial.2 = [1, 2]: field required"),
        ("[mesh]\nshares = {depht = [1]}", 'mesh.shares.depht is not a setting; did you mean "dep'),
        ("[mesh]\nshares = {depth = [1, 0]}", "mesh.shares.depth.1 = 0: input should be greater"),
        ("[mesh]\nshares = {depth = []}", "mesh.shares.depth = []: tuple should have at least 1"),
        (
            "[mesh]\nspatial = [2, 1, 1]\nshares = {depth = [2, 1], width = [1, 1]}",
            "mesh.shares.width = [1.0, 1.0]: expected one number per part, and the mesh has 1 al",
        ),
        ("[mesh]\nspatial = [1, 2, 0]", "mesh.spatial.2 = 0: input should be greater than or"),
        ("[mesh]\nstages = 0", "mesh.stages = 0: expected a count >= 1, or a list with the mesh"),
        ("[mesh]\nstages = []", "mesh.stages = []: expected a mesh for each stage, as in [{spat"),
        ("[mesh]\nstages = [{spatail = 1}]", "mesh.stages.0.spatail is not a setting; did you me"),
        ("[mesh]\nstages = [{spatial = [2, 1]}]", "mesh.stages.0.spatial.2 = [2, 1]: field requi"),
        (
            "[mesh]\nmicro_batches = 2",
            "mesh.micro_batches = 2: it is for stages, and mesh",
        ),
        (
            "[mesh]\nstages = [{}, {}]\nspatial = [2, 1, 1]",
            "mesh.spatial = [2, 1, 1] beside a list mesh.stages: give it to each stage, as in ",
        ),
        (
            "[mesh]\nstages = [{}, {}]\nshares = {depth = [1]}",
            "mesh.shares.depth beside a list mesh.stages: give it to the shares of a stage",
        ),
        (
            "[mesh]\nstages = [{shares = {data = [1]}}, {}]",
            "mesh.stages.0.shares.data: all stages have the same samples; give it to mesh.shares",
        ),
        (
            "[mesh]\nstages = [{}, {spatial = [2, 1, 1], shares = {depth = [1]}}]",
            "mesh.stages.1.shares.depth = [1.0]: expected one number per part, and the mesh has 2",
        ),
        (
            '[mesh]\nstages = 2\ncuts = ["a", "b"]',
            "mesh.cuts = ['a', 'b']: 2 stages begin at the input and at 1 modules",
        ),
        (
            "[mesh]\nstages = 2\ndata = 2\nmicro_batches = 3\n[train]\nbatch = 5",
            "mesh.micro_batches = 3: of train.batch = 5 a sample group has 2 samples; possible are",
        ),
        (
            '[mesh]\nstages = 2\n[train]\ncuda_graph = "always"',
            'train.cuda_graph = "always" with mesh.stages: stages exchange messages through their',
        ),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan: input should be a finite number"),
        ("[train]\nclass_weights = [1.0, -1.0]", "train.class_weights.1 = -1.0: input should be"),
        ("[train]\nclass_weights = []", "train.class_weights = []: tuple should have at least 1"),
        ("[train]\nignore_label = -1", "train.ignore_label = -1: input should be greater than or"),
        (
            "[train]\nclass_weights = [1e300]",
            "train.class_weights.0 = 1e+300: input should be less",
        ),
        (f"[train]\nignore_label = {2**70}", f"train.ignore_label = {2**70}: input should be less"),
        (f"[train]\nseed = {2**64}", f"train.seed = {2**64}: input should be less than or equal"),
        *(
            (
                f"[optimizer]\n{key} = 1e308",
                f"optimizer.{key} = 1e+308: input should be less than or",
            )
            for key in ("warmup_epochs", "decay_epochs")
        ),
        (f"[train]\nsteps = {2**31}", f"train.steps = {2**31}: input should be less than or"),
        (f"[checkpoint]\nkeep = {2**62}", f"checkpoint.keep = {2**62}: input should be less"),
        (
            f'[model]\nname = "unet3d"\nfeatures = {2**62}',
            f"model.features = {2**62}: input should be less than or equal",
        ),
        ('[model]\nname = "unet3d"\nlevels = 60', "model.levels = 60: input should be less than"),
        ("model = 3", "model = 3: a table is expected"),
        ('[model]\nname = "unet"', "model.name = 'unet': possible are 'cosmoflow', 'unet3d'"),
        ('[model]\nname = "unet3d"\nwidth = 32', "model.width is not a setting: choose from name,"),
    ],
)
def test_a_wrong_setting_is_named_by_its_place(tmp_path, text, message):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        config_io.load(file)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(UsageError) as caught:
        config_io.from_tables({"model": {"width": 1, "x": 2}, "train": {"batch": 0}}, "f.toml")
    assert all(name in str(caught.value) for name in ("model.width", "model.x", "train.batch"))


PATHS = ("data.path", "data.store_folder", "data.allow_roots", "train.tuning", "output.folder")


def _given(name: str, text: str) -> dict[str, dict[str, object]]:
    table, key = name.split(".")
    return {table: {key: ["ok", text] if key == "allow_roots" else text}}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_with_a_zero_character_is_refused(name):
    message = rf"run: {re.escape(name)} = 'a\\x00b': a path has no zero"
    with pytest.raises(UsageError, match=message):
        config_io.from_tables(_given(name, "a\0b"), "run")


@pytest.mark.parametrize("name", [*PATHS, "model.factory"])
def test_a_path_that_is_not_utf8_is_refused(name):
    with pytest.raises(UsageError, match=rf"run: {re.escape(name)} = 'a\\udcff:b': a .* not UTF-8"):
        config_io.from_tables(_given(name, "a\udcff:b"), "run")


def test_files_that_are_no_toml_or_not_there_are_refused(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[model\n")
    with pytest.raises(UsageError, match="is not valid TOML"):
        config_io.load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not valid TOML"):
        config_io.load(file)
    with pytest.raises(UsageError, match="No such file"):
        config_io.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_valid(file, tmp_path):
    config = config_io.load(file)
    marked = tmp_path / "marked.toml"  # editors on Windows write this mark
    marked.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert config_io.load(marked) == config
