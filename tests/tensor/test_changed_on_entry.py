"""In-place changes of sharded tensors that are split from plain ones other than parameters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import distribute_tensor, parallelize
from pydist.errors import NotSupported
from support.equivalence import assert_same, on_ranks, randn, whole_of

SHAPE = (2, 3, 5, 4, 3)
GRIDS = [(1, 1, 1), (2, 1, 1), (3, 2, 1)]


class _Assigns(nn.Module):
    def forward(self, x):
        x[:, :, 0] = 2 * x[:, :, 1]
        x[:, :1].sigmoid_()
        return x


FIRST = {
    "relu": lambda: nn.ReLU(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "assignments": _Assigns,
}
INPUTS = {"product": lambda x: x * 1, "slice": lambda x: (x * 2)[:, :, :4]}


def _gradients(ready, first, given, after=lambda h: 0.0):
    model = nn.Sequential(FIRST[first](), nn.Conv3d(3, 2, 3, padding=1)).double()
    for seed, p in enumerate(model.parameters()):
        p.data = randn(*p.shape, seed=seed)
    model = ready(model)
    x = randn(*SHAPE).requires_grad_()
    h = given(x)
    before = 2 * h.sum()  # saves no tensor that the change affects
    loss = model(h).sin().sum() + before + after(h)
    loss.backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("spatial", GRIDS)
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("first", FIRST)
def test_a_first_layer_in_place(first, given, spatial):
    expected = _gradients(lambda model: model, first, INPUTS[given])

    def body(mesh):
        return _gradients(lambda model: parallelize(model, mesh), first, INPUTS[given])

    for found in on_ranks(spatial, body):
        assert_same(found, expected)


def test_what_torch_refuses_is_refused_on_all_ranks():
    def body(mesh):
        def ready(model):
            return parallelize(model, mesh)

        with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
            _gradients(ready, "relu", lambda x: x.exp())
        with pytest.raises(RuntimeError, match=r"modified inplace"):
            _gradients(ready, "relu", lambda x: x)

    on_ranks((2, 1, 1), body)


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [torch.Tensor, _Subclass])
def test_the_plain_tensor_has_no_gradient_after_the_change(kind):
    """Each rank changes only its own block; on a single rank the block is the full tensor."""

    def given(x):
        return (x * 1).as_subclass(kind)

    expected = _gradients(lambda model: model, "elu", given, lambda h: h.sum())

    def body(mesh):
        def run():
            return _gradients(
                lambda model: parallelize(model, mesh), "elu", given, lambda h: h.sum()
            )

        if mesh.size == 1:
            assert_same(run(), expected)
        else:
            with pytest.raises(NotSupported, match="after it was cut over the ranks and changed"):
                run()

    on_ranks((1, 1, 1), body)
    on_ranks((3, 1, 1), body)


CHANGING = {
    "at once": lambda: nn.Sequential(nn.ELU(1.0, True), nn.Conv3d(2, 2, 3, padding=1)),
    "with what follows": lambda: nn.Sequential(nn.ReLU(True), nn.AvgPool3d(3, 1, 1)),
}


@pytest.mark.parametrize("make", CHANGING.values(), ids=CHANGING)
def test_a_plain_batch_that_the_model_changes_in_place(make):
    """Calls that need only the block of a rank see the change, as in torch."""

    def losses(model, x):
        found = [model(x).square().mean(), F.mse_loss(model(x), x), (model(x) * x).mean()]
        x.copy_(randn(2, 2, 6, 4, 3, seed=1))
        return [*found, model(x).square().mean()]

    torch.manual_seed(0)
    whole = make().double()
    expected = losses(whole, randn(2, 2, 6, 4, 3))

    def body(mesh):
        model, x = parallelize(copy.deepcopy(whole), mesh), randn(2, 2, 6, 4, 3)
        found = losses(model, x)
        model(x)
        with pytest.raises(NotSupported, match="each rank changed only its own block"):
            distribute_tensor(x, mesh, {3: "depth"})
        return found

    for found in on_ranks((3, 1, 1), body):
        assert_same(found, expected)


def test_a_change_without_gradients_leaves_the_leaf():
    """The leaf also stays a leaf on ranks whose block is an empty view."""

    def gradient(x):
        x.requires_grad_()
        y = (x * 1).square()
        with torch.no_grad():
            x.mul_(0.5)
        return torch.autograd.grad(y.sum(), x)[0]

    whole = randn(1, 2, 1, 3, 2)
    expected = gradient(whole.clone())

    def body(mesh):
        return gradient(distribute_tensor(whole.clone(), mesh)).full_tensor()

    for found in on_ranks((2, 1, 1), body):
        assert torch.equal(found, expected)


def test_a_leaf_that_a_first_layer_changes_without_gradients():
    def outputs(ready):
        one, other = (ready(nn.Sequential(nn.ReLU(inplace=True))) for _ in range(2))
        x = randn(*SHAPE).requires_grad_()
        with torch.no_grad():
            one(x)
            return whole_of(other(x)).clone()

    expected = outputs(lambda model: model)

    def body(mesh):
        return outputs(lambda model: parallelize(model, mesh))

    for found in on_ranks((2, 1, 1), body):
        assert_same(found, expected)
