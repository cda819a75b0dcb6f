"""Draws torch's layers, as source, with random settings that fit an input shape."""

from __future__ import annotations

import math
from typing import Any

from support.random_networks.spot import Source, Spot, call


def conv(s: Spot) -> Source:
    groups = s.pick(1, 1, 1, 2, s.channels)
    if s.channels % groups:
        return call("nn.Identity")
    stride, dilation = s.each(1, 2), s.each(1, 2)
    kernel = s.each(1, 4)
    padding: Any = s.each(0, 2)
    if s.flag():  # common settings
        kernel, dilation = (3,) * s.dims, (1,) * s.dims
        padding = "same" if stride == (1,) * s.dims and s.flag() else 1
    return s.layer(
        "Conv",
        s.channels, groups * s.number(1, max(1, 6 // groups)), kernel, stride, padding, dilation,
        groups, s.flag(), s.pick("zeros", "zeros", "reflect", "replicate", "circular"),
    )  # fmt: skip


def transposed(s: Spot) -> Source:
    groups = s.pick(1, 1, 1, 2)
    stride, dilation = s.each(1, 3), s.each(1, 2)
    if s.channels % groups:
        return call("nn.Identity")
    extra = tuple(s.number(0, max(a, b) - 1) for a, b in zip(stride, dilation, strict=True))
    return s.layer(
        "ConvTranspose",
        s.channels, groups * s.number(1, 2), s.each(1, 4), stride, s.each(0, 2), extra,
        groups, s.flag(), dilation,
    )  # fmt: skip


def pool(s: Spot) -> Source:
    kernel, stride = s.each(1, 3), s.each(1, 3)
    padding = tuple(s.number(0, k // 2) for k in kernel)
    kind = s.pick("max", "avg", "adaptive avg", "adaptive max", "unpool", "lp")
    if kind == "max":
        return s.layer("MaxPool", kernel, stride, padding, s.each(1, 2), ceil_mode=s.flag())
    if kind == "avg":
        options: dict[str, Any] = {"ceil_mode": s.flag(), "count_include_pad": s.flag()}
        if s.dims > 1 and s.flag():
            options["divisor_override"] = 5
        return s.layer("AvgPool", kernel, stride, padding, **options)
    if kind == "unpool":
        return call("Unpooled", s.dims, 2)
    if kind == "lp":
        # Applied to |x|^p with a positive sum: at zero the root has no slope.
        positive = call("Expression", "x.square() + 0.1")
        return call("nn.Sequential", positive, s.layer("LPPool", 2, kernel, stride))
    size = tuple(s.pick(None, s.number(1, n + 1)) for n in s.extents)
    return s.layer("AdaptiveAvgPool" if kind == "adaptive avg" else "AdaptiveMaxPool", size)


def norm(s: Spot) -> Source:  # noqa: PLR0911
    if math.prod(s.extents) < 8:
        return call("nn.Identity")  # over few values a norm amplifies noise beyond any bound
    kind = s.pick("batch", "batch", "instance", "instance", "group", "layer", "response", "rms")
    c, affine = s.channels, s.flag()
    if kind == "batch":
        source = s.layer("BatchNorm", c, affine=affine, momentum=s.pick(0.1, None))
        return Source(f"{source}.eval()") if s.flag() and s.flag() else source
    if kind == "instance":
        return s.layer("InstanceNorm", c, affine=affine, track_running_stats=s.flag())
    if kind == "group":
        return call(
            "nn.GroupNorm", s.pick(*(g for g in range(1, c + 1) if c % g == 0)), c, affine=affine
        )
    if kind == "response":
        return call("nn.LocalResponseNorm", s.number(1, 3))
    over = s.shape[s.number(1, s.dims + 1) :]
    if math.prod(over) < 8:
        over = s.shape[1:]
    if kind == "layer":
        return call("nn.LayerNorm", over, elementwise_affine=affine)
    return call("nn.RMSNorm", over, eps=1e-3)


ACTIVATIONS = """
ReLU() ReLU(inplace=True) LeakyReLU(0.1) LeakyReLU(0.1,inplace=True) PReLU() ELU() ELU(inplace=True)
SELU() CELU(0.5) GELU() GELU("tanh") SiLU() SiLU(inplace=True) Mish() Softplus() Hardswish()
Hardsigmoid() Hardtanh(inplace=True) ReLU6() Tanh() Sigmoid() Softsign() LogSigmoid() Tanhshrink()
Softshrink() Hardshrink() Threshold(0.1,0.2) GLU(1) Softmax(1) LogSoftmax(1) Softmin(1)
Dropout(0.0) RReLU(0.2,0.2)
""".split()


def activation(s: Spot) -> Source:
    own = (
        f"PReLU({s.channels})",
        "Dropout(0.5).eval()",
        "AlphaDropout(0.2).eval()",
        f"Dropout{s.dims}d(0.0)",
        # Without a height, Softmax2d treats samples as channels.
        "Softmax2d()" if s.dims > 1 else "Softmax(1)",
    )
    return Source(f"nn.{s.pick(*ACTIVATIONS, *own)}")


def resample(s: Spot) -> Source:
    linear = ("linear", "bilinear", "trilinear")[s.dims - 1]
    modes = ["nearest", "nearest-exact", "area", linear, linear, *["bicubic"] * (s.dims == 2)]
    mode = s.pick(*modes)
    options: dict[str, Any] = {"mode": mode}
    if mode in (linear, "bicubic"):
        options["align_corners"] = s.flag()
    if s.flag():
        options["size"] = tuple(s.number(1, n + 4) for n in s.extents)
    else:
        options["scale_factor"] = tuple(s.pick(2.0, 2.0, 1.5, 0.5, 0.7) for _ in s.extents)
        if s.flag() and mode != "nearest-exact":
            options["recompute_scale_factor"] = True
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return call("Expression", f"F.interpolate(x, {text})")


def shuffled(s: Spot) -> Source:
    grown = s.layer("Conv", s.channels, 2**s.dims, 1)
    if s.dims != 2 or s.flag():
        return call("nn.Sequential", grown, call("Subpixels"))
    if s.flag():
        return call("nn.PixelUnshuffle", 2)
    return call("nn.Sequential", grown, call("nn.PixelShuffle", 2))


def padded(s: Spot) -> Source:
    mode = s.pick("constant", "reflect", "replicate", "circular")
    # In torch, circular padding after a crop reads uninitialized memory if too little is left.
    low = 0 if mode == "circular" else s.pick(0, 0, -1)
    widths = tuple(s.number(low, 2) for _ in range(2 * s.dims))
    value = f", value={s.pick(0.0, 0.5)}" if mode == "constant" else ""
    return call("Expression", f"F.pad(x, {widths}, mode={mode!r}{value})")


def attention(s: Spot) -> Source:
    kind = s.number(0, 6)
    if kind == 0:
        return call("SqueezeExcite", s.channels, s.dims, s.pick("mean", "flat", "adaptive"))
    if kind == 1:
        return call("SpatialGate", Source(f"nn.Conv{s.dims}d"))
    if kind == 2:
        return call("ChannelAttention", s.pick("einsum", "bmm", "matmul"))
    if kind == 3:
        return call("Positions", s.extents, s.flag())
    if kind == 4:
        how = s.pick("matmul", "bmm", "fused", "causal", "layer")
        return call("VoxelAttention", s.channels, how)
    return call("ChannelLinear", s.channels, s.number(1, 6), s.flag(), s.flag())
