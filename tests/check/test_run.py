"""Tests of `pydist.check`: it finds differences, and reports refusals and exchanges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import ShardedTensor
from pydist.check import check, format_report, load_factory
from pydist.check.report import Report
from pydist.cli.main import main
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import NotSupported, UsageError
from pydist.stages.transfer import StageTransfer
from pydist.tensor import HANDLERS, local_of, wrap
from pydist.tensor.stage import StageTensor

FACTORIES = """
import torch
from torch import nn

def good():
    return nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool3d(2))

class Lower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x):
        return torch.tril(self.conv(x))

ready = good()
number = 3

def no_module():
    return 3
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(2, 4, 5, padding=2), nn.BatchNorm3d(4), nn.LeakyReLU(0.1, inplace=True),
        nn.MaxPool3d(2), nn.Dropout(0.5), nn.Conv3d(4, 2, 3, padding=1), nn.AvgPool3d(2),
    )  # fmt: skip


def kinds(report: Report) -> dict[str, dict[int, tuple[int, int]]]:
    """Returns the widest halo of each call over all ranks."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for call in (c for calls in report.calls for c in calls):
        for dim, (before, after) in call.halo.items():
            known = found.setdefault(call.name, {}).get(dim, (0, 0))
            found[call.name][dim] = max(known[0], before), max(known[1], after)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_gradient_that_is_nothing_but_rounding_is_judged_by_its_size(dtype, monkeypatch):
    """The gradient of a bias before a norm has an arbitrary relative error."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Tanh())

    for seed in range(6):
        report = check(network, (1, 8, 8, 6), (2, 2, 1), dtype=dtype, seed=seed)
        assert report.ok, report.failures
    assert "noise: zero except for rounding" in format_report(report)

    def shifted(x, *args, **kwargs):
        found = real(x, *args, **kwargs)
        return found + 1e-3 * x.mean()

    real = HANDLERS[F.instance_norm]
    monkeypatch.setitem(HANDLERS, F.instance_norm, shifted)
    assert "gradient of 0.bias" in check(network, (1, 8, 8, 6), (2, 2, 1), dtype=dtype).failures


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_network_that_is_right(dtype):
    report = check(network, (2, 12, 8, 8), (2, 1, 2), dtype=dtype)
    assert report.ok, format_report(report)
    assert report.largest <= (1e-12 if dtype == torch.float64 else 1e-4)
    assert report.dropout_off == ["4"]
    assert set(report.found.outputs) == {"", *"0123456"}
    assert {"1.running_mean", "1.running_var"} == set(report.found.buffers)
    assert kinds(report)["torch.conv3d"] == {2: (2, 2), 4: (2, 2)}
    reduced = {c.name for c in report.calls[0] if c.is_global}
    assert reduced == {"torch.nn.functional.batch_norm", "torch.Tensor.sum"}


def test_evaluation_mode_and_other_dims():
    report = check(lambda: nn.Conv2d(1, 2, 3, padding=1), (1, 9, 6), (3,), train=False)
    assert report.ok
    assert len(report.calls) == 3
    assert report.dropout_off == []


def test_the_split_of_channels_is_shown():
    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, 1), nn.Conv3d(4, 4, 1),
            nn.Conv3d(4, 4, 1, groups=2), nn.ConvTranspose3d(4, 2, 2, 2),
            nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 4), nn.Linear(4, 2),
        )  # fmt: skip

    report = check(layers, (1, 8, 8, 8), (2, 1, 1), channel=2)
    assert report.ok
    shown = {c.name: [] for c in report.calls[0]}
    for call in report.calls[0]:
        shown[call.name].append(call.form)
    assert shown["torch.conv3d"] == ["outputs", "sum", "outputs", "groups"]
    assert shown["torch.conv_transpose3d"] == ["sum"]
    assert shown["torch.nn.functional.linear"] == ["outputs", "sum"]
    assert "groups 1, outputs 2, sum 1" in format_report(report)
    assert "  form" not in format_report(check(layers, (1, 8, 8, 8), (2, 1, 1)))


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_stages_and_micro_batches(dtype, spatial):
    report = check(network, (2, 12, 8, 8), spatial, stages=3, micro_batches=2, dtype=dtype)
    assert report.ok, format_report(report)
    assert set(report.found.outputs) == {"", *"0123456"}
    assert {"1.running_mean", "1.running_var"} == set(report.found.buffers)
    assert set(report.found.gradients) == {n for n, _ in network().named_parameters()}
    assert "4 × [2, 12, 8, 8] in 2 micro-batches through 3 stages of" in format_report(report)
    assert "begins with" in format_report(report)


@pytest.mark.parametrize("stages", [1, 2])
def test_micro_batches_of_a_network_that_computes_activations_again(stages):
    """Its backward pass calls layers, which are no further calls of the forward pass."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 2, 1)

        def forward(self, x):
            return self.last(checkpoint(lambda x: self.first(x).sin(), x, use_reentrant=False))

    report = check(Net, (1, 6, 4, 4), (1, 1, 1), stages=stages, micro_batches=2)
    assert report.ok, format_report(report)


def test_micro_batches_of_one_stage():
    report = check(network, (2, 12, 8, 8), (1, 1, 1), micro_batches=3, batch=5)
    assert report.ok, format_report(report)


@pytest.mark.parametrize(("stages", "dims"), [(1, 3), (2, 3), (2, 2)])
def test_stages_and_micro_batches_of_a_network_that_trains_nothing(stages, dims):
    pool = nn.AvgPool3d(2) if dims == 3 else nn.AvgPool2d(2)
    spatial = (2, 1, 1)[:dims]
    report = check(
        lambda: nn.Sequential(nn.ReLU(), pool), (2, *[8] * dims), spatial, stages=stages,
        micro_batches=2,
    )  # fmt: skip
    assert report.ok, format_report(report)
    assert set(report.found.outputs) == {"", "0", "1"}


@pytest.mark.parametrize("convolves", [True, False])
def test_images_are_cut_on_the_stages(convolves):
    heights = set()

    class Seen(nn.Module):
        def forward(self, x):
            value = x.value if isinstance(x, StageTensor) else None
            if value is not None and value.mesh.size > 1:  # the plan runs on one rank
                heights.add(local_of(value).shape[2])
            return x

    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)]
    if not convolves:
        layers = [nn.BatchNorm2d(1), nn.PReLU()]
    report = check(
        lambda: nn.Sequential(Seen(), layers[0], Seen(), layers[1], Seen()), (1, 8, 8), (2, 1),
        stages=2,
    )  # fmt: skip
    assert report.ok, format_report(report)
    assert heights == {4}


def test_micro_batches_of_a_network_that_changes_what_it_computes_with():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 2, 1)
            self.register_buffer("scale", torch.ones(2, 1, 1, 1))

        def forward(self, x):
            self.scale.mul_(0.9)
            return self.last(self.first(x) * self.scale)

    report = check(Net, (1, 6, 4, 4), (1, 1, 1), micro_batches=2)
    assert report.ok, format_report(report)
    assert "scale" in report.found.buffers


def test_a_wrong_transfer_between_stages_is_found(monkeypatch):
    right = StageTransfer.receive_gradient
    monkeypatch.setattr(StageTransfer, "receive_gradient", lambda *given: right(*given) * 1.01)
    report = check(network, (2, 12, 8, 8), (1, 1, 1), stages=2)
    assert not report.ok
    assert "gradient of 0.weight" in report.failures


def test_a_wrong_handler_is_found(monkeypatch):
    """The handler normalizes each shard by itself, like code unaware of ranks."""
    key = F.batch_norm
    correct = HANDLERS[key]

    def of_the_shard(x: ShardedTensor, *args, **kwargs):
        return wrap(F.batch_norm(local_of(x), *args, **kwargs), x.layout, x)

    monkeypatch.setitem(HANDLERS, key, of_the_shard)
    report = check(network, (2, 12, 8, 8), (2, 1, 1))
    assert not report.ok
    assert report.found.outputs["0"] <= 1e-12
    assert report.found.outputs["1"] > 1e-3
    assert "output of 1" in report.failures
    assert "NOT the same" in format_report(report)
    monkeypatch.setitem(HANDLERS, key, correct)
    assert check(network, (2, 12, 8, 8), (2, 1, 1)).ok


def test_a_wrong_gradient_is_found(monkeypatch):
    from pydist.ops.conv import local_conv

    right = local_conv.bias_gradient
    monkeypatch.setattr("pydist.ops.conv.correction.bias_gradient", lambda g: 0.5 * right(g))
    report = check(lambda: nn.Conv3d(1, 2, 3, padding=1), (1, 6, 4, 4))
    assert report.failures == ["gradient of bias"]


def test_a_refused_call_is_computed_whole_and_named(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text(FACTORIES)
    report = check(load_factory(f"{file}:Lower"), (1, 6, 4, 4))
    assert not report.ok
    assert not report.failures
    (refusal,) = report.refusals
    assert "torch.tril" in refusal
    line = next(n for n, text in enumerate(FACTORIES.splitlines(), 1) if "tril" in text)
    assert f"{file}:{line}" in refusal
    text = format_report(report)
    assert "1 refused" in text
    assert "except for refused calls" in text


def test_command(tmp_path, capsys):
    file = tmp_path / "nets.py"
    file.write_text(FACTORIES)
    for name, code in (("good", 0), ("ready", 0), ("Lower", 1)):
        assert main(["check", f"{file}:{name}", "--sample", "1,6,4,4"]) == code
        text = capsys.readouterr().out
        assert "2 × [1, 6, 4, 4] split 2×1×1 over 2 ranks, float64" in text
        assert "torch.conv3d" in text
    for options, said in (
        (["--channel", "2", "--spatial", "1,2,1"], "channel 2"),
        (["--stages", "2", "--micro-batches", "3"], "in 3 micro-batches through 2 stages"),
    ):
        assert main(["check", f"{file}:good", "--sample", "1,6,4,4", *options]) == 0
        assert said in capsys.readouterr().out


def test_command_with_the_configuration_of_a_run(tmp_path, capsys):
    """The network has the arguments and the numbers of channels and classes that the run has."""
    generate_ct(tmp_path / "ct", CTOptions(count=2, shape=(16, 16, 16), validation=0.5))
    file = tmp_path / "run.toml"
    file.write_text(f"""
[model]
factory = "pydist.models:UNet3d"
task = "segmentation"
multiple = 2
[model.args]
features = 2
levels = 1
[data]
path = "{tmp_path / "ct"}"
augment = {{crop = [8, 16, 8]}}
""")
    assert main(["check", str(file), "--spatial", "1,2,1"]) == 0
    assert "2 × [1, 8, 16, 8] split 1×2×1 over 2 ranks" in capsys.readouterr().out
    assert main(["check", str(file), "--sample", "1,8,8,8"]) == 0
    assert "2 × [1, 8, 8, 8] split 2×1×1 over 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{file}:nothing", "--sample", "1,6,4,4"], "has no 'nothing'; it has: "),
        (["torch.nn:Con3d", "--sample", "1,6,4,4"], "'Con3d'; did you mean Conv3d or Conv"),
        (["torch.nn:Nope", "--sample", "1,6,4,4"], " other names, none like it"),
        (["{file}:number", "--sample", "1,6,4,4"], "is no function: 3"),
        (["{file}:no_module", "--sample", "1,6,4,4"], "makes a int; expected a torch.nn.Module"),
        (["{file}", "--sample", "1,6,4,4"], "expected FILE.py:NAME or MODULE:NAME"),
        (["nowhere.py:good", "--sample", "1,6,4,4"], "nowhere.py: no such file"),
        (["no_such_package:good", "--sample", "1,6,4,4"], "No module named 'no_such_package'"),
        (["{file}:good", "--sample", "1,6,a,4"], "expected numbers with commas"),
        (["{file}:good", "--sample", "1"], "expected channels and one to three extents"),
        (["{file}:good", "--sample", "1,6,4,4", "--spatial", "2,0,1"], "counts of at least 1"),
        (["{file}:good", "--sample", "1,6,4,4", "--stages", "0"], "stages=0, micro_batches=1: exp"),
        (["{file}:good", "--sample", "1,6,4,4", "--micro-batches", "3", "--batch", "2"], "(2)"),
        (["{file}:good", "--sample", "1,6,4,4", "--stages", "1025"], "at most 1024 run as threads"),
        (["{file}:good", "--sample", "3,6,4,4"], "failed on 3,6,4,4: RuntimeError: Given groups=1"),
    ],
)
def test_wrong_input_is_one_line(tmp_path, capsys, arguments, complaint):
    file = tmp_path / "nets.py"
    file.write_text(FACTORIES)
    assert main(["check", *(a.format(file=file) for a in arguments)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_is_refused_with_a_reason():
    with pytest.raises(NotSupported, match="the model is compiled: the compiler can't trace"):
        check(lambda: torch.compile(network(), backend="eager"), (2, 12, 8, 8))


def test_dtypes_that_have_no_bound():
    with pytest.raises(UsageError, match=r"possible are torch\.float64 and torch\.float32"):
        check(network, (2, 12, 8, 8), dtype=torch.bfloat16)
