"""Marks on autograd's graph, which record a tensor's origin without a walk to the leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def node_of(tensor: Tensor) -> Any:
    """Returns the graph node of a tensor; `None` also where torch refuses any graph of it."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view of no_grad, changed in place since
        return None


def mark(tensor: Tensor, key: str, value: object) -> None:
    """Marks the graph node of a tensor, if it has one."""
    node = node_of(tensor)
    if node is not None:
        node.metadata[key] = value


def below(roots: Iterable[Any], key: str | None = None) -> Iterator[tuple[Any, Any]]:
    """Yields every node of a graph once, with its mark of that name or `None`.

    Args:
        roots: nodes where the walk starts; `None` is skipped.
        key: name of the mark. Nodes below a marked node are skipped; by default none are.
    """
    stack, seen = list(roots), set[Any]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        value = None if key is None else node.metadata.get(key)
        if value is None:
            stack += [following for following, _ in node.next_functions]
        yield node, value
