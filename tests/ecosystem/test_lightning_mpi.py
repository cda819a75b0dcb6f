"""Lightning's Trainer with one device on every rank: its training equals the one-device run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

from pydist import Mesh, parallelize
from support.networks.vision import declare_missing_operators
from support.training.frameworks import (
    BATCH,
    CLIP,
    EPOCHS,
    SAMPLES,
    assert_as_plainly,
    network,
    optimizer_of,
    train_plainly,
)

declare_missing_operators()  # Lightning imports torchmetrics
lightning = pytest.importorskip("lightning")

pytestmark = [pytest.mark.ranks(2), pytest.mark.filterwarnings("ignore")]


class Segmenter(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch, index):
        x, labels = batch
        loss = F.cross_entropy(self.model(x), labels)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, labels = batch
        loss = F.cross_entropy(self.model(x), labels)
        self.log("val_loss", loss)
        self.validated.append(loss.item())

    def configure_optimizers(self):
        optimizer = optimizer_of(self.model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer(epochs: int = EPOCHS):
    return lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, gradient_clip_val=CLIP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def loader_for(mesh: Mesh) -> DataLoader:
    """Returns a loader: ranks of a sample group get equal samples, the groups share each batch."""
    sampler = DistributedSampler(SAMPLES, mesh.data_size, mesh.data_index, shuffle=False)
    return DataLoader(SAMPLES, BATCH // mesh.data_size, sampler=sampler)


@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 1, 1)), (1, (1, 1, 2)), (2, (1, 1, 1))])
def test_fit_with_clipping_schedule_and_validation(world, data, spatial):
    mesh = Mesh(world, data, spatial)
    module = Segmenter(parallelize(network(), mesh))
    batches = loader_for(mesh)
    run = trainer()
    run.fit(module, batches, batches)
    assert run.callback_metrics["val_loss"].isfinite()
    losses = torch.tensor(module.losses, dtype=torch.float64)
    mesh.data.all_reduce(losses)
    found = (losses / mesh.data_size).tolist(), list(module.parameters())
    assert_as_plainly(found, train_plainly())


def test_a_checkpoint_of_one_rank_goes_on_on_all_and_loads_plainly(world, tmp_path):
    mesh = Mesh(world, 1, (2, 1, 1))
    first = Segmenter(parallelize(network(), mesh))
    run = trainer(1)
    run.fit(first, loader_for(mesh))
    path = tmp_path / "last.ckpt"  # a rank-local folder
    run.save_checkpoint(path)

    again = Segmenter(parallelize(network(), mesh))
    trainer().fit(again, loader_for(mesh), ckpt_path=path)
    assert_as_plainly((first.losses + again.losses, list(again.parameters())), train_plainly())
    plain = Segmenter(network())
    plain.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    assert_as_plainly(([], list(plain.parameters())), ([], list(first.parameters())))
