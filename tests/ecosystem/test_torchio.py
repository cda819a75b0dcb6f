"""TorchIO subjects, transformed and collated in workers: direct input of a split network."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from pydist import parallelize
from support.equivalence import on_ranks
from support.networks.vision import declare_missing_operators
from support.training.frameworks import LABELS, X, network

declare_missing_operators()
tio = pytest.importorskip("torchio")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore")
def test_a_loader_of_subjects(workers):
    subjects = [
        tio.Subject(ct=tio.ScalarImage(tensor=x), label=tio.LabelMap(tensor=labels[None]))
        for x, labels in zip(X[:4], LABELS[:4], strict=True)
    ]
    data = tio.SubjectsDataset(subjects, transform=tio.CropOrPad((8, 6, 4)))
    batches = list(tio.SubjectsLoader(data, batch_size=2, num_workers=workers))
    assert len(batches) == 2

    def gradients(model):
        for batch in batches:
            x, labels = batch["ct"][tio.DATA], batch["label"][tio.DATA][:, 0]
            F.cross_entropy(model(x.double()), labels.long()).backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(network())

    def body(mesh):
        for found, wanted in zip(gradients(parallelize(network(), mesh)), expected, strict=True):
            assert float((found - wanted).abs().max()) <= 1e-12 * max(
                1.0, float(wanted.abs().max())
            )

    on_ranks((2, 2, 1), body)
