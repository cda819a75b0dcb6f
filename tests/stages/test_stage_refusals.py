"""Tests of what stages refuse: on which ranks, and in which words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import parallelize, run_local
from pydist.errors import NotSupported, RankFailed, UsageError
from pydist.stages import Stages, pipeline
from pydist.stages.ranks import stage_meshes
from support.equivalence import Task, randn
from support.networks.small import Doubled, initialized
from support.staged import DEEP, ONE, TWO_GROUPS, Between, check_stages, on_stages

X, TARGET = randn(4, 1, 6, 4, 4, seed=1), randn(4, 2, 6, 4, 4, seed=2)


def refused(function, match, error=NotSupported, **options):
    """Checks that a step of `Between` is refused on all ranks, with a record made before.

    The function is the identity while its network is recorded.
    """

    def rank(stages):
        model = initialized(Between())
        made = pipeline(model, stages, X[:1], **{"cuts": ["last"], **options})
        model.function = lambda net, x: function(x)
        with pytest.raises(error, match=match):
            made.step(X, TARGET, F.mse_loss)

    on_stages([ONE, ONE], rank)


def test_reading_values_is_refused_on_all_ranks():
    refused(lambda x: x if x.max() > 0 else -x, "reads values, which only one stage has")
    refused(lambda x: x * x.sum().item(), "reads values")


def test_hooks_and_gradients_of_tensors_are_refused():
    refused(lambda x: x.register_hook(print) or x, "register it on a parameter")
    refused(lambda x: x.retain_grad() or x, "only parameters have a gradient")
    refused(lambda x: x.sum().backward() or x, "Pipeline.step")


def test_functions_without_overrides_are_refused():
    refused(Doubled.apply, "autograd.Function", error=NotSupported)
    refused(lambda x: Doubled.apply(x) + x, "autograd.Function")


def test_changing_memory_that_another_stage_shares_is_refused():
    """In torch the view would change too; here each stage has its own copy."""

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.change = nn.Conv3d(1, 2, 1), nn.ReLU(inplace=True)
            self.last = nn.Conv3d(2, 2, 1)

        def forward(self, x):
            y = self.first(x) + 0
            view = y[:, :1]
            return self.last(self.change(y)) + view

    def rank(stages):
        made = pipeline(initialized(Shares()), stages, X[:1], cuts=["change"])
        with pytest.raises(NotSupported, match="begin the stage at another call"):
            made.step(X, TARGET, F.mse_loss)

    on_stages([ONE, ONE], rank)
    check_stages(Task(initialized(Shares()), X, TARGET, F.mse_loss), [ONE, ONE], 2)


class Checkpointed(nn.Sequential):
    """Layers whose activations backward computes again, in training."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=False)


def test_checkpointed_parts():
    def network():
        part = Checkpointed(nn.Conv3d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv3d(2, 2, 1), nn.Tanh())
        return nn.Sequential(nn.Conv3d(1, 2, 1), part, nn.Conv3d(2, 2, 1))

    for cuts in (["1"], ["2"]):
        for meshes in ([ONE, ONE], [DEEP, ONE]):
            task = Task(initialized(network()), X, TARGET, F.mse_loss)
            check_stages(task, meshes, 2, cuts=cuts)

    def cut(stages):
        with pytest.raises(UsageError, match=r"'1\.2' is within a part under torch"):
            pipeline(initialized(network()), stages, X[:1], cuts=["1.2"])

    on_stages([ONE, ONE], cut)

    def spans(stages):
        """The plan is made in evaluation, where no activation is computed again."""
        made = pipeline(initialized(network()).eval(), stages, X[:1], cuts=["1.2"])
        made.model.train()
        kind = NotSupported if stages.index else RankFailed
        with pytest.raises(kind, match=r"torch\.utils\.checkpoint spans stages"):
            made.step(X, TARGET, F.mse_loss)

    on_stages([ONE, ONE], spans)


def test_masks_of_plain_tensors_in_checkpointed_parts():
    """They would differ in backward; masks of volumes do not."""

    def network(p):
        part = Checkpointed(nn.Linear(3, 4), nn.Dropout(p))
        return initialized(nn.Sequential(part, nn.Linear(4, 2)))

    x, target = randn(4, 3, seed=1), randn(4, 2, seed=2)

    def rank(stages):
        made = pipeline(network(0.5), stages, x)
        with pytest.raises(NotSupported, match="would draw other numbers in backward"):
            made.step(x, target, F.mse_loss)

    on_stages([ONE], rank)
    check_stages(Task(network(0.0), x, target, F.mse_loss), [ONE, ONE])


def test_tensors_of_several_passes_do_not_mix():
    kept = []

    def function(x):
        kept.append(x)
        return x + kept[0]

    def rank(stages):
        model = initialized(Between())
        made = pipeline(model, stages, X[:1])
        model.function = lambda net, x: function(x)
        made.step(X, TARGET, F.mse_loss)
        with pytest.raises(NotSupported, match="several forward passes"):
            made.step(X, TARGET, F.mse_loss)

    on_stages([ONE], rank)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"micro_batches": 0}, "micro_batches=0: expected a count >= 1"),
        ({"micro_batches": 2.0}, "micro_batches=2.0"),
        ({"schedule": "zb"}, "possible are gpipe, 1f1b"),
        ({"skips": "none"}, "possible are direct, relay"),
        ({"balance": "luck"}, "possible are time, memory"),
        ({"cuts": ["nothing"]}, "module 'nothing' makes no call"),
        ({"cuts": ["first", "last"]}, "2 stages have 1 cuts"),
    ],
)
def test_wrong_options(options, match):
    def rank(stages):
        with pytest.raises(UsageError, match=match):
            pipeline(initialized(Between(lambda net, x: x.relu())), stages, X[:1], **options)

    on_stages([ONE, ONE], rank)


def test_wrong_arguments():
    def rank(stages):
        with pytest.raises(UsageError, match=r"from pydist.init_stages\(\)"):
            pipeline(nn.ReLU(), stages.mesh, X)
        made = pipeline(initialized(Between(lambda net, x: x.relu())), stages, X[:1])
        with pytest.raises(UsageError, match="criterion: expected a scalar"):
            made.step(X, TARGET, lambda out, target: out)
        with pytest.raises(UsageError, match="inputs: expected the network's arguments"):
            made.step(3, TARGET, F.mse_loss)
        for count in (0, -1, 2.0, "2"):
            with pytest.raises(UsageError, match=f"micro_batches={count!r}: expected a count >= 1"):
                made.step(X, TARGET, F.mse_loss, count)

    on_stages([ONE, ONE], rank)


@pytest.mark.parametrize(
    ("meshes", "match"),
    [
        ([ONE] * 3, "stages of 1 \\+ 1 \\+ 1 ranks, but 2 were started"),
        ([{"data": 2}, ONE], "stages of 2 \\+ 1 ranks"),
        ([{"depth": 2}], "stage 0: .*possible are data, spatial, channel, shares"),
        ([{"spatial": (2, 1)}], "three of spatial"),
        ([{"data": 0}, ONE], "expected counts >= 1"),
    ],
)
def test_wrong_stages(meshes, match):
    def rank(world):
        with pytest.raises(UsageError, match=match):
            Stages(world, meshes)

    run_local(rank, 2)


def test_numbers_of_groups_must_agree():
    def rank(world):
        with pytest.raises(UsageError, match="stages with 1 and 2 sample groups"):
            Stages(world, [TWO_GROUPS, ONE])

    run_local(rank, 3)


def test_equal_stages_by_number():
    assert stage_meshes(2, 4) == [{"data": 2}] * 2
    with pytest.raises(UsageError, match="3 stages of 4 ranks: start a multiple of 3"):
        stage_meshes(3, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: torch.zeros(x.shape, dtype=x.dtype).copy_(x) + x,
        lambda net, x: x + _assigned(torch.zeros(x.shape, dtype=x.dtype), x),
        lambda net, x: x + torch.zeros(x.shape, dtype=x.dtype).add_(x),
        lambda net, x: x + net.first.bias.detach().mul_(x.detach().mean()).sum(),
    ],
)
def test_writing_into_plain_tensors_is_refused(function):
    def rank(stages):
        with pytest.raises(NotSupported, match="writes into a plain tensor, which every stage has"):
            pipeline(initialized(Between(function)), stages, X[:1], cuts=["last"])

    on_stages([ONE, ONE], rank)


def _assigned(out, x):
    out[:, :1] = x[:, 1:]
    return out


def _set_data(net, x):
    x.data = x * 2
    return x


def test_setting_data_is_refused():
    def rank(stages):
        with pytest.raises(NotSupported, match="assign another tensor to the attribute"):
            pipeline(initialized(Between(_set_data)), stages, X[:1], cuts=["last"])

    on_stages([ONE, ONE], rank)


def test_dtypes_under_autocast_are_refused():
    def rank(stages):
        net = Between(lambda net, x: x.to(x.dtype))
        made = pipeline(net, stages, X[:1].float(), cuts=["last"])
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(NotSupported, match="under autocast, which other stages do not know"),
        ):
            made.step(X.float(), TARGET.float(), F.mse_loss)

    on_stages([ONE, ONE], rank)


def test_networks_that_are_parallelized_already_are_refused():
    def rank(stages):
        net = initialized(Between())
        made = pipeline(net, stages, X[:1], cuts=["last"])
        with pytest.raises(UsageError, match="is parallelized already: give pipeline"):
            pipeline(net, stages, X[:1], cuts=["last"])
        made.step(X, TARGET, F.mse_loss)  # the first one still works
        other = parallelize(initialized(Between()), stages.mesh)
        with pytest.raises(UsageError, match="is parallelized already"):
            pipeline(other, stages, X[:1], cuts=["last"])

    on_stages([ONE, ONE], rank)


def test_different_batches_of_the_stages_are_refused():
    def rank(stages):
        made = pipeline(initialized(Between()), stages, X[:1], cuts=["last"])
        rows = 4 - 2 * stages.index
        kind = UsageError if stages.index else RankFailed
        with pytest.raises(kind, match="the stages have different batches"):
            made.step(X[:rows], TARGET[:rows], F.mse_loss)

    on_stages([ONE, ONE], rank)


def test_a_loss_without_gradient_is_refused():
    def rank(stages):
        made = pipeline(initialized(Between()), stages, X[:1])
        with pytest.raises(UsageError, match="the loss has no gradient"):
            made.step(X, TARGET, lambda y, t: F.mse_loss(y, t).detach())

    on_stages([ONE], rank)


# -- what one rank alone does ----------------------------------------------------------------


class Repeats(nn.Module):
    """The same call several times, so that a cut one call earlier or later fits as well."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 2, 1), nn.Conv3d(2, 2, 1)
        self.look = lambda x: None

    def forward(self, x):
        x = torch.tanh(self.first(x))
        self.look(x)
        for _ in range(4):
            x = torch.tanh(x)
        return self.last(x)


@pytest.mark.parametrize("look", [lambda x: x.sum(), lambda x: x * 2], ids=["sum", "product"])
@pytest.mark.parametrize(
    ("meshes", "rank"),
    [([ONE, ONE], 0), ([ONE, ONE], 1)]
    + [(meshes, rank) for meshes in ([DEEP, ONE], [ONE, DEEP]) for rank in range(3)],
    ids=str,
)
def test_a_look_of_one_rank_is_no_silent_cut(rank, meshes, look):
    """It shifts the numbers of the calls, by which the stages know where they begin."""

    def body(stages):
        net = initialized(Repeats())
        made = pipeline(net, stages, X[:1], balance="memory")
        assert made.plan.starts[0].module == "Repeats"
        if stages.world.rank == rank:
            net.look = look
        made.step(X, TARGET, F.mse_loss)

    with pytest.raises((UsageError, RankFailed), match="make different calls"):
        on_stages(meshes, body)


def test_values_that_differ_between_stages_are_refused():
    """As of a loader that each rank shuffles by itself."""

    def body(stages):
        made = pipeline(initialized(Between()), stages, X[:1], cuts=["last"])
        order = [0, 1, 2, 3] if stages.index else [3, 2, 1, 0]
        made.step(X[order], TARGET[order], F.mse_loss)

    with pytest.raises((UsageError, RankFailed), match="or their values differ"):
        on_stages([ONE, ONE], body)


def test_modes_that_differ_between_stages_are_refused():
    def body(stages):
        made = pipeline(initialized(Between()), stages, X[:1], cuts=["last"])
        made.model.train(stages.index == 0)
        made.step(X, TARGET, F.mse_loss)

    with pytest.raises((UsageError, RankFailed), match="one trains and one evaluates"):
        on_stages([ONE, ONE], body)


def test_samples_on_which_ranks_make_different_calls_are_refused():
    def body(stages):
        net = initialized(Between(lambda net, x: x.relu() if len(x) > 1 else x))
        pipeline(net, stages, X[: 1 + stages.index], cuts=["last"])

    with pytest.raises(UsageError, match="forward pass on the sample"):
        on_stages([ONE, ONE], body)


def test_a_part_that_one_stage_froze_blocks_nobody():
    """The stage that computes with it decides."""

    def body(stages):
        made = pipeline(initialized(Between()), stages, X[:1], cuts=["last"])
        made.model.first.requires_grad_(stages.index == 0)
        made.step(X, TARGET, F.mse_loss)
        return made.model.first.weight.grad is not None

    assert on_stages([ONE, ONE], body) == [True, False]


def test_forms_of_gradients_that_count_steps_are_refused():
    def rank(stages):
        for form in ("powersgd", "dgc", "post_local"):
            with pytest.raises(NotSupported, match=f'gradients="{form}" in stages: .*possible are'):
                pipeline(initialized(Between()), stages, X[:1], cuts=["last"], gradients=form)
        with pytest.raises(UsageError, match="gradients='fp8'; possible are dense"):
            pipeline(initialized(Between()), stages, X[:1], cuts=["last"], gradients="fp8")

    on_stages([ONE, ONE], rank)


def test_a_parameter_of_two_networks_in_stages_is_refused():
    def rank(stages):
        first, second = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        second[1].weight = first[0].weight
        x = torch.ones(2, 4)
        kept = pipeline(first, stages, x, cuts=["1"])
        with pytest.raises(UsageError, match=r"1\.weight is also one of another network"):
            pipeline(second, stages, x, cuts=["1"])
        del kept
        second[1].weight.requires_grad_(False)  # so that nothing trains it
        pipeline(second, stages, x, cuts=["1"])
        # Or of a network that is no more.
        third = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        third[0].bias = second[1].bias
        del first, second
        pipeline(third, stages, x, cuts=["1"])

    on_stages([ONE, ONE], rank)
