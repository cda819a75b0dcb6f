"""Words the errors of refused calls: the call's name, its module and line, and an alternative."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from pydist.errors import NotSupported
from pydist.tensor.wrapper import tensors_of
from pydist.watchdog import MODULE_PATH

# Users do not look for their calls in these files.
_INSIDE = (
    f"{Path(__file__).parents[1]}/",
    f"{Path(torch.__file__).parent}/",
    f"{Path(torch.__file__).parents[1]}/typing_extensions.py",  # of what torch deprecates
    threading.__file__,
)

_CHECKPOINT = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")

_WAY_ON = """
compute it on whole tensors, x.full_tensor() in place of x, or register a handler:
    @pydist.tensor.implements({name})
    def handler(*args, **kwargs):
        whole = lambda x: x.full_tensor() if isinstance(x, pydist.ShardedTensor) else x
        return {name}(*map(whole, args), **{{k: whole(x) for k, x in kwargs.items()}})"""
_IN_PLACE = "compute a new tensor from x.full_tensor(), whose own changes would be lost"
_IN_PLACE_OF_PLAIN = "give it whole tensors, x.full_tensor() in place of x"
_SET = "change the values in place: x.copy_(values), under torch.no_grad() if x needs a gradient"
_NN_UTILS = f"{Path(torch.__file__).parent}/nn/utils/"
_REPARAMETRIZES = {"register_parametrization", "weight_norm", "spectral_norm", "orthogonal"}
_REGISTER = "register parametrizations of sharded weights before pydist.parallelize"
_INITIALIZE = "initialize the weights before parallelize, or load them: model.load_state_dict(...)"


def refusal(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str = ""
) -> NotSupported:
    """Returns the error for a call without an exact form: name, module, line, an alternative.

    Args:
        func: the function that torch passed to the override.
        args: of the call; the error names the shapes of its tensors.
        kwargs: likewise.
        why: the reason, if a handler exists; empty if none does.
    """
    name = name_of(func)
    module = module_path()
    source = source_line()
    shapes = [list(t.shape) for t in tensors_of((args, kwargs))]
    return NotSupported(
        f"{name} on a sharded tensor"
        f"{f' in module {module}' if module else ''}{f' at {source}' if source else ''} "
        f"(shapes {shapes}) {f'has no exact form here: {why}' if why else 'has no handler'}; "
        + _advice(name, bool(args) and not hasattr(args[0], "full_tensor"))
    )


def refuse_compiled(what: str) -> None:
    """Raises `NotSupported` where torch.compile compiles what this thread runs.

    Compiled parts of exchanges would lose their gradients. While the compiler traces, the error
    only makes it run the call uncompiled; there it is raised once more.

    Args:
        what: is compiled, for the error.
    """
    compiles = torch._C._dynamo.eval_frame.get_eval_frame_callback
    if torch.compiler.is_dynamo_compiling() or compiles() is not None:
        raise NotSupported(
            f"torch.compile of {what}: the compiler can't trace exchanges between ranks; call it "
            "without that"
        )


def _advice(name: str, changes_plain: bool) -> str:
    if name.startswith("torch.distributed."):
        return (
            "all ranks of a sample group hold the same batch: sum with pydist.sum_over_groups,"
            " gather with pydist.gather_over_groups (torchmetrics takes it as dist_sync_fn)"
        )
    if any(
        frame.f_code.co_name in _REPARAMETRIZES and frame.f_code.co_filename.startswith(_NN_UTILS)
        for frame in _frames()
    ):
        return _REGISTER
    if "::" in name or name == "torch._make_dual":
        return (
            "subclasses of Tensor (as MONAI's transforms and MetaTensor make), torch.tensor(x), "
            "torch.as_tensor(x, dtype), torch.func, torch.vmap and forward-mode differentiation go "
            "around torch's overrides; compute them on x.full_tensor(), and types by x.to(dtype)"
        )
    if name.startswith("torch.nn.init."):
        return _INITIALIZE
    if name.endswith("_") and not name.endswith("__"):
        return _IN_PLACE_OF_PLAIN if changes_plain else _IN_PLACE
    return _SET if name.endswith(".__set__") else _WAY_ON.strip().format(name=name)


def misfit(
    handler: Callable[..., Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: TypeError,
) -> str | None:
    """Returns why a handler's `TypeError` is a refusal: unknown arguments, or an operator.

    Python turns a `TypeError` inside an operator into "unsupported operand", without a reason.
    """
    try:
        inspect.signature(handler).bind(*args, **kwargs)
    except TypeError as misfit:
        return f"its handler: {misfit}"
    is_operator = func.__name__.startswith("__") or hasattr(func, "__wrapped__")
    return str(error) if is_operator else None


def name_of(func: Callable[..., Any]) -> str:
    """Returns the name under which users call a function that torch passed to the override."""
    name = getattr(func, "__qualname__", None) or str(func)
    owner = getattr(func, "__self__", None)
    if name.startswith(("getset_descriptor", "method-wrapper")):
        return f"torch.Tensor.{getattr(owner, '__name__', 'attribute')}.{func.__name__}"
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return func.name() if isinstance(func, torch._ops.OpOverload) else func._qualified_op_name
    name = name.removeprefix("_VariableFunctionsClass.").replace("TensorBase.", "Tensor.")
    name = name.removeprefix("_wrap_type_error_to_not_implemented.<locals>.")
    if "<locals>" in name:
        name = func.__name__
    home = getattr(func, "__module__", None) or "torch"
    if home in ("torch._tensor", "torch._C", "torch.functional", "torch._VF"):
        home = "torch"
    if home == "torch._C._nn":
        home = "torch.nn.functional"
    if home.startswith("torch._C._"):
        area = home.removeprefix("torch._C._")
        return f"torch.{area}.{name.removeprefix(f'{area}_')}"
    return f"{home}.{name}"


def module_path() -> str:
    """Returns the path of the innermost parallelized module being called, "" outside of one.

    During the recomputation of a checkpoint, only modules in its region count, as backward may be
    called from anywhere.
    """
    for frame in _frames():
        if frame.f_code.co_name == "unpack_hook" and frame.f_code.co_filename == _CHECKPOINT:
            break
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            path = module.__dict__.get(MODULE_PATH)
            if path is not None:
                return str(path)
    return ""


def source_line() -> str:
    """Returns the innermost line outside torch and pydist, as file:line; "" if there is none."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith((*_INSIDE, "<")):
            return f"{file}:{frame.f_lineno}"
    return ""


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
