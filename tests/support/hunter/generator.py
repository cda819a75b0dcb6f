"""Makes a program from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from random_spot import Source, Spot, call

from hunter import statements as words
from hunter.judge import legal
from hunter.networks import network, sample_shape, wide_network
from hunter.program import Program

GRIDS = {
    1: [(2, 1, 1)] * 6 + [(3, 1, 1)] * 3
    + [(1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 2, 2)],
    2: [(1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 2, 1)],
    3: [(1, 1, 1)],
}  # fmt: skip
"""Spatial grids by the number of data groups."""

THEMES = ("look", "data", "surgery", "hooks", "views", "indices", "raise")
"""What happens between the calls of a step."""

INGREDIENTS = (
    *THEMES, "accumulate", "average", "different", "dropout", "groups", "lbfgs", "outside",
    "penalty", "second", "share", "tied", "unequal", "weight_norm", "frozen",
)  # fmt: skip
"""All that a program may have beside networks, losses and steps."""

KNOWN = ("replaced",)
"""Programs that are known to differ. `replaced`: between forward and backward parameters get other
memory (`p.data = ...`), or inputs and outputs change past autograd (`x.data.mul_`). The backward of
torch then computes with what is there, that of pydist with what the forward used."""


def program_of(seed: int, ingredients: Collection[str] = INGREDIENTS) -> Program | None:
    """The program of a seed, without what torch refuses; `None` where nothing is left."""
    return legal(_Writer(seed, ingredients).program())


_OVER_SAMPLES = re.compile(r"\.(?:mean|sum|min|max|std|var)\(\)")
"""A reduction over all samples: of a group's own, so that several groups differ from one device."""


class _Writer:
    def __init__(self, seed: int, ingredients: Collection[str]) -> None:
        self.seed, self.ingredients = seed, ingredients
        self.numbers = random.Random(seed)
        self.lines: list[str] = []
        self.networks: dict[str, tuple[Source, ...]] = {}
        self.waiting = False  # for a backward

    # -- chance -----------------------------------------------------------------------------

    def maybe(self, probability: float) -> bool:
        return self.numbers.random() < probability

    def takes(self, ingredient: str, probability: float) -> bool:
        return ingredient in self.ingredients and self.maybe(probability)

    def any(self, options: Iterable[str]) -> str:
        return self.numbers.choice(list(options))

    def fill(self, template: str, **names: str) -> str:
        """A template with its capital letters replaced."""
        known = {
            "M": self.model, "X": "x", "Y": "y", "E": "e", "K": str(self.numbers.randint(0, 9)),
            "D": str(self.numbers.randint(1, 3)), "P": self.parameters, **names,
        }  # fmt: skip
        text = re.sub(r"\b([A-Z])\b", lambda m: known.get(m[1], m[1]), template)
        return text.replace("\\n", "\n")

    def add(self, template: str, **names: str) -> None:
        self.lines.append(self.fill(template, **names))

    # -- the program ------------------------------------------------------------------------

    def program(self) -> Program:
        self.split()
        self.model = "m0"
        self.parameters = "params(m0)"
        if max(self.spatial) > 1 and self.takes("different", 0.03):
            return self.different()
        possible = [t for t in THEMES if t in self.ingredients]
        count = min(len(possible), self.numbers.randint(1, 3))
        self.themes = self.numbers.sample(possible, count)
        self.accumulates = "hooks" not in self.themes and self.takes("accumulate", 0.15)
        self.dropout = self.takes("dropout", 0.06)
        self.models()
        self.input()
        self.optimizer()
        if self.lbfgs:
            self.closure()
        else:
            for _ in range(self.numbers.randint(1, 3)):
                self.step()
        return self.finished(reference="one rank" if self.dropout else "torch")

    def finished(self, **changes: object) -> Program:
        made = Program(
            statements=tuple(self.lines), networks=self.networks, sample=self.sample,
            groups=self.groups, spatial=self.spatial, points=self.points,
            keep_thin_blocks=self.maybe(0.7), seed=self.seed,
        )  # fmt: skip
        looker = self.numbers.randrange(made.ranks)
        return replace(made, looker=looker, **changes)

    def split(self) -> None:
        groups = self.any("1111223")
        self.sample = sample_shape(self.numbers)
        dims = len(self.sample) - 1
        count = int(groups) if "groups" in self.ingredients else 1
        while True:
            self.spatial = self.numbers.choice(GRIDS[count])
            if all(n == 1 for n in self.spatial[dims:]):
                break
        if count == 1:
            self.groups: tuple[int, ...] = (self.numbers.choice((1, 2, 2, 3)),)
        else:
            first = self.numbers.randint(1, 2)
            unequal = self.takes("unequal", 0.7)
            self.groups = tuple(
                self.numbers.randint(1, 2) if unequal else first for _ in range(count)
            )
        self.points: tuple[tuple[int, ...], ...] = ()
        if dims < 3 or self.maybe(0.4 if max(self.spatial) < 3 else 0.8):
            self.points = tuple(
                self.cuts(n, parts) for n, parts in zip(self.sample[1:], self.spatial, strict=False)
            )

    def cuts(self, extent: int, parts: int) -> tuple[int, ...]:
        """Split points: even, uneven, thin or empty blocks."""
        if self.maybe(0.3):
            sizes = [extent // parts + (i < extent % parts) for i in range(parts)]
            return tuple(sum(sizes[:i]) for i in range(parts + 1))
        inner = [self.numbers.randint(0, extent) for _ in range(parts - 1)]
        if inner and self.maybe(0.4):
            inner[0] = self.numbers.choice((1, extent - 1))
        return (0, *sorted(inner), extent)

    def network(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        layers, after = network(self.numbers, shape)
        while len(self.groups) > 1 and any(_OVER_SAMPLES.search(layer) for layer in layers):
            layers, after = network(self.numbers, shape)
        if self.dropout and name == "m0":
            place = self.numbers.randint(0, len(layers))
            kind = self.any(("nn.Dropout", f"nn.Dropout{len(shape) - 2}d"))
            layers.insert(place, call(kind, 0.4))
        self.networks[name] = tuple(layers)
        return after

    def models(self) -> None:
        shape = (max(self.groups), *self.sample)
        after = self.network("m0", shape)
        before, after_ready = ["m0 = net('m0')"], []
        if self.takes("frozen", 0.1):
            before.append(self.fill("part(M, K).requires_grad_(False)"))
        if self.takes("weight_norm", 0.06):
            before.append(
                "nn.utils.parametrizations.weight_norm("
                "next(m for m in m0 if hasattr(m, 'transposed')))"
            )
        if self.takes("surgery", 0.05):
            before.append("m0.float()")
            after_ready.append("m0.double()")
        # One statement: a minimiser that drops `ready` alone would look at something else.
        self.lines.append("\n".join([*before, "m0 = ready(m0)", *after_ready]))
        self.second = ""
        kind = ""
        if self.takes("second", 0.3):
            kind = self.any(("after", "beside"))
        elif self.takes("tied", 0.15):
            kind = "tied"
        if kind and not self.dropout:
            if kind == "tied":
                if self.maybe(0.4):
                    self.networks["m0"] = tuple(wide_network(self.numbers, shape))
                self.networks["m1"] = self.networks["m0"]
            else:
                self.network("m1", after if kind == "after" else shape)
            tie = "\ntie(m0, m1)" if kind == "tied" else ""
            self.lines.append(f"m1 = net('m1'){tie}\nm1 = ready(m1)")
            self.parameters = "params(m0, m1)"
            self.second = "y = m1(y)" if kind == "after" else "z = m1(x)"
        self.outside = self.takes("outside", 0.12)
        if self.outside:
            channels = after[1] if kind != "after" else 2
            self.networks["head"] = (Spot(self.numbers, after, 0).layer("Conv", channels, 2, 1),)
            self.lines += ["head = net('head')", "learned = number()"]
            self.parameters = f"{self.parameters} + params(head) + [learned]"
        if "data" in self.themes or self.takes("average", 0.1):
            self.lines.append("e = copy.deepcopy(m0)")
        if "look" in self.themes:
            self.add(self.any(s for s in words.LOOKING if "forward" in s))

    def input(self) -> None:
        plain = not self.points and len(self.sample) == 4 and self.maybe(0.3)
        how = "rows" if plain else "cut"
        self.leaf = self.maybe(0.5)
        self.lines.append(f"x = {how}(0, {self.leaf})")
        if plain:
            self.themes = [t for t in self.themes if t != "views"]

    def optimizer(self) -> None:
        self.lbfgs = not self.dropout and self.takes("lbfgs", 0.03)
        if self.lbfgs:
            return
        self.add(f"opt = {self.any(words.OPTIMIZERS)}")
        if not self.outside and not self.second and self.takes("share", 0.15):
            self.lines.append("opt = share(opt, m0)")
        if "hooks" in self.themes and self.maybe(0.15):
            # The optimizer in backward.
            self.lines.append("own = {p: torch.optim.SGD([p], 0.1) for p in params(m0)}")
            self.lines.append(
                "for p in own: p.register_post_accumulate_grad_hook("
                "lambda p: (own[p].step(), own[p].zero_grad()) and None)"
            )

    def closure(self) -> None:
        search = self.any(("None", "'strong_wolfe'"))
        self.add(f"opt = torch.optim.LBFGS(P, 0.5, max_iter=4, line_search_fn={search})")
        self.add(
            "def closure():\\n    opt.zero_grad()\\n    L = (M(x) - 1).square().mean()\\n"
            "    L.backward()\\n    return full(L)"
        )
        for _ in range(2):
            self.lines.append("opt.step(closure)")
        over = "same" if len(self.groups) == 1 else "together"
        self.lines.append(f"see_model('m0', m0, {over!r})")

    # -- a step -----------------------------------------------------------------------------

    def step(self) -> None:
        self.gap(before=True)
        if self.maybe(0.15):
            self.lines.append(self.any(("m0.eval()", "m0.train()")))
        graph = self.maybe(0.8)
        if self.accumulates and self.maybe(0.5):
            self.lines.append(
                f"with no_sync(m0): (m0(x).square().mean() * {self.any('23')}).backward()\n"
                "m0(x).sin().mean().backward()"
            )
        # A part that is called by itself has no group weights, as documented.
        unequal = len(set(self.groups)) > 1
        forward = self.fill(
            self.any([s for s in words.FORWARDS if not (unequal and "each in M" in s)])
        )
        if not graph:
            forward = "with torch.no_grad():\n    " + forward.replace("\n", "\n    ")
        self.lines.append(forward)
        self.waiting = self.waiting or graph
        if self.second:
            self.lines.append(self.second if graph else f"with torch.no_grad(): {self.second}")
        self.gap()
        self.lines.append("see('y', y, 'rows')" if self.maybe(0.6) else "0")
        if not graph:
            self.gap()
            self.lines.append("see('y', y, 'rows')")
            return
        self.loss()
        self.gap()
        if self.maybe(0.3):
            self.lines.append("see('loss', L, 'mean')")
        if len(self.groups) == 1 and self.leaf and self.takes("penalty", 0.1):
            self.add(self.any(words.PENALTIES))
        else:
            backward = self.any(words.BACKWARDS)
            self.add(backward)
            self.waiting = "raise" in self.themes  # whose backwards use older graphs
        self.after_backward()

    def loss(self) -> None:
        pool = list(words.LOSSES)
        if len(self.groups) == 1:
            pool += words.SUMS
        if self.outside and self.maybe(0.6):
            pool = words.OUTSIDE
        text = self.fill(self.any(pool))
        if self.second.startswith("z"):
            text += " + z.sin().mean()"
        self.lines.append(f"L = {text}")

    def after_backward(self) -> None:
        if self.leaf and self.maybe(0.5):
            self.lines.append("see('x.grad', x.grad, 'share')")
        if self.maybe(0.7):
            self.see_models()
        if self.maybe(0.2):
            self.add(self.any(words.AFTER_BACKWARD))
        if self.maybe(0.6):
            self.lines.append("opt.step()")
            if self.maybe(0.8):
                self.lines.append("opt.zero_grad()")
            self.see_models()
        self.gap()

    def see_models(self) -> None:
        self.lines.append("see_model('m0', m0)")
        if self.second:
            self.lines.append("see_model('m1', m1)")
        if self.outside:
            self.lines += ["see_model('head', head)", "see('learned', [learned, learned.grad])"]

    def gap(self, before: bool = False) -> None:
        """Some statements of the program's themes."""
        for theme in self.themes:
            if not self.maybe(0.45):
                continue
            model = self.any(("m0", "m0", "e")) if "e = copy.deepcopy(m0)" in self.lines else "m0"
            if theme == "look":
                self.add(self.any(self.looks()))
            elif theme == "data":
                self.add(self.any([*words.DATA, *self.unless_waiting(words.REPLACING)]))
            elif theme == "surgery":
                kinds = [*words.SURGERY, *self.unless_waiting(words.CASTING)]
                self.add(self.any(kinds), M=model, E="e")
            elif theme == "hooks":
                kept = re.sub(
                    r"see\('(\w+)'",
                    lambda m: f"see('{m[1]}_{len(self.lines)}'",
                    self.any(self.hooks()),
                )
                self.add(kept)
            elif theme == "raise":
                self.raising()
            elif before or len(self.groups) > 1:
                continue
            elif theme == "indices":
                self.add(f"see('index', {self.any(words.INDICES)})")
            elif theme == "views":
                self.views()
        if model_of_average(self.lines) and self.maybe(0.2):
            self.lines.append("see('average', e(x), 'rows')")

    def looks(self) -> list[str]:
        """Ways of looking; a hook on a parameter whose gradient is partitioned is refused."""
        partitioned = "opt = share(opt, m0)" in self.lines
        return [s for s in words.LOOKING if not (partitioned and "pick(M, K).register" in s)]

    def hooks(self) -> list[str]:
        """Hooks. A clamp of an activation's gradient shows that this is of the group's own loss."""
        several = len(self.groups) > 1
        return [s for s in words.HOOKS if not (several and s.startswith("Y.") and "clamp" in s)]

    def unless_waiting(self, changes: list[str]) -> list[str]:
        """Other memory for parameters: by default not while a graph waits for its backward."""
        return changes if "replaced" in self.ingredients or not self.waiting else []

    def views(self) -> None:
        y = "y"
        if self.maybe(0.4):
            y = "w"
            self.add(self.any(("w = x * 1", "w = y * 1", "w = y + 0")))
        self.add(self.any(words.VIEWS), Y=y)
        if self.maybe(0.2):
            self.add("u = v[:1]")
        for _ in range(self.numbers.randint(1, 2)):
            self.add(self.any(words.CHANGES), Y=y)
        self.lines.append("see('v', v * 1)")
        self.lines.append(f"see('base', {y} * 1)")

    def raising(self) -> None:
        register, call_ = self.any(
            (
                "pick(M, K).register_hook|M(X).square().mean().backward()",
                "pick(M, K).register_post_accumulate_grad_hook|M(X).square().mean().backward()",
                "part(M, K).register_full_backward_hook|M(X).square().mean().backward()",
                "part(M, K).register_forward_hook|M(X).square().mean().backward()",
                "part(M, K).register_forward_pre_hook|M(X)",
                "y.register_hook|y.square().mean().backward(retain_graph=True)",
                *["pick(M, K).register_hook|L.backward(retain_graph=True)"] * 3,
                "pick(M, K).register_hook|y.square().mean().backward(retain_graph=True)",
            )
        ).split("|")
        self.add(f"with raising({register}): {call_}\\nM.zero_grad()")

    # -- different data ---------------------------------------------------------------------

    def different(self) -> Program:
        """Fifty steps of training, in which one rank has other data from some step on."""
        self.points, self.dropout = (), False
        shape = (max(self.groups), *self.sample)
        self.network("m0", shape)
        how = "rows(0)" if len(self.sample) == 4 else "cut(0)"
        lines = [
            f"x = {how}",
            "y = m0(x)",
            "y.square().mean().backward()",
            "opt.step()",
            "opt.zero_grad()",
        ]
        # Other inputs than volumes stay plain: such a network is computed whole on each rank.
        plain = len(self.sample) != 4
        kinds = [s for s in words.DIFFERENT if not (plain and "rows" in s)]
        change = self.fill(self.any(kinds), K=str(self.numbers.randint(0, 8)))
        lines.insert(3 if change.startswith("y ") else 1, change)
        if change.startswith("y "):
            lines[2], lines[3] = lines[3], lines[2]
        self.lines = [
            "m0 = ready(net('m0'))",
            "opt = torch.optim.SGD(params(m0), 0.01)",
            "for t in range(60):\n" + "\n".join(f"    {line}" for line in lines),
        ]
        return self.finished(differs=True)


def model_of_average(lines: Iterable[str]) -> bool:
    return "e = copy.deepcopy(m0)" in lines
