"""Split interpolation equals the one-device run: torch's index arithmetic, at any size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from pydist import distribute_tensor
from pydist.errors import NotSupported
from pydist.exchange.exchanger import Exchanger
from pydist.ops.resampling import taps
from pydist.ops.resampling.resample_plan import ResamplePlan
from pydist.ops.resampling.taps import Resize, taps_of, upsample
from support.equivalence import (
    assert_same,
    check_function,
    error,
    layout_at,
    on_ranks,
    on_shards,
    randint,
    randn,
    shard,
    whole_of,
)
from support.equivalence.strategies import cuts

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
MODES = {
    "nearest": (1, 2, 3), "nearest-exact": (1, 2, 3), "linear": (1, 2, 3), "bicubic": (2,),
}  # fmt: skip
CASES = [(mode, dims) for mode, all_dims in MODES.items() for dims in all_dims]
FACTORS = [0.5, 0.7, 1.0, 1.1, 1.5, 2, 2.3, 3, 4]


@st.composite
def resizes(draw: st.DrawFn, mode: str, extents: list[int]) -> dict[str, object]:
    """Draws options of `interpolate` for given extents."""
    dims = len(extents)
    options: dict[str, object] = {"mode": LINEAR[dims] if mode == "linear" else mode}
    if not mode.startswith("nearest"):
        options["align_corners"] = draw(st.sampled_from([None, False, True]))
    if draw(st.booleans()):
        options["size"] = draw(st.lists(st.integers(1, 13), min_size=dims, max_size=dims))
        return options
    # Each dim keeps at least one element.
    options["scale_factor"] = [
        draw(st.sampled_from([f for f in FACTORS if int(n * f) >= 1])) for n in extents
    ]
    options["recompute_scale_factor"] = draw(st.sampled_from([None, False, True]))
    return options


@pytest.mark.parametrize(("mode", "dims"), CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_size(mode, dims, data):
    extents = data.draw(st.lists(st.integers(1, 8), min_size=dims, max_size=dims), "extents")
    options = data.draw(resizes(mode, extents), "options")
    x = randn(1, 2, *extents)
    if data.draw(st.booleans(), "channels last"):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    assume(has_true_gradient(options, x))
    check_function(
        lambda x: F.interpolate(x * x, **options), x, (), data.draw(cuts(extents), "points"),
        second_order=data.draw(st.booleans(), "second order"),
    )  # fmt: skip


def has_true_gradient(options, x) -> bool:
    """Returns whether torch's gradient matches its result: the sums over both are equal."""
    leaf = torch.ones_like(x).requires_grad_()
    y = F.interpolate(leaf * x, **options)
    (grad,) = torch.autograd.grad(y.sum(), leaf)
    return error(grad.sum(), y.sum().detach()) < 1e-9


CALLS = {
    "Upsample, trilinear ×2": nn.Upsample(scale_factor=2, mode="trilinear"),
    "Upsample, aligned": nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True),
    "Upsample to a size": nn.Upsample(size=(7, 9, 4), mode="nearest"),
    "nearest ×2": lambda x: F.interpolate(x, None, 2),
    "halved": lambda x: F.interpolate(x, scale_factor=0.5, mode="trilinear"),
    "one dim": lambda x: F.interpolate(x, scale_factor=(1, 1, 2), mode="trilinear"),
    "the same size": lambda x: F.interpolate(x, x.shape[2:], mode="trilinear").neg_() + x,
    "the same size by a factor": lambda x: F.interpolate(x, scale_factor=1.1, mode="trilinear"),
    "area": lambda x: F.interpolate(x, size=(3, 2, 4), mode="area"),
    "area by a factor": lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
    "one row as a volume": lambda x: F.interpolate(x.mean(2, keepdim=True), size=(3, 4, 8)),
}
POINTS = {
    "2x1x1": [[0, 3, 6], None, None],
    "4x1x2, some empty": [[0, 0, 1, 6, 6], None, [0, 1, 4]],
    "2x2x2": [[0, 2, 6], [0, 3, 4], [0, 0, 4]],
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_by_name_to_second_order(call, points):
    check_function(lambda x: call(x * x), randn(2, 3, 6, 4, 4), (), points, second_order=True)


@pytest.mark.filterwarnings("ignore:`nn.functional.upsample")
def test_the_old_name():
    check_function(lambda x: F.upsample(x, scale_factor=2), randn(1, 2, 5), (), [[0, 2, 5]])


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
@pytest.mark.parametrize("points", [(0, 3, 8), (0, 0, 8), (0, 4, 8)])
def test_a_decoder_comes_back_to_the_encoders_partition(mode, points):
    def body(mesh):
        layout = layout_at(mesh, (1, 2, 8, 6, 4), [points, None, None])
        y = F.interpolate(shard(randn(*layout.shape), layout), scale_factor=2, mode=mode)
        assert y.layout.splits[2].partition.points == tuple(2 * p for p in points)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ({"scale_factor": 2}, 0),
        ({"scale_factor": 3, "mode": "nearest-exact"}, 0),
        ({"scale_factor": 2, "mode": "trilinear"}, 2),
        ({"size": (4, 1, 1), "mode": "trilinear"}, 0),
        ({"size": (15, 1, 1), "mode": "trilinear", "align_corners": True}, 2),
    ],
)
def test_only_what_lies_across_a_cut_travels(options, elements, monkeypatch):
    sent = []
    start = Exchanger.start

    def counting(self, local):
        sent.extend(message.elements for message in self.plan.sends)
        return start(self, local)

    monkeypatch.setattr(Exchanger, "start", counting)
    on_shards(lambda x, _: F.interpolate(x, **options), shape=(1, 1, 8, 1, 1))
    assert sum(sent) == elements


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"scale_factor": 2}, True),
        ({"scale_factor": 4, "mode": "trilinear"}, True),
        ({"scale_factor": 0.5, "mode": "trilinear"}, True),
        ({"scale_factor": 2, "mode": "trilinear", "align_corners": True}, False),
    ],
)
def test_torch_computes_on_the_shard_where_its_numbers_are_the_same(options, own):
    """Other cases go tap by tap; in fp32 both agree within torch's own rounding."""
    x = randn(1, 2, 8, 8, 8).float().to(memory_format=torch.channels_last_3d)
    expected = F.interpolate(x, **options)

    def body(mesh):
        y = F.interpolate(shard(x, layout_at(mesh, x.shape, [[0, 4, 8], None, None])), **options)
        assert error(y.full_tensor().detach(), expected) < 1e-6
        assert y.to_local().is_contiguous(memory_format=torch.channels_last_3d)
        (plan,) = (plan for plan in mesh.session.plans.values() if isinstance(plan, ResamplePlan))
        return plan._call is not None

    assert on_ranks((2, 1, 1), body) == [own, own]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("mode", "dims"), [(m, d) for m, d in CASES if d == 1 or m == "bicubic"])
@settings(max_examples=40)
@given(data=st.data())
def test_taps_are_those_of_torch(mode, dims, dtype, data):
    """torch's kernel applied to an identity gives the weights of each output in a column."""
    extent, factor = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([None, *FACTORS]))
    out = data.draw(st.integers(1, 90)) if factor is None else int(extent * factor)
    size = Resize(extent, max(1, out), factor)
    align = False if mode.startswith("nearest") else data.draw(st.booleans())
    mode = LINEAR[1] if mode == "linear" else mode
    rest = (1,) * (dims - 1)
    identity = torch.eye(extent, dtype=dtype).view(1, extent, extent, *rest)
    expected = upsample(mode, identity, (size.out, *rest), [factor, *[None] * (dims - 1)], align)
    taps = taps_of(mode, size, align, dims, identity)
    weights = torch.ones_like(taps.indices, dtype=dtype) if taps.weights is None else taps.weights
    found = torch.zeros(extent, size.out, dtype=dtype).scatter_add_(0, taps.indices, weights)
    eps = torch.finfo(dtype).eps
    # A position near an integer may be rounded to its other side: the weights are continuous.
    assert float((found - expected.view(extent, -1)).abs().max()) <= 8 * eps * (extent + 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_labels(mode, dtype):
    x = randint(250, 1, 1, 37, 5, 4).to(dtype)
    options = {"size": (61, 7, 4), "mode": mode}

    def body(mesh):
        split = shard(x, layout_at(mesh, x.shape, [[0, 11, 11, 20, 37], None, [0, 1, 4]]))
        assert torch.equal(
            F.interpolate(split, **options).full_tensor(), F.interpolate(x, **options)
        )

    on_ranks((4, 1, 2), body)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2,), {"scale_factor": 1.3}),  # forward repeats an element, backward copies
        ((6,), {"size": 74}),  # source indices in two dtypes, rounded differently
        ((3, 3), {"scale_factor": 1.3, "mode": "bicubic"}),
    ],
)
def test_a_gradient_that_torch_has_wrong(shape, options):
    x = randn(1, 1, *shape)
    assert not has_true_gradient(options, x)

    def body(mesh):
        points = [[0, 1, shape[0]], *[None] * (len(shape) - 1)]
        split = shard(x, layout_at(mesh, x.shape, points))
        with pytest.raises(NotSupported, match=r"torch's gradient of .* is not that of its result"):
            F.interpolate(split, **options)
        with torch.no_grad():
            y = F.interpolate(split, **options)
        assert error(y.full_tensor(), F.interpolate(x, **options)) < 1e-14

    on_ranks((2, 1, 1), body)


def test_a_nan_stays_where_it_is():
    x = randn(1, 1, 8, 4, 4)
    x[0, 0, 3] = torch.nan
    check_function(
        lambda x: F.interpolate(x, size=(12, 4, 4), mode="trilinear").detach(), x, (),
        [[0, 4, 8], None, None],
    )  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.interpolate(x, size=7),
        lambda x: F.interpolate(x, size=7, mode="linear"),
        lambda x: F.pad(x, (2, 3), "reflect"),
        lambda x: torch.flip(x, (2,)),
    ],
)
def test_what_inference_has_planned_serves_training(call):
    def body(mesh):
        x = shard(randn(1, 1, 5), layout_at(mesh, (1, 1, 5), [[0, 1, 5]]))
        with torch.inference_mode(), torch.device("meta"):  # as of `set_default_device`
            call(x)
        call(x * x).sum().backward()
        return x.grad.full_tensor()

    whole = randn(1, 1, 5).requires_grad_()
    call(whole * whole).sum().backward()
    for grad in on_ranks((2, 1, 1), body):
        assert error(grad, whole.grad) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("align", [False, True])
def test_narrow_values_are_rounded_once(dtype, align):
    x = randn(1, 2, 8, 6, 4).to(dtype)
    options = {"size": (13, 7, 9), "mode": "trilinear", "align_corners": align}
    expected = F.interpolate(x, **options)

    def body(mesh):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.interpolate(shard(x, layout_at(mesh, x.shape, POINTS_OF_8)), **options)
        assert error(y.full_tensor().detach().double(), expected.double()) <= torch.finfo(dtype).eps
        assert y.dtype == dtype

    on_ranks((2, 1, 2), body)


@pytest.mark.parametrize("options", [
    {"size": (13, 7, 9)}, {"scale_factor": 2, "align_corners": True}, {"scale_factor": 2},
], ids=str)  # fmt: skip
def test_autocast_of_devices_computes_in_float32(options, monkeypatch):
    """Some ranks run torch's kernel, others add up taps."""
    kernel = taps._KERNELS["trilinear", 3]

    def as_on_devices(x, *args):
        is_mixed = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
        return kernel(x.float() if is_mixed else x, *args)

    monkeypatch.setitem(taps._KERNELS, ("trilinear", 3), as_on_devices)
    x = randn(1, 2, 8, 6, 4).bfloat16()
    expected = F.interpolate(x.float(), mode="trilinear", **options)

    def body(mesh):
        with torch.autocast("cpu", torch.bfloat16):
            split = shard(x, layout_at(mesh, x.shape, POINTS_OF_8))
            y = F.interpolate(split, mode="trilinear", **options).full_tensor()
        torch.testing.assert_close(y.detach(), expected)

    on_ranks((2, 1, 2), body)


POINTS_OF_8 = [[0, 3, 8], None, [0, 2, 4]]
REFUSED = {
    "antialias": (
        lambda x: F.interpolate(x[:, :, :, 0], size=(3, 3), mode="bilinear", antialias=True),
        NotSupported, "antialias",
    ),
    "blended integers": (
        lambda x: F.interpolate((x[:, :, 0] > 0).byte(), size=(3, 3), mode="bilinear"),
        NotSupported, "uint8",
    ),
    "size and factor": (lambda x: F.interpolate(x, 2, 2.0), ValueError, "only one of"),
    "neither": (F.interpolate, ValueError, "either size"),
    "another number of dims": (
        lambda x: F.interpolate(x, 3, mode="bilinear"), NotImplementedError, "4D input",
    ),
    "aligned neighbors": (
        lambda x: F.interpolate(x, 3, align_corners=True), ValueError, "align_corners",
    ),
    "nothing left": (lambda x: F.interpolate(x, scale_factor=0.1), RuntimeError, "greater than 0"),
    "integers that torch has no kernel for": (
        lambda x: F.interpolate((x > 0).long(), 3), NotImplementedError, "Long",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, kind, message):
    def body(x, _):
        with pytest.raises(kind, match=message):
            call(x)

    on_shards(body, spatial=(1, 1, 2), shape=(1, 2, 4, 4, 4))


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_a_batch_of_nothing_is_scaled_to_nothing(mode):
    def body(mesh):
        shape = (0, 3, 6, 4, 4)
        x = shard(torch.zeros(shape), layout_at(mesh, shape, [[0, 2, 6], None, None]))
        y = F.interpolate(x, scale_factor=2, mode=mode)
        y.square().sum().backward()
        return y.shape, x.grad.shape, y.to_local().shape

    for rank, (shape, of_grad, local) in enumerate(on_ranks((2, 1, 1), body)):
        assert shape == (0, 3, 12, 8, 8)
        assert of_grad == (0, 3, 6, 4, 4)
        assert local == (0, 3, (4, 8)[rank], 8, 8)


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("options", [{"antialias": True}, {"align_corners": True}])
def test_cut_channels_alone(channels, options):
    """Each rank resizes its channels by torch's function; of 1 channel, a rank has none."""

    def run(x):
        x = x.detach().requires_grad_()
        y = F.interpolate(x[:, :channels], size=(5, 3), mode="bilinear", **options)
        y.sin().sum().backward()
        return [whole_of(y.detach()), whole_of(x.grad)]

    x = randn(2, 5, 7, 6)
    expected = run(x)

    def split(mesh):
        return run(distribute_tensor(x, mesh, {1: "channel"}))

    for found in on_ranks((1, 1, 1), split, axes={"channel": 2}):
        assert_same(found, expected)
