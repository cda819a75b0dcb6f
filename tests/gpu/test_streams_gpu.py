"""Tests of programs with several streams: what pydist defers or uses again keeps torch's order.

A simulated device has right values in any order, so the waits are tested as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist import ShardedTensor, distribute_tensor, parallelize
from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import missing
from pydist.exchange.exchanger import stream_of
from pydist.mesh import Mesh
from pydist.ops.fusion import norm, relu
from support.transports.device_contract import two_ranks

pytestmark = two_ranks(missing())

CYCLES = 20_000_000
"""Clock cycles of a device during which work on another stream would overtake."""


@pytest.fixture
def mesh(devices: Transport) -> Mesh:
    torch.manual_seed(0)
    return Mesh(devices, 1, (2, 1, 1))


@contextmanager
def after(stream: torch.cuda.Stream) -> Iterator[torch.cuda.Stream]:
    """Runs the block on another stream, which begins after this one's work."""
    side = torch.cuda.Stream()
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        yield side


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns the list of streams that wait, and those for which, from now on."""
    found: list[tuple[int, int]] = []
    wait_stream = torch.cuda.Stream.wait_stream

    def noted(self: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        found.append((self.stream_id, other.stream_id))
        wait_stream(self, other)

    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", noted)
    return found


def sample(mesh: Mesh, channels: int = 2) -> ShardedTensor:
    x = torch.randn(2, channels, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    return distribute_tensor(x.to(mesh.world.device), mesh)


@pytest.mark.parametrize("is_captured", [False, True])
def test_exchanges_on_two_streams(mesh: Mesh, waits, is_captured: bool) -> None:
    conv = nn.Conv3d(2, 2, 3, padding=1).to(mesh.world.device)
    x = sample(mesh)
    inputs = [x.requires_grad_(), (x.detach() + 1).requires_grad_()]

    def gradients(y: ShardedTensor, x: ShardedTensor) -> tuple[Tensor, Tensor]:
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        return y.to_local().detach(), grad.to_local()

    expected = [gradients(conv(x), x) for x in inputs]
    torch.cuda.synchronize()
    found = []

    def both() -> None:
        main = torch.cuda.current_stream()
        with after(main) as side:
            torch.cuda._sleep(CYCLES)
            found.append(gradients(conv(inputs[0]), inputs[0]))
            own = len(waits)
            conv(inputs[0])
            assert len(waits) == own  # no event where all is on one stream
        with torch.cuda.stream(third):
            third.wait_event(begun)
            found.append(gradients(conv(inputs[1]), inputs[1]))
        assert (third.stream_id, side.stream_id) in waits
        main.wait_stream(side)
        main.wait_stream(third)

    begun, third, graph = torch.cuda.Event(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    if is_captured:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            begun.record()
            both()
        graph.replay()
    else:
        begun.record()
        both()
    for pair, other in zip(found, expected, strict=True):
        torch.testing.assert_close(pair, other, rtol=1e-5, atol=1e-5)


def _conv(x: ShardedTensor) -> ShardedTensor:
    weight, bias = torch.ones(2, 2, 1, 1, 1, device=x.device), torch.ones(2, device=x.device)
    return F.conv3d(x, weight, bias)


CALLS: dict[str, Callable[[ShardedTensor], ShardedTensor]] = {
    "bias": _conv,
    "bias and ReLU": lambda x: F.leaky_relu(_conv(x), 0.1, inplace=True),
    "norm": lambda x: F.instance_norm(_conv(x)),
}
USES: dict[str, Callable[[ShardedTensor], ShardedTensor]] = {
    "any": lambda y: y * 2,
    "ReLU": lambda y: F.leaky_relu(y, 0.2, inplace=True),
    "PReLU": lambda y: F.prelu(y, torch.full((1,), 0.5, device=y.device)),
    "pool": lambda y: F.avg_pool3d(y, 2),
}


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_deferred_work_is_done_on_the_stream_of_its_call(
    mesh: Mesh, waits, monkeypatch: pytest.MonkeyPatch, call, use, is_captured: bool
) -> None:
    x = sample(mesh)
    expected = use(call(x)).to_local()
    done: list[torch.cuda.Stream | None] = []
    for module in (relu, norm):
        on_stream = module.on_stream

        def noted(stream, on_stream=on_stream):
            done.append(stream)
            return on_stream(stream)

        monkeypatch.setattr(module, "on_stream", noted)
    torch.cuda.synchronize()

    def both() -> Tensor:
        main = torch.cuda.current_stream()
        torch.cuda._sleep(CYCLES)
        y = call(x)
        begun, third = main.record_event(), torch.cuda.Stream()
        with after(main) as side:
            found = use(y).to_local()
        assert (side.stream_id, main.stream_id) in waits[1:]
        with torch.cuda.stream(third):  # which has waited for the call, and not for the first use
            third.wait_event(begun)
            y.to_local()
        assert (third.stream_id, main.stream_id) in waits
        assert set(done[-1:]) == {main} == {stream_of(y.to_local())}
        main.wait_stream(side)
        main.wait_stream(third)
        return found

    graph = torch.cuda.CUDAGraph()
    if is_captured:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = both()
        graph.replay()
    else:
        found = both()
    torch.testing.assert_close(found, expected)


class Branches(nn.Module):
    """Network with two branches, the second on another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: ShardedTensor) -> ShardedTensor:
        y = self.one(x)
        main = torch.cuda.current_stream()
        with after(main) as side:
            z = self.other(x)
        main.wait_stream(side)
        return y + z


def test_gradients_of_two_streams_are_packed_when_both_are_written(mesh: Mesh, waits) -> None:
    model = parallelize(Branches().to(mesh.world.device), mesh)
    for _ in range(2):
        model.zero_grad()
        waits.clear()
        model(sample(mesh)).square().mean().backward()
    (side, main), *rest = waits
    assert rest[0] == (main, side)
    assert {(side, main), (main, side)} & set(rest[1:])  # of the bucket
    plain = Branches().to(mesh.world.device)
    plain.load_state_dict(model.state_dict())
    plain(sample(mesh).full_tensor()).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_an_input_of_a_norm_that_is_done(mesh: Mesh, waits) -> None:
    """The bias is added at the norm's call, after the event for which the third stream waits."""
    main, third = torch.cuda.current_stream(), torch.cuda.Stream()
    y = _conv(sample(mesh))
    begun = main.record_event()
    F.instance_norm(y).to_local()
    with torch.cuda.stream(third):
        third.wait_event(begun)
        waits.clear()
        y.to_local()
    assert (third.stream_id, main.stream_id) in waits


@pytest.mark.parametrize("view", [lambda y: y.detach(), lambda y: y[:, :1], lambda y: y.mT])
def test_views_of_deferred_work(mesh: Mesh, waits, view) -> None:
    """Views start no kernel in torch; here they complete the work."""
    main = torch.cuda.current_stream()
    y = _conv(sample(mesh))
    with after(main) as side:
        with torch.cuda.stream(main):
            seen = view(y)
        waits.clear()
        seen.to_local()
    assert (side.stream_id, main.stream_id) in waits


def test_a_stream_waits_once(mesh: Mesh, waits) -> None:
    """Later work of the first stream, as of another branch, does not hold it up."""
    y = _conv(sample(mesh))
    with after(torch.cuda.current_stream()):
        y.to_local()
        waits.clear()
        y.to_local()
    assert not waits
