"""Distances between the values of two runs of a program, and the distances that noise causes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from support.equivalence import FP64_BOUND, error
from support.hunter.world import Seen

Values: TypeAlias = dict[str, list[Seen]]
"""The values that a run saw, by name, in order."""

UNDECIDED = 1e-4
"""A value that noise in the last bit moves further than this can't be judged."""

ZERO = 1e-13
"""A difference this small relative to the program's largest gradient, or to its inputs, is
rounding: its terms may cancel."""

CLIPPED = 1e3
"""Gradients seen after clipping may have been larger by this factor."""


IN_HOOKS = ("hook", "dx", "dy", "into")
"""Name prefixes of gradients that hooks see; their scale is that of all gradients of a program."""


class Noise:
    """Effect that noise in the last bit has on the values of a run.

    Attributes:
        whole: the values of the run without noise.
    """

    def __init__(self, whole: Values) -> None:
        self.whole = whole
        self._errors: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._flipped: dict[tuple[str, int], Tensor] = {}

    def add(self, noisy: Values, most: float) -> None:
        """Adds a run with noise; ignores errors larger than `most`, which have other causes."""
        for name, i, e in differences(noisy, self.whole):
            if self._is_discrete(name, i):
                flipped = _unequal(noisy[name][i].value, self.whole[name][i].value)
                self._flipped[name, i] = flipped | self._flipped.get((name, i), flipped)
            elif e <= most:
                self._errors[name, i] = max(self._errors[name, i], e)

    def bound(self, name: str, i: int) -> float:
        """Returns the largest error that noise explains."""
        return max(FP64_BOUND, 16 * self._errors[name, i])

    def decides(self, name: str, i: int, seen: Values) -> bool:
        """Returns whether noise also changes a value, so that it can't be judged."""
        if (name, i) in self._flipped and i < len(seen.get(name, ())):
            # Of equal maxima, the noisy run and the ranks may choose different ones.
            differ = _unequal(seen[name][i].value, self.whole[name][i].value)
            return bool(differ.sum() <= 2 * self._flipped[name, i].sum())
        return self._errors[name, i] > UNDECIDED

    def _is_discrete(self, name: str, i: int) -> bool:
        """Returns whether a value holds indices or booleans, chosen by a maximum or a threshold."""
        value = self.whole[name][i].value if i >= 0 and name in self.whole else None
        return isinstance(value, Tensor) and not value.is_floating_point()


def _unequal(a: Any, b: Tensor) -> Tensor:
    if isinstance(a, Tensor) and a.shape == b.shape:
        return a != b
    return torch.ones_like(b, dtype=torch.bool)


def differences(found: Values, expected: Values) -> Iterator[tuple[str, int, float]]:
    """Yields name, number and error of each value; infinite for differences other than values."""
    for name in {**expected, **found}:
        a, b = found.get(name, []), expected.get(name, [])
        if len(a) != len(b):
            yield name, -1, float("inf")
            continue
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if y.over != "together":
                yield name, i, difference(x, y)


def difference(a: Seen, b: Seen) -> float:
    if a.facts != b.facts:
        return float("inf")
    if isinstance(a.value, Tensor) and isinstance(b.value, Tensor):
        return error(a.value, b.value) if a.value.shape == b.value.shape else float("inf")
    same = a.value is b.value or a.value == b.value
    if not same and isinstance(a.value, float) and isinstance(b.value, float):
        return abs(a.value - b.value) / (abs(b.value) or 1.0)
    return 0.0 if same else float("inf")


def by_place(differences: Iterator[tuple[str, int, float]]) -> dict[tuple[str, int], float]:
    return {(name, i): e for name, i, e in differences}


def is_zero(name: str, i: int, found: Values, whole: Values) -> bool:
    """Returns whether two values differ only by rounding of terms that cancel.

    Gradients cancel before a norm; other values, such as a norm of equal values, are compared with
    inputs of about 1.
    """
    if i < 0:
        return False
    a, b = found[name][i], whole[name][i]
    if a.facts != b.facts or not isinstance(a.value, Tensor) or a.value.shape != b.value.shape:
        return False
    difference = (a.value - b.value).abs()
    scale = _largest(name, i, whole) if _is_gradient(name) else 1.0
    return not difference.numel() or bool(difference.max() <= ZERO * scale)


def _largest(name: str, i: int, whole: Values) -> float:
    """Returns the largest finite gradient, limited by those of the same model and step."""
    model, dot, _ = name.partition(".")
    gradients = {k: v for k, v in whole.items() if _is_gradient(k)}
    largest = _finite(each for values in gradients.values() for each in values)
    if _in_hook(name):
        return largest
    peers = [v for k, v in gradients.items() if k.partition(".")[0] == model]
    near = _finite(each for values in peers for each in (values[i : i + 1] if dot else values))
    return min(CLIPPED * near, largest)


def _is_gradient(name: str) -> bool:
    return "grad" in name or _in_hook(name)


def _in_hook(name: str) -> bool:
    return name.partition("_")[0] in IN_HOOKS


def _finite(seen: Iterable[Seen]) -> float:
    values = [s.value.abs().nan_to_num(0, 0, 0) for s in seen if isinstance(s.value, Tensor)]
    return max((float(v.max()) for v in values if v.numel()), default=0.0)


def found_instead(name: str, i: int, e: float, seen: Values, whole: Values) -> str:
    """Returns a text for the verdict about a difference other than values."""
    return (
        "" if e < float("inf") else f", {_facts(seen, name, i)} instead of {_facts(whole, name, i)}"
    )


def _facts(seen: Values, name: str, i: int) -> Any:
    values = seen.get(name, [])
    if i < 0 or i >= len(values):
        return f"{len(values)} values"
    value = values[i].value
    return values[i].facts if isinstance(value, Tensor) else (values[i].facts, value)
