"""User-chosen ways to run a network: autocast, scaler, parametrizations, loaders."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from pydist import ShardedTensor, distribute_tensor, parallelize, sum_over_groups
from pydist.errors import NotSupported
from support.equivalence import group_slice, on_ranks, on_shards, randint, randn
from support.networks.small import initialized

SHAPE = (2, 2, 8, 6, 5)
X, LABELS = randn(*SHAPE), randint(3, 2, 8, 6, 5)


def network() -> nn.Module:
    return initialized(
        nn.Sequential(
            nn.Conv3d(2, 8, 3, padding=1),
            nn.InstanceNorm3d(8, affine=True),
            nn.PReLU(),
            nn.Conv3d(8, 3, 3, padding=1),
        )
    )


def relative(found, expected):
    """Returns max|Δ| over all gradients, relative to the largest of them."""
    scale = max(float(e.abs().max()) for e in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((f.double() - e).abs().max()) for f, e in pairs) / scale


def gradients(model, x, **autocast):
    with torch.autocast("cpu", enabled=bool(autocast), **autocast):
        y = model(x)
        loss = F.cross_entropy(y, LABELS)
    if autocast.get("dtype") == torch.float16:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
    return [p.grad for p in model.parameters()], y.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_autocast_loses_no_more_than_on_one_device(dtype, layout):
    """fp16 runs with a gradient scaler."""
    exact, _ = gradients(network(), X)
    model = network().float().to(memory_format=layout)
    x = X.float().to(memory_format=layout)
    whole, expected_dtype = gradients(copy.deepcopy(model), x, dtype=dtype)
    allowed = 2 * relative(whole, exact)

    def body(mesh):
        found, kind = gradients(parallelize(copy.deepcopy(model), mesh), x, dtype=dtype)
        assert kind == expected_dtype == dtype
        assert relative(found, exact) < allowed

    on_ranks((2, 1, 1), body)


PARAMETRIZED = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("parametrize", PARAMETRIZED.values(), ids=PARAMETRIZED)
def test_parametrizations(parametrize):
    model = network()
    parametrize(model[0])
    expected, _ = gradients(copy.deepcopy(model), X)

    def body(mesh):
        found, _ = gradients(parallelize(copy.deepcopy(model), mesh), X)
        assert relative(found, expected) < 1e-12

    on_ranks((2, 2, 1), body)


def test_functional_call():
    model = network()
    values = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    expected = functional_call(model, values, (X,))

    def body(mesh):
        own = parallelize(copy.deepcopy(model), mesh)
        found = functional_call(own, values, (X,)).full_tensor()
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_copied_model_predicts_without_gradients(mode):
    expected = network().eval()(X)

    def body(mesh):
        model = copy.deepcopy(parallelize(network(), mesh)).eval()
        with mode():
            y = model(X)
            assert not y.requires_grad
            torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-11, atol=1e-12)

    on_ranks((2, 1, 1), body)


AROUND = {
    "func.grad": torch.func.grad(lambda v: v.sum()),
    "vmap": torch.vmap(lambda v: v * 2),
    "jacrev": torch.func.jacrev(lambda v: v * 2),
    "jvp": lambda x: torch.func.jvp(lambda v: v * 2, (x,), (x,)),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float32),
}


@pytest.mark.parametrize("call", AROUND.values(), ids=AROUND)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_calls_around_the_overrides_are_refused_by_name(call):
    """The test runs on one rank: forward-mode levels form one stack per process."""

    def body(x, mesh):
        with pytest.raises(NotSupported, match=r"torch\.as_tensor.*torch\.func.*full_tensor"):
            call(x)

    on_shards(body, (1, 1, 1))


# -- MONAI's MetaTensor, treated as its plain tensor -----------------------------------------


def meta(tensor):
    return pytest.importorskip("monai.data").MetaTensor(tensor.clone())


MEETINGS = {
    "into a network": lambda m, x: parallelize(network(), x.mesh)(m),
    "distributed": lambda m, x: distribute_tensor(m, x.mesh) * 2,
    "first of two": lambda m, x: m * x,
    "second of two": lambda m, x: x - m,
    "joined": lambda m, x: torch.cat([m, x], 1),
    "a target": lambda m, x: F.mse_loss(x, m, reduction="none"),
    "labels": lambda m, x: F.cross_entropy(x, meta(LABELS) % 2, reduction="none"),
    "by keyword": lambda m, x: torch.where(x > 0, x, other=m),
}


@pytest.mark.parametrize("call", MEETINGS.values(), ids=MEETINGS)
def test_a_metatensor_is_taken_as_its_plain_tensor(call):
    def body(mesh):
        x = distribute_tensor(X, mesh)
        with torch.no_grad():
            found, expected = call(meta(X), x), call(X, x)
        assert type(found) is ShardedTensor
        assert torch.equal(found.full_tensor(), expected.full_tensor())

    on_ranks((2, 1, 1), body)


def _samples():
    return [(meta(X[i % 2]), meta(LABELS[i % 2])) for i in range(4)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_loader_of_metatensors(workers):
    monai = pytest.importorskip("monai.data")
    batches = list(
        DataLoader(_samples(), 2, num_workers=workers, collate_fn=monai.list_data_collate)
    )
    expected, _ = gradients(network(), X)

    def body(mesh):
        model = parallelize(network(), mesh)
        for x, labels in batches:
            assert type(x) is not torch.Tensor
            F.cross_entropy(model(x), labels).div(len(batches)).backward()
        assert relative([p.grad for p in model.parameters()], expected) < 1e-12

    on_ranks((2, 1, 1), body)


def test_other_wrapper_tensors_are_refused():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    def body(x, mesh):
        other = torch.Tensor._make_wrapper_subclass(Wrapper, x.shape, dtype=x.dtype)
        with pytest.raises(NotSupported, match="Wrapper where a plain tensor"):
            distribute_tensor(other, mesh)

    on_shards(body)


def test_a_codebook_follows_the_global_batch():
    """MONAI's VQVAE, whose quantizer computes in fp32, with the sums of docs/ecosystem.md."""
    nets = pytest.importorskip("monai.networks.nets")
    made = nets.VQVAE(
        3, 1, 1, channels=(4,), num_res_layers=1, num_res_channels=(4,), num_embeddings=8,
        downsample_parameters=((2, 4, 1, 1),), upsample_parameters=((2, 4, 1, 1, 0),),
        embedding_dim=4,
    )  # fmt: skip
    x = X[:, :1, ..., :4].float()

    def codebook(model, x):
        for _ in range(2):  # the second one uses the codes that the first one has changed
            model(x)
        return model.quantizer.quantizer.embedding.weight

    expected = codebook(copy.deepcopy(made), x)

    def body(mesh):
        def synchronize(counts, sums):
            for each in (counts, sums):
                each.copy_(sum_over_groups(each, mesh))

        model = copy.deepcopy(made)
        model.quantizer.quantizer.distributed_synchronization = synchronize
        mine = distribute_tensor(x[group_slice(mesh, 2)], mesh)
        torch.testing.assert_close(codebook(parallelize(model, mesh), mine), expected)

    on_ranks((2, 1, 1), body, 2)
