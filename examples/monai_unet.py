"""MONAI's UNet in a loop of your own: transforms, loader, mixed precision, resume, whole volumes.

    pydist data ct volumes --count 10 --format nifti        # or a folder with imagesTr, labelsTr
    pydist run -n 2 examples/monai_unet.py volumes --depth 2       # also mpirun, torchrun, srun

Ended at any instant, the same command goes on from the last step, with the same bits.
"""

import argparse
from pathlib import Path

import torch
from monai import transforms as mt
from monai.data import DataLoader, Dataset
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.networks.utils import one_hot
from torch.utils.data import DistributedSampler

import pydist
from pydist import checkpoint

KEYS, CLASSES = ("image", "label"), 3


def main() -> None:
    """Trains on all volumes but the last one, which it predicts as a whole after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("volumes", type=Path)
    parser.add_argument("--run", type=Path, default=Path("runs/monai_loop"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--depth", type=int, default=1, help="blocks that a sample is cut into")
    options = parser.parse_args()
    mesh = pydist.init(spatial=(options.depth, 1, 1))  # the other ranks: more sample groups
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folders = [sorted((options.volumes / name).iterdir()) for name in ("imagesTr", "labelsTr")]
    *files, unseen = [dict(zip(KEYS, pair, strict=True)) for pair in zip(*folders, strict=True)]
    load = mt.LoadImaged(KEYS, ensure_channel_first=True)
    read = [load, mt.ScaleIntensityRanged("image", -100, 250, 0, 1), mt.DivisiblePadd(KEYS, 4)]
    crop = mt.RandSpatialCropd(KEYS, (32, 32, 32), random_size=False)
    noise = mt.RandGaussianNoised("image", prob=0.5, std=0.05)
    augment = mt.Compose([*read, crop, mt.RandFlipd(KEYS, prob=0.5, spatial_axis=2), noise])
    data = Dataset(files, augment)
    sampler = DistributedSampler(data, mesh.data_size, mesh.data_index)  # by groups, not by ranks
    loader = checkpoint.Resumable(DataLoader(data, batch_size=2, sampler=sampler))

    torch.manual_seed(0)
    model = UNet(3, 1, CLASSES, (16, 32, 64), (2, 2), num_res_units=1).to(device)
    pydist.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
    criterion, dice = DiceCELoss(to_onehot_y=True, softmax=True), DiceMetric()
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    found = checkpoint.load(options.run, **states)
    step = found.step if found else 0
    while loader.epoch < options.epochs:
        augment.set_random_state(seed=loader.epoch * mesh.data_size + mesh.data_index)
        for batch in loader:
            with torch.autocast(device.type, torch.bfloat16):
                scores = model(batch["image"].to(device))
            loss = criterion(scores.float(), batch["label"].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            checkpoint.save(options.run, step, **states)
        with torch.no_grad():
            case = mt.Compose(read)(unseen)
            scores = model.eval()(case["image"][None].to(device)).full_tensor().cpu()
        model.train()
        pair = scores.argmax(1, keepdim=True), case["label"][None]
        score = dice(*(one_hot(labels, CLASSES) for labels in pair))[0, 1:].tolist()
        if mesh.rank == 0:
            print(f"epoch {loader.epoch}  step {step}  Dice of the last volume {score}", flush=True)


if __name__ == "__main__":
    main()
