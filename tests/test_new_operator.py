"""Test of the recipe for an operator: the handlers of docs/extending.md, in another package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.jobs.children import run_python

RECIPE = Path(__file__).parents[1] / "docs/extending.md"

HANDLERS = """
import torch
import pydist
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap

"""

NETWORK = """
import torch
from torch import nn

import my_operators

class Lower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 3, 3, padding=1)

    def forward(self, x):
        return torch.tril(self.conv(x)) + torch.linalg.svdvals(x[:, :1]).sum()
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """Makes a package with the recipe's handlers, and a network that uses them."""
    root = tmp_path_factory.mktemp("package")
    recipe = RECIPE.read_text().partition("## An operator")[2].partition("## A transport")[0]
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", recipe, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    lines = [block.replace("\n   ", "\n").removeprefix("   ") for block in blocks]
    (root / "my_operators.py").write_text(HANDLERS + "\n".join(lines))
    (root / "my_network.py").write_text(NETWORK)
    return root


@pytest.mark.parametrize(
    ("spatial", "code", "said"),
    [
        ("2,1,1", 0, r"\btril +1 +yes .*\n(.*\n)*split equals whole"),
        ("1,1,2", 1, r"refused: torch\.tril.* one of the last two dims is split"),
    ],
)
def test_handlers_of_another_package_have_the_result_of_one_device(package, spatial, code, said):
    command = "-m", "pydist", "check", "my_network:Lower", "--sample", "2,6,5,4"
    ended = run_python(
        *command, "--spatial", spatial, folder=package, seconds=120, OMP_NUM_THREADS="1"
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert re.search(said, ended.stdout), ended.stdout
