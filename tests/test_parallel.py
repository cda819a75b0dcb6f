"""Tests of `parallelize`: same network, same numbers, same nn.Module behavior."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import ShardedTensor, distribute_tensor, parallelize
from pydist.errors import NotSupported, UsageError
from support.equivalence import (
    check_network,
    group_slice,
    on_ranks,
    on_shards,
    randn,
    whole_answer,
)
from support.networks.small import BATCH, SHAPE, small, small_task

GRIDS = [
    (1, (2, 1, 1)),
    (1, (3, 1, 1)),
    (1, (2, 2, 2)),
    (1, (1, 3, 2)),
    (1, (8, 1, 1)),
    (2, (2, 1, 1)),
    (2, (1, 2, 2)),
    (4, (1, 1, 1)),
]


# -- the same numbers -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "batch norm"])
def task_and_answer(request):
    task = small_task(norm=request.param)
    return task, whole_answer(task)


@pytest.mark.parametrize("keep_thin_blocks", [False, True], ids=["moved", "thin"])
@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_one_step(task_and_answer, data, spatial, keep_thin_blocks):
    task, answer = task_and_answer
    check_network(task, spatial, data, answer=answer, keep_thin_blocks=keep_thin_blocks)


def train(model, steps, batch, make=torch.optim.Adam, lr=1e-2):
    """Trains on the rows `batch` of each step's data; returns the losses."""
    optimizer = make(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        x, target = randn(*SHAPE, seed=10 + step)[batch], randn(BATCH, 3, seed=50 + step)[batch]
        dtype = next(model.parameters()).dtype
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.to(dtype)), target.to(dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 2, 2)), (2, (2, 1, 1)), (1, (3, 1, 1))])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_twenty_adam_steps(norm, data, spatial):
    whole = small(norm)
    train(whole, 20, slice(None))

    def body(mesh):
        model = parallelize(small(norm), mesh)
        train(model, 20, group_slice(mesh, BATCH))
        return dict(model.named_parameters())

    expected = dict(whole.named_parameters())
    for found in on_ranks(spatial, body, data):
        for name, p in expected.items():
            torch.testing.assert_close(found[name], p, rtol=1e-9, atol=1e-9)


def test_float32_is_no_further_from_float64_than_one_device():
    def gradients(model, x, target):
        F.mse_loss(model(x), target).backward()
        return {n: p.grad.double() for n, p in model.named_parameters()}

    x, target = randn(*SHAPE, seed=1), randn(BATCH, 3, seed=2)
    exact = gradients(small(), x, target)
    own = gradients(small().float(), x.float(), target.float())
    found = on_ranks(
        (2, 2, 1),
        lambda mesh: gradients(parallelize(small().float(), mesh), x.float(), target.float()),
    )
    for name, reference in exact.items():
        scale = reference.abs().max()
        error = (found[0][name] - reference).abs().max() / scale
        allowed = 4 * max(float((own[name] - reference).abs().max() / scale), 1e-7)
        assert error <= allowed, name


def test_the_same_layout_repeats_to_the_bit():
    def body(mesh):
        model = parallelize(small(norm=True, dropout=0.3).float(), mesh)
        losses = train(model, 5, group_slice(mesh, BATCH))
        return [losses, *(p.detach() for p in model.parameters()), *model.buffers()]

    first, again = (on_ranks((2, 2, 1), body, data=2) for _ in range(2))
    for mine, same in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, same, strict=True))


@pytest.mark.parametrize("data", [1, 2])
def test_dropout_does_not_know_the_split(data):
    def losses(data, spatial):
        def body(mesh):
            model = parallelize(small(dropout=0.5), mesh)
            loss = train(model, 4, group_slice(mesh, BATCH))
            mesh.world.all_reduce(loss)
            return loss / mesh.size

        return on_ranks(spatial, body, data)[0]

    torch.testing.assert_close(losses(data, (2, 1, 1)), losses(1, (1, 1, 1)), rtol=1e-10, atol=0)


@pytest.mark.parametrize("statistics", ["group", "rank"])
def test_other_statistics_train_and_replicas_stay_equal(statistics):
    def body(mesh):
        model = parallelize(small(norm=True), mesh, batch_norm=statistics)
        losses = train(model, 3, group_slice(mesh, BATCH))
        assert losses.isfinite().all()
        return [*model.parameters(), *model.buffers()]

    first, *others = on_ranks((2, 1, 1), body, data=2)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_one_rank_exchanges_nothing():
    def body(mesh):
        parallelize(small(norm=True), mesh)(randn(*SHAPE)).square().mean().backward()
        return mesh.session.timers.snapshot()

    (seconds,) = on_ranks((1, 1, 1), body)
    assert "halo" not in seconds
    assert "redistribute" not in seconds


# -- replicas -------------------------------------------------------------------------------


def test_replicas_start_and_stay_equal_however_they_are_seeded():
    def body(mesh):
        model = parallelize(small(norm=True, seed=mesh.rank), mesh)
        start = [t.clone() for t in model.state_dict().values()]
        train(model, 3, group_slice(mesh, BATCH))
        return start, list(model.state_dict().values())

    results = on_ranks((2, 1, 1), body, data=2)
    expected = list(small(norm=True, seed=0).state_dict().values())
    for start, end in results:
        assert all(torch.equal(a, b) for a, b in zip(start, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(end, results[0][1], strict=True))


def test_parameters_of_odd_strides_are_broadcast():
    def body(mesh):
        model = nn.Linear(3, 4).double()
        model.weight = nn.Parameter(randn(3, 4, seed=mesh.rank).t())
        parallelize(model, mesh)
        return model.weight.detach()

    for weight in on_ranks((2, 1, 1), body):
        assert torch.equal(weight, randn(3, 4).t())


# -- habits of nn.Module --------------------------------------------------------------------


def test_class_keys_and_object_stay():
    def body(mesh):
        model = small(norm=True)
        before = (type(model), list(model.state_dict()), [id(p) for p in model.parameters()])
        same = parallelize(model, mesh)
        assert same is model
        assert before == (
            type(model), list(model.state_dict()), [id(p) for p in model.parameters()],
        )  # fmt: skip
        assert repr(model) == repr(small(norm=True))

    on_ranks((2, 1, 1), body)


def test_plain_checkpoints_load_and_are_written(tmp_path):
    plain = small(norm=True, seed=5)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")

    def body(mesh):
        model = parallelize(small(norm=True), mesh)
        model.load_state_dict(torch.load(tmp_path / "plain.pt"))
        train(model, 1, slice(None))
        if mesh.rank == 0:
            torch.save(model.state_dict(), tmp_path / "trained.pt")

    on_ranks((2, 1, 1), body)
    train(plain, 1, slice(None))
    back = small(norm=True)
    back.load_state_dict(torch.load(tmp_path / "trained.pt"))
    for a, b in zip(back.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_the_optimizer_may_be_made_before_or_after(before):
    def body(mesh):
        model = small(seed=mesh.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if before else None
        parallelize(model, mesh)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        F.mse_loss(model(randn(*SHAPE)), randn(BATCH, 3)).backward()
        optimizer.step()
        return list(model.parameters())

    plain = small()
    F.mse_loss(plain(randn(*SHAPE)), randn(BATCH, 3)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found in on_ranks((2, 1, 1), body):
        for a, b in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


INPUTS = {
    "plain": lambda x, mesh: x,
    "sharded": distribute_tensor,
    "sharded over the depth alone": lambda x, mesh: distribute_tensor(x, mesh, {2: "depth"}),
}


@pytest.mark.parametrize("wrap", INPUTS.values(), ids=INPUTS)
def test_inputs_may_be_plain_or_sharded(wrap):
    expected = small()(randn(*SHAPE)).detach()

    def body(mesh):
        y = parallelize(small(), mesh)(wrap(randn(*SHAPE), mesh))
        assert isinstance(y, ShardedTensor)
        return y.full_tensor().detach()

    for y in on_ranks((2, 2, 1), body):
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


def test_keyword_inputs_and_others_than_volumes():
    class TwoInputs(nn.Module):
        def forward(self, x, *, mask, scale):
            return (x * mask * scale[:, None, None, None, None]).sum()

    def body(mesh):
        model = parallelize(TwoInputs(), mesh)
        return model(randn(*SHAPE), mask=randn(*SHAPE, seed=1), scale=randn(BATCH, seed=2))

    expected = TwoInputs()(randn(*SHAPE), mask=randn(*SHAPE, seed=1), scale=randn(BATCH, seed=2))
    for y in on_ranks((2, 1, 1), body):
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=0)


def test_evaluation_mode_with_groups_of_unequal_size():
    expected = small(norm=True).eval()(randn(*SHAPE)).detach()
    parts = [slice(0, 1), slice(1, 4)]

    def body(mesh):
        model = parallelize(small(norm=True), mesh).eval()
        with torch.no_grad():
            return mesh.data_index, model(randn(*SHAPE)[parts[mesh.data_index]]).full_tensor()

    for group, y in on_ranks((2, 1, 1), body, data=2):
        torch.testing.assert_close(y, expected[parts[group]], rtol=1e-11, atol=1e-12)


def test_a_copy_runs_and_trains_on_its_own():
    """Weight averages and target networks are such copies."""

    def body(mesh):
        model = parallelize(small(), mesh)
        train(model, 1, slice(None))
        twin = copy.deepcopy(model)
        x = randn(*SHAPE)
        assert torch.equal(twin(x).full_tensor(), model(x).full_tensor())
        before = [p.clone() for p in model.parameters()]
        train(twin, 2, slice(None))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return list(twin.parameters())

    plain = small()
    train(plain, 1, slice(None))
    train(plain, 2, slice(None))
    for found in on_ranks((2, 1, 1), body):
        for a, b in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_group_without_samples_in_a_last_validation_batch():
    expected = small(norm=True).eval()(randn(*SHAPE)).detach()
    parts = [slice(0, 4), slice(4, 4)]

    def body(mesh):
        model = parallelize(small(norm=True), mesh).eval()
        with torch.no_grad():
            return parts[mesh.data_index], model(
                randn(*SHAPE)[parts[mesh.data_index]]
            ).full_tensor()

    for mine, y in on_ranks((2, 1, 1), body, data=2):
        torch.testing.assert_close(y, expected[mine], rtol=1e-11, atol=1e-12)


# -- refusals -------------------------------------------------------------------------------


def test_twice_is_refused():
    def body(mesh):
        model = parallelize(small(), mesh)
        with pytest.raises(UsageError, match="parallelized already"):
            parallelize(model, mesh)

    on_ranks((2, 1, 1), body)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated
    SCRIPT = torch.jit.script(nn.Sequential(nn.ReLU()))
UNSENDABLE = {
    "'weight' of this LazyConv3d has no shape yet: call": lambda _: nn.LazyConv3d(2, 3),
    "'weight' of this Linear has no values": lambda _: nn.Linear(2, 2, device="meta"),
    "'sparse' of this Identity has the layout torch.sparse_coo": lambda _: with_sparse(
        nn.Identity()
    ),
    "'weight' of this PReLU is a sharded tensor": lambda mesh: with_shard(nn.PReLU(), mesh),
}


def test_ranks_that_are_threads_need_models_of_their_own():
    model = small()
    with pytest.raises(UsageError, match="each rank needs a model of its own"):
        on_ranks((2, 1, 1), lambda mesh: parallelize(model, mesh))
    on_ranks((1, 1, 1), lambda mesh: parallelize(model, mesh))  # nothing is left of it


def with_sparse(module):
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    return module


def with_shard(module, mesh):
    module.weight = nn.Parameter(distribute_tensor(randn(1, 3, 1, 1, 1), mesh))
    return module


@pytest.mark.parametrize(("said", "make"), UNSENDABLE.items())
def test_what_ranks_can_not_send_is_named_before_anything_is_sent(said, make):
    def body(mesh):
        model = make(mesh)
        for _ in range(2):  # the refusal leaves no mark of parallelization
            with pytest.raises(UsageError, match=said):
                parallelize(model, mesh)

    on_ranks((2, 1, 1), body)


def test_a_network_with_a_part_that_is_parallelized_is_refused():
    def body(mesh):
        model = small()
        parallelize(model[0], mesh)
        with pytest.raises(UsageError, match="parallelized already"):
            parallelize(model, mesh)

    on_ranks((2, 1, 1), body)


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_is_refused_with_a_reason():
    def body(mesh):
        model = parallelize(small(), mesh)
        with pytest.raises(NotSupported, match=r"torch\.compile"):
            torch.compile(model, backend="eager")(randn(*SHAPE))

    on_ranks((1, 1, 1), body)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_of_sharded_tensors_is_refused():
    """Its gradients would be wrong: those of the parts that the compiler traces."""

    def body(x, mesh):
        with pytest.raises(NotSupported, match=r"torch\.compile of a function of sharded tensors"):
            torch.compile(lambda y: y.square().mean(), backend="eager")(x)
        uncompiled = torch.compiler.disable(lambda y: y.square().mean())

        def loss(y):
            return uncompiled(y)

        torch.compile(loss, backend="eager")(x).backward()
        assert x.grad is not None

    on_shards(body, spatial=(1, 1, 1))


def _compile_in_place(model):
    model[1].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("said", "make"),
    {
        "the model is compiled": lambda: torch.compile(small(), backend="eager"),
        "the part '0' of the model is compiled": lambda: nn.Sequential(
            torch.compile(small(), backend="eager")
        ),
        "the part '1' of the model is compiled": lambda: _compile_in_place(small()),
        "the model is a torch.jit script": lambda: SCRIPT,
    }.items(),
)
def test_what_was_compiled_before_is_refused(said, make):
    def body(mesh):
        with pytest.raises(NotSupported, match=said):
            parallelize(make(), mesh)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("model", [None, nn.ReLU, len, [nn.ReLU()]], ids=str)
def test_other_arguments_are_named(model):
    def body(mesh):
        for given in ((model, mesh), (mesh, nn.ReLU()), (nn.ReLU(), None)):
            with pytest.raises(UsageError, match=r"possible are a torch\.nn\.Module and a mesh"):
                parallelize(*given)

    on_ranks((1, 1, 1), body)


def _save(model, x):
    torch.save(model, io.BytesIO())


def _save_within(model, x):
    torch.save(nn.Sequential(model), io.BytesIO())


def _trace(model, x):
    torch.jit.trace(model, (x,))


def _func_grad(model, x):
    torch.func.grad(lambda x: model(x).sum())(x)


def _script(model, x):
    torch.jit.script(model)


def _script_within(model, x):
    torch.jit.script(nn.Sequential(model))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (_save, r"can't be pickled \(torch.save\): save its state_dict\(\)"),
        (_save_within, r"can't be pickled"),
        (_trace, "torch.jit.trace of a parallelized model"),
        (_func_grad, "within torch.func or vmap"),
        (_script, "torch.jit.script of a parallelized model"),
        (_script_within, "torch.jit.script of a parallelized model"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_would_record_or_pickle_a_model_is_refused_in_one_line(record, said):
    def body(mesh):
        model = parallelize(nn.Conv3d(1, 2, 3, padding=1), mesh)
        with pytest.raises(NotSupported, match=said) as caught:
            record(model, torch.ones(1, 1, 4, 4, 4))
        assert "\n" not in str(caught.value)
        assert copy.deepcopy(model)(torch.ones(1, 1, 4, 4, 4)).shape == (1, 2, 4, 4, 4)

    on_ranks((2, 1, 1), body)
    on_ranks((1, 1, 1), body, data=2)


def test_a_batch_that_differs_between_the_ranks_of_a_group_is_refused():
    def body(mesh):
        with pytest.raises(UsageError, match="differs between the ranks"):
            parallelize(small(), mesh)(randn(*SHAPE, seed=mesh.sample_index))

    on_ranks((2, 1, 1), body)


def test_groups_may_hold_different_batches():
    def body(mesh):
        parallelize(small(), mesh)(randn(*SHAPE, seed=mesh.data_index)).sum().backward()

    on_ranks((2, 1, 1), body, data=2)
