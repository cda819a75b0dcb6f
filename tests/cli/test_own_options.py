"""Tests of the options that commands pass on to the ranks they start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pydist.cli.balance import _parse as parse_balance
from pydist.cli.options import parse
from pydist.cli.own_options import arguments_of_ranks
from pydist.cli.predict_options import Arguments
from pydist.cli.profile import _parse as parse_profile
from pydist.cli.serve_model import _Arguments as ServeArguments


@pytest.mark.parametrize("ranks", [["-n", "2"], ["-n2"], ["--ranks", "2"], ["--ranks=2"]])
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (Arguments, ["--folds", "b", "c"], ["run", "x.nii", "y.nii", "-o", "out.nii"]),
        (Arguments, ["run", "x.nii", "-o", "out.nii", "--spatial", "2", "1", "1"], ["--untrusted"]),
        (ServeArguments, ["run", "--host", "::"], ["--port", "0", "--sliding", "96"]),
    ],
)
def test_ranks_get_all_options_but_their_number(kind, before, after, ranks):
    given = parse(kind, [*before, *ranks, *after], "pydist command")
    assert given.ranks == 2
    passed = parse(kind, arguments_of_ranks([*before, *ranks, *after]), "pydist command")
    assert passed == replace(given, ranks=None)


@pytest.mark.parametrize("ranks", [["-n", "2", "--mpi", "gloo"], ["-n2"], []])
@pytest.mark.parametrize("parse_run", [parse_balance, parse_profile])
def test_ranks_get_all_settings_in_order(parse_run, ranks):
    given = ["run.toml", "--steps", "3", *ranks, "--train.batch", "8", "--model.args.x=[-1, 2]"]
    options, settings = parse_run(given)
    passed, settings_of_ranks = parse_run(arguments_of_ranks(given))
    assert settings_of_ranks == settings == ["--train.batch", "8", "--model.args.x=[-1, 2]"]
    assert vars(passed) == {**vars(options), "ranks": None}


def test_words_after_two_dashes_are_files():
    assert arguments_of_ranks(["run", "-n", "2", "--", "-nothing.nii"]) == [
        "run", "--mpi", "auto", "--", "-nothing.nii",
    ]  # fmt: skip
