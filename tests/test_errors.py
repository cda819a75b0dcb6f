"""Tests of errors: one line, the right class and exit code; no rank waits for a failed rank."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pydist import Mesh, distribute_tensor, errors, parallelize, run_local
from pydist.errors import NotSupported, PydistError, RankFailed, UsageError, exit_code_of
from pydist.launch import failures
from support.equivalence import on_ranks, randn
from support.networks.small import BATCH, SHAPE, Doubled, small

CODES = {
    errors.UsageError: (2, ValueError),
    errors.NotSupported: (2, NotImplementedError),
    errors.DataError: (65, ValueError),
    errors.DoesNotFit: (66, MemoryError),
    errors.RankFailed: (71, RuntimeError),
    errors.RankLost: (72, RuntimeError),
    errors.CheckpointError: (73, RuntimeError),
    errors.DiskError: (74, OSError),
    errors.Stopped: (75, PydistError),
}


@pytest.mark.parametrize(("kind", "code", "base"), [(k, *v) for k, v in CODES.items()])
def test_every_error_has_its_exit_code_and_its_builtin_base(kind, code, base):
    error = kind("what was given; what is possible")
    assert isinstance(error, PydistError)
    assert isinstance(error, base)
    assert exit_code_of(error) == code
    assert str(error) == "what was given; what is possible"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(5), 5), (SystemExit(None), 0), (SystemExit("text"), 1),
        (SystemExit(256), 71), (SystemExit(-256), 71), (SystemExit(-1), -1),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 66), (ZeroDivisionError(), 71), (RuntimeError("any"), 71),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 66),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 66),
        (OSError("Can't read data (memory allocation failed for raw data chunk)"), 66),
        (OSError(12, "Cannot allocate memory"), 66), (OSError(28, "No space left"), 74),
        (OSError(2, "No such file: out of memory"), 71), (ValueError("out of memory"), 71),
        (BrokenPipeError(32, "of another pipe"), 71),
        (errors.DataError("a file with the name out of memory"), 65),
    ],
)  # fmt: skip
def test_exit_codes_of_other_errors(error, code):
    assert exit_code_of(error) == code


def large_file(size: int) -> None:
    with h5py.File("x", "w", driver="core", backing_store=False) as file:
        file.create_dataset("x", size, "i1")[0] = 1
        file.flush()


@pytest.mark.parametrize("allocate", [torch.empty, np.empty, large_file])
def test_memory_that_can_not_be_had_is_one_line(allocate):
    """torch, NumPy and HDF5 each report it with an error of their own."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate(1 << 46)
    assert exit_code_of(caught.value) == 66
    said = failures.describe(caught.value)
    assert said.startswith("error: does not fit into memory: ")
    assert said.count("\n") == 1
    assert len(said) < 320


def test_a_refusal_stays_visible_inside_operators():
    """Python would turn a TypeError into "unsupported operand"."""
    assert issubclass(NotSupported, RuntimeError)

    def body(mesh):
        x = distribute_tensor(randn(*SHAPE).requires_grad_(), mesh)
        y = Doubled.apply(x)
        with pytest.raises(NotSupported, match="applied to a sharded tensor itself"):
            y @ y.mT

    on_ranks((2, 1, 1), body)


class Fault(Exception):
    """Error that a test raises."""


def in_forward(model, x, rank):
    def fail(*_):
        raise Fault

    if rank == 1:
        model[3].register_forward_hook(fail)
    model(x).square().mean().backward()


def in_backward(model, x, rank):
    def fail(_):
        if rank == 1:
            raise Fault

    y = model(x)
    y.register_hook(fail)
    y.square().mean().backward()


def between_buckets(model, x, rank):
    if rank == 1:

        def fail(*_):
            raise Fault

        # A hook on the parameter itself runs when all buckets are complete.
        model.node = torch.autograd.graph.get_gradient_edge(model[4].weight).node
        model.node.register_hook(fail)
    model(x).square().mean().backward()


def before_a_loss(model, x, rank):
    y = model(x)
    if rank == 1:
        raise Fault
    F.mse_loss(y, randn(BATCH, 3)).backward()


@pytest.mark.parametrize("where", [in_forward, in_backward, between_buckets, before_a_loss])
@pytest.mark.timeout(30)
def test_a_fault_on_one_rank_ends_all_and_is_the_one_that_is_raised(where):
    ended = []

    def body(world):
        mesh = Mesh(world, 1, (4, 1, 1))
        try:
            where(parallelize(small(), mesh), randn(*SHAPE), mesh.rank)
        except BaseException as error:
            ended.append((mesh.rank, type(error)))
            raise

    with pytest.raises(Fault):
        run_local(body, 4)
    assert (1, Fault) in ended
    assert all(kind is RankFailed for rank, kind in ended if rank != 1)
    assert len(ended) >= 2


@pytest.mark.timeout(30)
def test_a_rank_that_is_refused_alone_ends_the_others():
    def body(mesh):
        x = distribute_tensor(randn(*SHAPE), mesh)
        if mesh.rank == 1:
            torch.tril(x)
        F.conv3d(x, randn(2, 2, 3, 3, 3), padding=1)

    with pytest.raises(NotSupported, match="tril"):
        on_ranks((2, 1, 1), body)


@pytest.mark.timeout(30)
def test_ranks_that_call_different_things_are_told_so():
    def body(mesh):
        x = distribute_tensor(randn(*SHAPE), mesh)
        if mesh.rank == 0:
            x.sum()
        else:
            x.full_tensor()

    with pytest.raises((UsageError, RankFailed, errors.RankLost), match=r"rank \d"):
        on_ranks((2, 1, 1), body)


def test_a_refusal_is_one_line_and_the_handler_that_would_help():
    def body(mesh):
        with pytest.raises(NotSupported) as caught:
            torch.tril(distribute_tensor(randn(*SHAPE), mesh))
        line, *handler = str(caught.value).splitlines()
        assert all(word in line for word in ("torch.tril", "test_errors.py:", "full_tensor()"))
        assert [text.split()[0] for text in handler] == [
            "@pydist.tensor.implements(torch.tril)", "def", "whole", "return"
        ]  # fmt: skip

    on_ranks((2, 1, 1), body)


ONE_LINE = {
    "shape": (lambda x, m: distribute_tensor(torch.zeros(2, 2), m), UsageError),
    "layout": (lambda x, m: distribute_tensor(torch.zeros(2, 2), m, {7: "depth"}), UsageError),
    "plain differs": (lambda x, m: x + randn(*SHAPE, seed=m.rank), UsageError),
    "window": (lambda x, m: F.conv3d(x, randn(1, 2, 99, 1, 1)), UsageError),
}


@pytest.mark.parametrize(("call", "kind"), ONE_LINE.values(), ids=ONE_LINE)
def test_messages_are_one_line(call, kind):
    def body(mesh):
        with pytest.raises(kind) as caught:
            call(distribute_tensor(randn(*SHAPE), mesh), mesh)
        assert "\n" not in str(caught.value)

    on_ranks((2, 1, 1), body)
