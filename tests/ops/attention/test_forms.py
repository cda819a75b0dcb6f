"""The form of exchange of attention: chosen by cost, and shown."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist.check import check
from pydist.check.report import format_report
from pydist.ops.attention.forms import Sizes, attention_form
from support.networks.small import initialized

SIZES = {
    "few tokens of many ranks": (Sizes(16, 4, 64, 64, 32, True), "gather"),
    "a volume": (Sizes(2, 4, 24**3, 24**3, 32, True), "ring"),
    "a volume on many ranks": (Sizes(32, 8, 48**3, 48**3, 64, True), "ring"),
    "one query": (Sizes(2, 4, 1, 24**3, 32, False), "sum"),
    "many queries, few keys": (Sizes(4, 4, 24**3, 8, 32, False), "gather"),
    "many queries, many keys": (Sizes(4, 4, 24**3, 24**3, 32, False), "sum"),
}


@pytest.mark.parametrize(("sizes", "form"), SIZES.values(), ids=SIZES)
def test_choice(sizes, form):
    assert attention_form(sizes) == form


class Voxels(nn.Module):
    """Attention between voxels, and of one query to them."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, 1, 4))
        self.attention = initialized(nn.MultiheadAttention(4, 2, batch_first=True))

    def forward(self, x):
        tokens = x.flatten(2).mT
        y, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        pooled = F.scaled_dot_product_attention(self.query.expand(len(x), 1, 4), y, y)
        return (y + pooled).mT.view(x.shape)


def test_it_is_shown():
    report = check(Voxels, (4, 12, 6, 6), (2, 1, 1))
    assert report.ok, format_report(report)
    forms = {call.name.rpartition(".")[2]: call.form for call in report.calls[0] if call.form}
    assert set(forms) == {"multi_head_attention_forward", "scaled_dot_product_attention"}
    assert set(forms.values()) <= {"ring", "gather", "sum"}
    assert "form" in format_report(report).splitlines()[2]
