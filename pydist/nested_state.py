"""Converts nested state to JSON and named tensors, and back, instead of pickling it.

A state consists of dicts (keys: strings, numbers, booleans), lists, tuples, tensors, strings,
numbers, booleans and None, as returned by `state_dict()` of torch's optimizers, schedulers and
scalers. Dicts may be those of `collections`: a schedule with milestones has a Counter, and calls
its methods. Any other subclass of dict, list or tuple is restored as a plain one. A dict with one
key that starts with "$" represents a value that JSON lacks.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any, TypeAlias

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pydist.errors import CheckpointError
from pydist.parsing import require_shallow

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

# Closed lists: a checkpoint names no other type.
_DICTS: dict[str, type[dict[Any, Any]]] = {"$Counter": Counter, "$OrderedDict": OrderedDict}
_FACTORIES = {each.__name__: each for each in (bool, dict, float, int, list, set, str, tuple)}
"""What a `defaultdict` may make."""


def flatten_state(state: object) -> tuple[Json, dict[str, Tensor]]:
    """Splits a state into JSON and tensors.

    Args:
        state: the nested state.

    Returns:
        Its skeleton, which `json.dumps` accepts, and its tensors (on the CPU, contiguous, none
        sharing memory) by name. A tensor's name is its path, joined by dots, so that a flat
        `state_dict` keeps its own names.

    Raises:
        CheckpointError: a value that is none of the above, named by its path.
    """
    tensors: dict[str, Tensor] = {}
    return _flatten(state, (), tensors), tensors


def unflatten_state(skeleton: Json, tensors: dict[str, Tensor]) -> Any:
    """Rebuilds a state; the inverse of `flatten_state`.

    Raises:
        CheckpointError: the skeleton names a missing tensor, or a kind of value that this version
            does not know.
    """
    if isinstance(skeleton, list):
        return [unflatten_state(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind = next((key for key in skeleton if key.startswith("$")), None)
    if kind is None:
        return {key: unflatten_state(value, tensors) for key, value in skeleton.items()}
    return _unflatten_special(kind, skeleton[kind], tensors)


def _unflatten_special(kind: str, content: Any, tensors: dict[str, Tensor]) -> Any:
    """Returns the value that a dict with the single key `kind` represents."""
    if kind == "$tensor" and content in tensors:
        return tensors[content]
    if kind == "$tuple":
        return tuple(unflatten_state(item, tensors) for item in content)
    if kind == "$dict":
        return {
            unflatten_state(key, tensors): unflatten_state(value, tensors) for key, value in content
        }
    if kind in _DICTS:
        return _DICTS[kind](_unflatten_dict(content, tensors))
    if kind == "$defaultdict":
        name, plain = content
        factory = None if name is None else _FACTORIES[name]
        return defaultdict(factory, _unflatten_dict(plain, tensors))
    if kind == "$float":
        return float(content)
    if kind == "$tensor":
        raise CheckpointError(f"the checkpoint has no tensor {content!r}")
    raise CheckpointError(f"the checkpoint has a value of the unknown kind {kind!r}")


def _unflatten_dict(content: Any, tensors: dict[str, Tensor]) -> dict[Any, Any]:
    found = unflatten_state(content, tensors)
    if not isinstance(found, dict):
        raise CheckpointError(f"the checkpoint has a {type(found).__name__} in place of a dict")
    return found


def _flatten(value: object, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Json:
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value, path, tensors)}
    if isinstance(value, dict):
        return _flatten_dict(value, path, tensors)
    if isinstance(value, list | tuple):
        items = [_flatten(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    # Exact types: a NumPy number or an enum would not be restored as such.
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or type(value) in (str, int, float, bool):
        if isinstance(value, str):
            _require_text(value, path)
        return value  # type: ignore[return-value]
    raise CheckpointError(
        f"can't store {_named(path)}: a {type(value).__name__} is neither a tensor nor a plain "
        "value"
    )


def _flatten_dict(value: dict[Any, Any], path: tuple[str, ...], tensors: dict[str, Tensor]) -> Json:
    plain = _flatten_plain_dict(value, path, tensors)
    kind = f"${type(value).__name__}"
    if type(value) is _DICTS.get(kind):
        return {kind: plain}
    if type(value) is defaultdict:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is _FACTORIES.get(name or ""):
            return {kind: [name, plain]}
    return plain


def _flatten_plain_dict(
    value: dict[Any, Any], path: tuple[str, ...], tensors: dict[str, Tensor]
) -> Json:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        for key in value:
            _require_text(key, path)
        return {key: _flatten(item, (*path, key), tensors) for key, item in value.items()}
    pairs: list[Json] = [
        [_flatten(key, path, tensors), _flatten(item, (*path, str(key)), tensors)]
        for key, item in value.items()
    ]
    return {"$dict": pairs}


def _require_text(value: str, path: tuple[str, ...]) -> None:
    """Raises `CheckpointError` if a text is no UTF-8, as names of files may be."""
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"can't store {_named(path)}: {value!r} is no UTF-8") from error


def _named(path: tuple[str, ...]) -> str:
    return ".".join(path) or "the state"


def _keep(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    name = base = ".".join(path) or "tensor"
    copies = 0
    while name in tensors:
        copies += 1
        name = f"{base}#{copies}"
    sparse = tensor.layout != torch.strided
    # A copy: tied weights share memory, which the file format does not support.
    form = torch.preserve_format if sparse else torch.contiguous_format
    found = tensor.detach().to("cpu", copy=True, memory_format=form)
    if type(found) is not Tensor or sparse:
        kind = type(found).__name__ if type(found) is not Tensor else str(tensor.layout)
        raise CheckpointError(
            f"can't store {_named(path)}: a {kind} is no plain tensor; full_tensor() makes one of "
            "a sharded tensor, to_dense() of a sparse one"
        )
    tensors[name] = found
    return name


def encode(tensors: dict[str, Tensor]) -> bytes:
    """Encodes tensors as safetensors.

    Raises:
        CheckpointError: the format does not have the type of one of them.
    """
    try:
        return safetensors.torch.save(tensors)
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"can't store a tensor: {error}") from error


def dumps(skeleton: Json) -> bytes:
    """Encodes a skeleton, with exact floats and keys in the given order.

    Raises:
        CheckpointError: it is nested so deeply that it can't be read.
    """
    try:
        require_shallow(skeleton)
    except ValueError as error:
        raise CheckpointError(f"can't store a state: {error}") from None
    return json.dumps(skeleton, allow_nan=False, ensure_ascii=False, indent=1).encode()
