"""What a program is made with: chance, templates, and the lines so far."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable

FEW = 4
"""Programs that may have so few ingredients look for something: they have them more often."""


class Draws:
    """Random choices, each from one seeded generator, and the lines that they make.

    Attributes:
        ingredients: what the program may have.
        lines: its statements so far.
        model: name of the network that templates call `M`.
        parameters: expression for what the optimizer gets, `P` in templates.
    """

    def __init__(self, seed: int, ingredients: Collection[str]) -> None:
        self.seed, self.ingredients = seed, ingredients
        self.numbers = random.Random(seed)
        self.lines: list[str] = []
        self.model, self.parameters = "m0", "params(m0)"

    def maybe(self, probability: float) -> bool:
        """True that often."""
        return self.numbers.random() < probability

    def takes(self, ingredient: str, probability: float) -> bool:
        """True that often, if the program may have the ingredient; more often among few."""
        if len(self.ingredients) <= FEW:
            probability = 1 - (1 - probability) ** 4
        return ingredient in self.ingredients and self.maybe(probability)

    def any(self, options: Iterable[str]) -> str:
        """One of the options."""
        return self.numbers.choice(list(options))

    def fill(self, template: str, **names: str) -> str:
        """A template with its capital letters replaced."""
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
        """Whether there is an average `e` of the weights."""
        return any(re.match(r"e = ", line) for line in self.lines)
