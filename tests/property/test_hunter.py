"""Random training programs: the split run equals the one-device run (more: `tools/hunt`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support import LIBRARY
from support.hunter.hunt import blamed
from support.hunter.judge import Verdict, judge, settings
from support.hunter.program import Program
from support.hunter.shrink import shrunk
from support.jobs.children import run_python
from support.random_networks.spot import Source

SEEDS = 40
"""The number of programs in the suite; CI runs many more, and reinserts known faults."""

SMALL = Program(
    statements=("m0 = ready(net('m0'))", "x = cut(0)", "y = m0(x)", "see('y', y, 'rows')"),
    networks={"m0": (Source("nn.Conv3d(2, 3, 3, padding=1)"), Source("nn.ReLU(True)"))},
    sample=(2, 6, 3, 2),
)


def test_programs_are_the_same_when_they_are_split(tmp_path):
    command = "-m", "support.hunter.command", "--programs", str(SEEDS), "--seconds", "250"
    options = "--minimise", "1", "--workers", "2"
    ended = run_python(
        *command, *options, folder=tmp_path, path=[LIBRARY], seconds=280, OMP_NUM_THREADS="1"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert f"{SEEDS} programs" in ended.stdout


WRONG_GRADIENT = "see('m0.grad', full(y) * (1.5 if type(y) is not torch.Tensor else 1))"
TIED = "i = torch.cat([(full(y).flatten()[:4] * 1e15).abs().long() % 2, torch.arange(9)])"
"""The last bits of y decide the first four indices."""
CHAOS = "c = (full(y).sum() * 1e13).sin()"


def verdict(program: Program, *more: str) -> str:
    with settings():
        return judge(replace(program, statements=program.statements + more)).outcome


@pytest.mark.parametrize(
    ("statements", "outcome"),
    [
        ((), "equal"),
        (("see('y', full(y) * (1.01 if type(y) is not torch.Tensor else 1))",), "wrong"),
        (("see('y', 1.0 if type(y) is not torch.Tensor else 2.0)",), "wrong"),
        (("see('rank', local(y).shape)",), "wrong"),
        (("torch.tril(y)",), "refused"),
        (("if here and type(y) is not torch.Tensor: torch.tril(y)",), "parted"),
        (("if type(y) is not torch.Tensor: 1 / 0",), "crash"),
        (("y.no_such_call()",), "illegal"),
        (("if type(y) is not torch.Tensor: y.mesh.world.barrier() if here else None",), "crash"),
        # Nothing else in the program excuses a wrong value.
        (("see('inf.grad', 0 / torch.zeros(1) + torch.inf)", WRONG_GRADIENT), "wrong"),
        (("see('other.grad', torch.full((1,), 1e20))", WRONG_GRADIENT), "wrong"),
        (("see('list', (full(y) * (2 if type(y) is not torch.Tensor else 1)).tolist())",), "wrong"),
        ((TIED, "see('i', i + (type(y) is not torch.Tensor))"), "wrong"),
        ((TIED, "see('i', i)"), "equal"),
        ((CHAOS, "see('c', c)", "see('y', full(y) + (type(y) is not torch.Tensor))"), "wrong"),
        ((CHAOS, "see('c', c + 10 * (type(y) is not torch.Tensor))"), "undecided"),
        (("see('w', torch.tensor(1 if here else torch.nan), 'together')",), "wrong"),
    ],
)
def test_the_judge_tells_outcomes_apart(statements, outcome):
    assert verdict(SMALL, *statements) == outcome


GROUPS = replace(SMALL, groups=(1, 1), spatial=(1, 1, 1))


def test_the_gradient_of_a_computed_weight_has_no_rows():
    ready = "m0 = net('m0')\nspectral(m0, 0)\nm0 = ready(m0)"
    hooks = "for m in (m0[0], part(m0, 0)): m.register_full_backward_hook("
    hooks += "lambda m, i, o: see(type(m).__name__, i[0], into(m)))"
    program = replace(
        GROUPS,
        statements=(ready, hooks, "x = cut(0, True)"),
        networks={"m0": SMALL.networks["m0"][:1]},
    )
    backward = "m0(x).square().mean().backward()"
    assert verdict(program, backward) == "equal"


def test_rounding_of_terms_that_cancel_is_no_error():
    """The gradient is 1e-5 next to one of 1: batch norm undoes the scale of the weight before."""
    body = "nn.Sequential(nn.Conv3d(1, 1, 3, padding=1), nn.LeakyReLU(0.1))"
    joined = Source(f"Joined({body}, 'add')")
    norm = (Source("nn.BatchNorm3d(2, affine=True)"), Source("nn.PReLU()"))
    program = Program(
        statements=(
            "m0 = net('m0')\nm0.float()\nm0 = ready(m0)\nm0.double()",
            "m1 = ready(net('m1'))",
            "y = m1(checkpointed(m0, cut(0)))",
            "(full(y).sin().mean() + y.square().mean()).backward()",
            "see_model('m0', m0)",
        ),
        networks={
            "m0": (Source("nn.Identity()"), joined, Source("nn.Conv3d(1, 2, 1)"), *norm),
            "m1": (Source("nn.Conv3d(2, 2, 1)"),),
        },
        sample=(1, 9, 4, 5),
        groups=(2, 1, 1),
        spatial=(1, 1, 1),
    )
    assert verdict(program) == "equal"


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "equal"), (1.5, "wrong")])
@pytest.mark.parametrize("cancels", [True, False])
def test_in_a_hook_rounding_of_terms_that_cancel_is_no_error(cancels, factor, outcome):
    """A gradient that is equal at all positions passes a group norm as zero."""
    look = f"i[0] * ({factor} if type(i[0]) is not torch.Tensor else 1)"
    hook = f"part(m0, 1).register_full_backward_hook(lambda m, i, o: see('into_1', {look}))"
    layers = ("nn.Conv3d(2, 2, 1)", "nn.Tanh()", "nn.GroupNorm(2, 2)")
    loss = "full(m0(cut(0))).sum()" if cancels else "full(m0(cut(0))).sin().sum()"
    program = Program(
        statements=("m0 = ready(net('m0'))", hook, f"L = {loss}", "L.backward()",
                    "see_model('m0', m0)"),
        networks={"m0": tuple(map(Source, layers))},
        sample=(2, 6, 3, 2),
    )  # fmt: skip
    assert verdict(program) == ("equal" if cancels else outcome)


def test_digits_that_only_the_norm_of_one_device_loses_are_no_error():
    """torch's batch norm has the larger rounding error here, which noise does not reveal."""
    pools = Source("nn.AvgPool3d(3, 1, 1)")
    first = Source("nn.Conv3d(2, 3, (2, 1, 1), padding=(2, 0, 0), dilation=(2, 1, 1))")
    second = Source("nn.Conv3d(3, 1, 3, (2, 1, 1), 1, bias=False)")
    last = (Source("nn.Conv3d(1, 4, 3, padding=1)"), Source("nn.BatchNorm3d(4)"))
    program = Program(
        statements=(
            "m0 = net('m0')\nm0[7].requires_grad_(False)\nm0 = ready(m0)",
            "head = net('head')",
            "x = cut(0, True)",
            "y = m0(x * 1)",
            "head(full(y)).square().mean().backward()",
            "see('x.grad', x.grad, 'share')",
        ),
        networks={
            "m0": (first, pools, second, Source("nn.ReLU()"), pools, *last, Source("nn.ReLU()")),
            "head": (Source("nn.Conv3d(4, 2, 1)"),),
        },
        sample=(2, 10, 3, 6),
        groups=(1, 1),
        spatial=(1, 2, 1),
        keep_thin_blocks=True,
    )
    assert verdict(program) == "equal"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_wrong_gradients_of_the_instance_norm_of_one_device_are_no_error(checkpointed):
    """torch 2.13 is wrong on CPU if dL/dy of one thin sample has other strides; seed 4000339."""
    conv = "nn.Conv3d(3, 3, 3, (2, 1, 2), 1)"
    layers = (
        f"nn.Sequential({conv}, nn.InstanceNorm3d(3, affine=True), ChannelLinear(3, 3, True, True))"
    )
    program = Program(
        statements=(
            "m0 = ready(net('m0'))",
            "y = m0(cut(0))",
            "torch.autograd.backward([full(y).sin().mean() + y.square().mean()])",
            "see_model('m0', m0)",
        ),
        networks={"m0": (Source(f"Checkpointed({layers})" if checkpointed else layers),)},
        sample=(3, 1, 1, 3),
        groups=(1,),
        spatial=(1, 1, 1),
    )
    assert verdict(program) == "equal"


def test_what_reaches_the_shift_of_an_overwritten_instance_norm_is_not_compared():
    """torch's result is a view: its shift gets zeros in double backward, otherwise no gradient."""
    program = replace(
        SMALL,
        statements=(
            *("m0 = ready(net('m0'))", "x = cut(0, True)", "y = m0(x)", "y.zero_()"),
            "g, = torch.autograd.grad((y - 1).square().mean(), x, create_graph=True)",
            "g.square().sum().backward()",
            "see_model('m0', m0)",
        ),
        networks={"m0": (Source("nn.InstanceNorm3d(2, affine=True)"),)},
    )
    assert verdict(program) == "equal"


@pytest.mark.parametrize("dies", [True, False])
def test_a_crash_of_torch_itself_is_no_failure(dies):
    # The program has a hook on a view that changed without autograd: torch 2.13 segfaults.
    view = "v = torch.ones(1, 2, requires_grad=True).mul(2).squeeze(0)"
    change = "with torch.no_grad(): v.mul_(0.5)"
    hook = "v.register_hook(print)" if dies else "v.sum()"
    program = replace(SMALL, statements=(view, change, hook))
    assert blamed(Verdict("crash"), program).outcome == ("illegal" if dies else "crash")


def test_ranks_with_different_data_have_to_raise():
    program = replace(SMALL, differs=True)
    assert verdict(program) == "silent"
    refused = "if type(y) is not torch.Tensor: torch.tril(y)"
    assert verdict(program, refused) == "refused"
    assert verdict(program, "if here: y = y * 2", "y.sum().backward()") == "raised"
    always = "if type(y) is not torch.Tensor: y = y * (1 + y.mesh.rank)"
    assert verdict(program, always, "y.sum().backward()") == "alarm"


def test_a_failing_program_becomes_small():
    program = replace(
        SMALL,
        statements=("a = 1", *SMALL.statements, "b = 2", "see('n', local(y).shape[2])"),
        spatial=(2, 2, 1),
        sample=(2, 6, 5, 4),
    )

    def fails(candidate: Program) -> bool:
        with settings():
            return judge(candidate).outcome == "wrong"

    assert fails(program)
    small = shrunk(program, fails)
    assert fails(small)
    assert len(small.statements) < 5
    assert small.ranks < 4
    assert "replay(Program(" in small.script("wrong")


def test_a_group_without_samples_has_an_empty_block_where_padding_reads_more():
    """Seed 42 found this program."""
    conv = "nn.Conv3d(1, 2, 3, padding=1, padding_mode='replicate')"
    program = Program(
        statements=(
            "m0 = ready(net('m0'))",
            "m0(cut(0)).square().mean().backward()",
            "see_model('m0', m0)",
        ),
        networks={"m0": (Source(conv),)},
        sample=(1, 6, 3, 3),
        groups=(0, 2),
        points=((0, 0, 6), (0, 3), (0, 3)),
    )
    assert verdict(program) == "equal"
