"""Gradients that can't be reduced are named on all ranks; those that needn't be send nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import Mesh, distribute_tensor, parallelize, run_local
from pydist.errors import NotSupported, UsageError
from support.equivalence import assert_same, on_ranks, randn, whole_of
from support.equivalence.scripts import batch, gradients, network


def test_unequal_values_are_named_on_all_ranks():
    def body(mesh):
        model = parallelize(network(), mesh)
        head = nn.Parameter(torch.tensor(1.0 + mesh.rank, dtype=torch.float64))
        with pytest.raises(UsageError, match=r"shape \[\] .* differs between rank 0 and rank 1"):
            (model(distribute_tensor(batch(), mesh)).full_tensor().sum() * head).backward()
        head.data.fill_(2)
        model.zero_grad()
        head.grad = None
        (model(distribute_tensor(batch(), mesh)).full_tensor().sum() * head).backward()
        return [head.grad, *gradients(model)]

    whole, head = network(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    (whole(batch()).sum() * head).backward()
    for rank, found in enumerate(on_ranks((2, 1, 1), body)):
        assert_same(found, [head.grad, *gradients(whole)], where=f"rank {rank}")


def test_parameters_that_one_rank_alone_has_are_named():
    def body(mesh):
        model = parallelize(network(), mesh)
        factor = nn.Parameter(torch.ones(()).double())
        loss = model(distribute_tensor(batch(), mesh)).full_tensor().sum()
        with pytest.raises(UsageError, match=r"rank 0 has of shape \[\] .*, rank 1 has none"):
            (loss * factor if mesh.rank == 0 else loss).backward()

    on_ranks((1, 1, 1), body, data=2)


def test_equal_heads_of_two_groups_are_not_taken_for_one():
    def body(mesh):
        model = parallelize(network(), mesh)
        heads = [nn.Parameter(torch.ones(()).double()) for _ in range(2)]
        optimizer = torch.optim.SGD(heads, 0.1)

        def step():
            y = model(distribute_tensor(batch(), mesh)).full_tensor()
            (y.sum() * heads[mesh.data_index]).backward()
            optimizer.step()

        step()
        where = r"number 0 in group 0 of its optimizer on rank 0, number 1 in group 0 on rank 1"
        with pytest.raises(UsageError, match=where):
            step()

    on_ranks((1, 1, 1), body, data=2)


def test_heads_that_all_groups_take_in_turn_are_told_apart():
    def steps(model, cut):
        heads = [nn.Parameter(torch.ones(()).double()) for _ in range(2)]
        optimizer = torch.optim.SGD(heads, 1e-3)
        for step in range(4):
            (cut(model) * heads[step // 2]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return heads

    def body(mesh):
        model = parallelize(network(), mesh)
        return steps(
            model, lambda m: m(distribute_tensor(batch(), mesh)).full_tensor().square().mean()
        )

    whole = steps(network(), lambda m: m(batch()).square().mean())
    for rank, found in enumerate(on_ranks((1, 1, 1), body, data=2)):
        assert_same(found, whole, where=f"rank {rank}")


def test_a_parameter_frozen_on_one_rank_is_named():
    def body(mesh):
        model = parallelize(network(), mesh)
        model[2].bias.requires_grad_(False)
        model(distribute_tensor(batch(), mesh)).square().mean().backward()
        model[2].bias.requires_grad_(mesh.rank == 0)
        with pytest.raises(NotSupported, match=r"'2.bias' is frozen .* on some ranks"):
            model(distribute_tensor(batch(), mesh)).square().mean().backward()

    on_ranks((2, 1, 1), body)


def test_a_step_after_no_sync_alone_is_named():
    def body(mesh):
        model = parallelize(network(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.no_sync():
            model(distribute_tensor(batch(), mesh)).square().mean().backward()
        with pytest.raises(NotSupported, match=r"'0.weight', .* accumulated under no_sync"):
            optimizer.step()

    on_ranks((2, 1, 1), body)


def test_a_step_of_a_plain_tensor_that_groups_would_part_over_is_named():
    def body(mesh):
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        own = torch.full((), 1.0 + mesh.data_index, dtype=torch.float64, requires_grad=True)
        x = distribute_tensor(batch(mesh.data_index), mesh)
        (x * scale * own).square().mean().backward()
        torch.optim.SGD([own], 0.1).step()  # own data of the group
        with pytest.raises(UsageError, match=r"plain tensor of shape \[\] .* torch.nn.Parameter"):
            torch.optim.SGD([scale], 0.1).step()

    on_ranks((2, 1, 1), body, data=2)


# -- no-ops --------------------------------------------------------------------------------------


def test_a_backward_of_one_rank_that_has_nothing_to_do_with_the_mesh():
    def body(mesh):
        model = parallelize(network(), mesh)
        x = distribute_tensor(batch(), mesh)
        if mesh.rank == 1:
            plain = nn.Linear(3, 2)
            plain(torch.ones(1, 3)).sum().backward()
            assert plain.weight.grad is not None
        model(x).square().mean().backward()
        return gradients(model)

    whole = network()
    whole(batch()).square().mean().backward()
    for rank, found in enumerate(on_ranks((2, 1, 1), body)):
        assert_same(found, gradients(whole), where=f"rank {rank}")


def test_a_backward_that_reaches_inputs_only_belongs_to_its_group():
    def body(mesh):
        model = parallelize(network(), mesh).requires_grad_(False)
        if mesh.data_index == 0:
            x = distribute_tensor(batch(), mesh).detach().requires_grad_()
            model(x).square().mean().backward()
            assert x.grad is not None

    on_ranks((2, 1, 1), body, data=2)


@pytest.mark.parametrize("vectorized", [True, False])
def test_several_gradients_at_once(vectorized):
    """torch computes them with its vmap, which the exchanges do not support."""

    def body(mesh):
        model = parallelize(network(), mesh)
        y = model(distribute_tensor(batch(), mesh))
        both, weights = torch.stack([y.mean(), y.square().mean()]), list(model.parameters())
        rows = torch.eye(2, dtype=torch.float64)
        if vectorized:
            with pytest.raises(NotSupported, match=r"is_grads_batched=True .* once for each"):
                torch.autograd.grad(both, weights, grad_outputs=rows, is_grads_batched=True)
        return [g for row in rows for g in torch.autograd.grad(both, weights, row, True)]

    whole = network()
    y = whole(batch())
    weights = list(whole.parameters())
    expected = [
        g
        for loss in (y.mean(), y.square().mean())
        for g in torch.autograd.grad(loss, weights, retain_graph=True)
    ]
    for rank, found in enumerate(on_ranks((2, 1, 1), body)):
        assert_same(found, expected, where=f"rank {rank}")


# -- one parameter on two meshes ------------------------------------------------------------

VOLUMES, ROWS = randn(4, 2, 6, 4, 4), (slice(0, 3), slice(3, 4))
KERNEL, HEAD = randn(3, 2, 3, 3, 3, seed=1), randn(3, 2, seed=2)


def loss_of(x, kernel, head):
    return (whole_of(F.conv3d(x, kernel, padding=1).sin().mean((2, 3, 4))) @ head).square().mean()


def on_two_meshes(body):
    """Runs `body(loss_on)` on two ranks, with the loss on groups and on blocks of the samples."""

    def job(transport):
        kernel, head = nn.Parameter(KERNEL.clone()), nn.Parameter(HEAD.clone())
        groups, blocks = Mesh(transport, 2), Mesh(transport, 1, (2, 1, 1))

        def loss_on(name, factor=1.0):
            mesh = groups if name == "groups" else blocks
            x = VOLUMES[ROWS[mesh.data_index]] if name == "groups" else VOLUMES
            return loss_of(distribute_tensor(x * factor, mesh), kernel, head)

        return body(loss_on, [kernel, head])

    return run_local(job, 2)


@pytest.mark.parametrize("names", [("groups", "blocks"), ("blocks", "groups")])
@pytest.mark.parametrize("which", ["both", "first", "grad"])
def test_one_parameter_on_two_meshes_in_one_pass_is_refused(names, which):
    def body(loss_on, parameters):
        one, two = loss_on(names[0]), loss_on(names[1])
        loss = one if which == "first" else one + two
        with pytest.raises(NotSupported, match="on two meshes in one backward pass"):
            torch.autograd.grad(loss, parameters) if which == "grad" else loss.backward()

    on_two_meshes(body)


def test_one_parameter_on_two_meshes_in_turn():
    names = ["groups", "blocks", "blocks", "groups", "groups", "blocks"]

    def trained(parameters, loss_on):
        optimizer, kept = torch.optim.SGD(parameters, 0.5), []
        for step, name in enumerate(names):
            loss = loss_on(name, 1 + step)
            kept.append(loss)  # and its graph
            with torch.no_grad():
                loss_on(names[step - 1])  # an evaluation on the other mesh
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach() for p in parameters]

    kernel, head = nn.Parameter(KERNEL.clone()), nn.Parameter(HEAD.clone())
    expected = trained(
        [kernel, head], lambda name, factor=1.0: loss_of(VOLUMES * factor, kernel, head)
    )
    for found in on_two_meshes(lambda loss_on, parameters: trained(parameters, loss_on)):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_one_parameter_on_two_meshes_without_groups():
    def job(transport):
        kernel, head = nn.Parameter(KERNEL.clone()), nn.Parameter(HEAD.clone())
        meshes = Mesh(transport, 1, (2, 1, 1)), Mesh(transport, 1, (1, 2, 1))
        sum(loss_of(distribute_tensor(VOLUMES, mesh), kernel, head) for mesh in meshes).backward()
        return kernel.grad

    kernel = nn.Parameter(KERNEL.clone())
    (2 * loss_of(VOLUMES, kernel, HEAD)).backward()
    for found in run_local(job, 2):
        torch.testing.assert_close(found, kernel.grad, rtol=1e-11, atol=1e-13)
