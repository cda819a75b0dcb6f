"""Creates every 3-D network of MONAI, in a small size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.equivalence import randn
from support.networks import attention
from support.networks.attention import TOKENS, nets
from support.networks.cases import BATCH, Case, Encoded


class Registered(nn.Module):
    """VoxelMorph on a moving and a fixed volume, which are the channels of the input."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Any:
        return self.network(x[:, :1], x[:, 1:])


def _spade_autoencoder() -> nn.Module:
    network = nets.SPADEAutoencoderKL(
        3, 2, channels=(2, 4), num_res_blocks=(1, 1), attention_levels=(False, True),
        latent_channels=2, norm_num_groups=2, spade_intermediate_channels=2,
    )  # fmt: skip
    labels = randn(BATCH, 2, 8, 8, 8)
    return Encoded(network, lambda own, x: own.decode(sum(own.encode(x)), labels))


def _spade_net() -> nn.Module:
    network = nets.SPADENet(3, 1, 1, 2, [8, 8, 8], [4, 4], 4, spade_intermediate_channels=2)
    return Encoded(network, lambda own, x: own.decode(torch.cat([x, -x], 1), own.encoder(x)[0]))


def _masked_autoencoder() -> nn.Module:
    """It keeps the same tokens at each call, which MONAI draws from torch's global generator."""
    network = nets.MaskedAutoEncoderViT(
        1, (16, 16, 8), 4, num_layers=1, decoder_hidden_size=12, decoder_mlp_dim=8,
        decoder_num_layers=1, decoder_num_heads=2, **TOKENS,
    )  # fmt: skip
    kept = randn(BATCH, 32).argsort(1)[:, :8]
    rows = torch.arange(BATCH)[:, None]

    def masking(x: Tensor, masking_ratio: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mask = torch.ones(x.shape[:2], dtype=torch.int)
        mask[rows, kept] = 0
        return x[rows, kept], kept, mask

    network._masking = masking
    return network


def _global_net() -> nn.Module:
    network = nets.GlobalNet([16, 16, 16], 3, 2, 4, 2)
    network.output_block.grid = network.output_block.grid.double()  # float32 by a constant
    return network


def _dints() -> nn.Module:
    space = nets.TopologyInstance(channel_mul=0.25, num_blocks=2, num_depths=2, use_downsample=True)
    return nets.DiNTS(space, 1, 2, use_downsample=True)


def _dints_search() -> nn.Module:
    space = nets.TopologySearch(channel_mul=0.25, num_blocks=2, num_depths=2, use_downsample=True)
    return nets.DiNTS(space, 1, 2, use_downsample=True)


def _vista3d() -> nn.Module:
    from monai.networks.nets.vista3d import ClassMappingClassify, PointMappingSAM

    encoder = nets.SegResNetDS2(
        init_filters=8, in_channels=1, out_channels=8, blocks_down=(1, 1), norm="instance"
    )
    network = nets.VISTA3D(
        encoder,
        ClassMappingClassify(8, 8, use_mlp=True),
        PointMappingSAM(8, last_supported=4, n_classes=8),
    )
    return Encoded(network, lambda own, x: own(x, class_vector=torch.tensor([[1], [2]])))


def _netadapter() -> nn.Module:
    trunk = nets.resnet10(spatial_dims=3, n_input_channels=1, num_classes=3, widen_factor=0.125)
    return nets.NetAdapter(trunk, num_classes=2, dim=3, pool=("adaptiveavg", {"output_size": 1}))


UNET: dict[str, Any] = {"channels": (4, 8, 8), "strides": (2, 2)}
REGRESSION: dict[str, Any] = {"channels": (4, 8), "strides": (2, 2), "dropout": None}
MORPH: dict[str, Any] = {
    "spatial_dims": 3, "in_channels": 2, "unet_out_channels": 4, "channels": (4, 4, 4, 4, 4, 4),
    "final_conv_channels": (4, 4),
}  # fmt: skip


def _morph(integration_steps: int, half_res: bool) -> nn.Module:
    backbone = nets.VoxelMorphUNet(**MORPH)
    return Registered(nets.VoxelMorph(backbone, integration_steps, half_res, 3))


CASES: dict[str, Case] = {
    "AHNet": Case(lambda: nets.AHNet((1, 1, 1, 1), 3, 1, 2, psp_block_num=2), (64, 32, 32)),
    "AttentionUnet": Case(lambda: nets.AttentionUnet(3, 1, 2, **UNET), (16, 12, 8)),
    "AutoEncoder": Case(lambda: nets.AutoEncoder(3, 1, 2, (4, 8), (2, 2)), (16, 12, 8)),
    "BasicUNet": Case(lambda: nets.BasicUNet(3, 1, 2, (2, 2, 4, 4, 4, 2)), (32, 16, 16)),
    "BasicUNetPlusPlus": Case(
        lambda: nets.BasicUNetPlusPlus(3, 1, 2, (2, 2, 2, 4, 4, 2), deep_supervision=True),
        (16, 16, 32),
    ),
    "Classifier": Case(lambda: nets.Classifier((1, 16, 12, 8), 3, **REGRESSION), (16, 12, 8)),
    "Critic": Case(lambda: nets.Critic((1, 16, 12, 8), **REGRESSION), (16, 12, 8)),
    "DAF3D": Case(lambda: nets.DAF3D(1, 2), (32, 32, 32)),
    "DenseNet121": Case(
        lambda: nets.DenseNet121(3, 1, 3, init_features=4, growth_rate=2), (48, 32, 32)
    ),
    "DiNTS, instance": Case(_dints, (32, 32, 32)),
    "DiNTS, search": Case(_dints_search, (32, 32, 32)),
    "Discriminator": Case(lambda: nets.Discriminator((1, 16, 12, 8), **REGRESSION), (16, 12, 8)),
    "DynUNet": Case(
        lambda: nets.DynUNet(
            3, 1, 2, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=[4, 4, 8, 8], deep_supervision=True,
            deep_supr_num=2,
        ), (16, 16, 16),
    ),
    "EfficientNetBN": Case(
        lambda: nets.EfficientNetBN(
            "efficientnet-b0", pretrained=False, spatial_dims=3, in_channels=1, num_classes=3
        ), (64, 32, 32),
    ),
    "FlexibleUNet": Case(
        lambda: nets.FlexibleUNet(
            1, 2, "resnet10", spatial_dims=3, decoder_channels=(8, 8, 4, 4, 4)
        ), (32, 32, 32),
    ),
    "GlobalNet": Case(_global_net, (16, 16, 16), 2),
    "HighResNet": Case(
        lambda: nets.HighResNet(
            3, 1, 2, layer_params=(
                {"name": "conv_0", "n_features": 4, "kernel_size": 3},
                {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 2},
                {"name": "res_2", "n_features": 6, "kernels": (3, 3), "repeat": 2},
                {"name": "conv_1", "n_features": 8, "kernel_size": 1},
                {"name": "conv_2", "kernel_size": 1},
            ),
        ), (9, 8, 7),
    ),
    "HyenaNDUNETR": Case(
        lambda: nets.HyenaNDUNETR(
            1, 2, (True, True, False, False), 12, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1),
            window_size=2,
        ), (64, 32, 32),
    ),
    "LocalNet": Case(lambda: nets.LocalNet(3, 2, 4, (0, 1, 2)), (16, 16, 16), 2),
    "MaskedAutoEncoderViT": Case(_masked_autoencoder, (16, 16, 8)),
    "MedNeXt": Case(
        lambda: nets.MedNeXt(
            3, 4, 1, 2, kernel_size=3, blocks_down=(1, 1, 1, 1), blocks_bottleneck=1,
            blocks_up=(1, 1, 1, 1), deep_supervision=True, use_residual_connection=True,
            global_resp_norm=True,
        ), (32, 16, 16),
    ),
    "MultiScalePatchDiscriminator": Case(
        lambda: nets.MultiScalePatchDiscriminator(2, 1, 3, 4, 1, minimum_size_im=16), (32, 32, 32)
    ),
    "NaViT": Case(
        lambda: Encoded(
            nets.NaViT((16, 16, 8), 4, num_classes=3, num_layers=1, **TOKENS),
            lambda own, x: own([[sample] for sample in x]),
        ), (16, 16, 8),
    ),
    "NetAdapter": Case(_netadapter, (32, 32, 32)),
    "PatchDiscriminator": Case(
        lambda: nets.PatchDiscriminator(3, 4, 1, num_layers_d=2), (16, 24, 16)
    ),
    "RegUNet": Case(lambda: nets.RegUNet(3, 2, 4, 2), (16, 16, 16), 2),
    "Regressor": Case(lambda: nets.Regressor((1, 16, 12, 8), (2, 2), **REGRESSION), (16, 12, 8)),
    "ResNet10": Case(
        lambda: nets.resnet10(
            spatial_dims=3, n_input_channels=1, num_classes=3, widen_factor=0.125
        ), (32, 20, 16),
    ),
    "ResNetFeatures": Case(
        lambda: nets.ResNetFeatures("resnet10", pretrained=False, spatial_dims=3, in_channels=1),
        (32, 16, 16),
    ),
    "SegResNet": Case(
        lambda: nets.SegResNet(3, 8, 1, 2, blocks_down=(1, 2, 2), blocks_up=(1, 1)), (12, 8, 8)
    ),
    "SegResNetDS": Case(
        lambda: nets.SegResNetDS(3, 4, 1, 2, blocks_down=(1, 1, 1), dsdepth=2), (16, 16, 8)
    ),
    "SegResNetDS2": Case(
        lambda: nets.SegResNetDS2(3, 4, 1, 2, blocks_down=(1, 1, 1), dsdepth=2), (16, 16, 8)
    ),
    "SegResNetVAE": Case(
        lambda: nets.SegResNetVAE(
            (16, 16, 16), vae_nz=4, blocks_down=(1, 1, 1), blocks_up=(1, 1)
        ), (16, 16, 16),
    ),
    "SENet": Case(
        lambda: nets.SENet(
            3, 1, block="se_bottleneck", layers=(1, 1, 1, 1), groups=2, reduction=4, inplanes=16,
            num_classes=3, dropout_prob=None,
        ), (64, 20, 16),
    ),
    "SPADENet": Case(_spade_net, (8, 8, 8)),
    "SPADEAutoencoderKL": Case(_spade_autoencoder, (8, 8, 8)),
    "UNet": Case(lambda: nets.UNet(3, 1, 2, num_res_units=2, **UNET), (16, 12, 8)),
    "VarAutoEncoder": Case(
        lambda: Encoded(
            nets.VarAutoEncoder(3, (1, 16, 16, 8), 1, 2, (4, 8), (2, 2)),
            lambda own, x: own.decode_forward(sum(own.encode_forward(x))),
        ), (16, 16, 8),
    ),
    "VISTA3D": Case(_vista3d, (16, 16, 16)),
    "VNet": Case(lambda: nets.VNet(3, 1, 2), (16, 16, 16)),
    "VoxelMorph": Case(lambda: _morph(2, False), (32, 32, 32), 2),
    "VoxelMorph, half resolution": Case(lambda: _morph(2, True), (32, 32, 32), 2),
    "VoxelMorphUNet": Case(lambda: nets.VoxelMorphUNet(**MORPH), (32, 32, 32), 2),
    "VQVAE": Case(
        lambda: nets.VQVAE(
            3, 1, 1, (4, 4), 1, (4, 4), ((2, 4, 1, 1),) * 2, ((2, 4, 1, 1, 0),) * 2, 8, 4
        ), (16, 16, 8),
    ),
    **attention.CASES,
}  # fmt: skip
