"""Draws a program's random choices, fills its templates, and collects its lines."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable

FEW = 4
"""Programs limited to so few ingredients get each of them more often."""


class Draws:
    """Random choices from one seeded generator, and the program lines that result.

    Attributes:
        ingredients: allowed ingredients of the program.
        lines: the program's statements so far.
        model: name of the network that templates call `M`.
        parameters: expression for the optimizer's parameters, `P` in templates.
    """

    def __init__(self, seed: int, ingredients: Collection[str]) -> None:
        self.seed, self.ingredients = seed, ingredients
        self.numbers = random.Random(seed)
        self.lines: list[str] = []
        self.model, self.parameters = "m0", "params(m0)"

    def maybe(self, probability: float) -> bool:
        """Returns True with this probability."""
        return self.numbers.random() < probability

    def takes(self, ingredient: str, probability: float) -> bool:
        """Returns True with this probability if the ingredient is allowed; more often among few."""
        if len(self.ingredients) <= FEW:
            probability = 1 - (1 - probability) ** 4
        return ingredient in self.ingredients and self.maybe(probability)

    def any(self, options: Iterable[str]) -> str:
        """Returns one of the options."""
        return self.numbers.choice(list(options))

    def fill(self, template: str, **names: str) -> str:
        """Returns a template with its capital letters replaced."""
        known = {
            "M": self.model, "X": "x", "Y": "y", "E": "e", "K": str(self.numbers.randint(0, 9)),
            "D": str(self.numbers.randint(1, 3)), "P": self.parameters, **names,
        }  # fmt: skip
        lines = template.replace("\\n", "\n")
        return re.sub(r"\b([A-Z])\b", lambda m: known.get(m[1], m[1]), lines)

    def add(self, template: str, **names: str) -> None:
        """Adds a statement."""
        self.lines.append(self.fill(template, **names))

    def averages(self) -> bool:
        """Returns whether an average `e` of the weights exists."""
        return any(re.match(r"e = ", line) for line in self.lines)
