"""Generates programs from seeds."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from support.hunter import statements as words
from support.hunter.judge import legal
from support.hunter.networks import FAR, fitted, network, plain_network, sample_shape, wide_network
from support.hunter.program import Program
from support.hunter.steps import Steps
from support.random_networks.spot import Source, Spot, call

GRIDS = {
    1: [(2, 1, 1)] * 6 + [(3, 1, 1)] * 3
    + [(1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 2, 2)],
    2: [(1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 2, 1)],
    3: [(1, 1, 1)],
}  # fmt: skip
"""Spatial grids by the number of data groups."""

THEMES = ("look", "data", "surgery", "hooks", "views", "indices", "raise", "saving")
"""Kinds of statements between the calls of a step."""

INGREDIENTS = (
    *THEMES, "accumulate", "average", "channels", "checkpoint", "closure", "different", "dropout",
    "empty", "fast", "frozen", "groups", "lbfgs", "outside", "penalty", "scaler", "second", "share",
    "spectral_norm", "thin", "tied", "unequal", "weight_norm",
)  # fmt: skip
"""All optional ingredients of a program, besides networks, losses and steps."""

KNOWN = ("replaced",)
"""Programs that are known to differ. `replaced`: inputs and outputs change between forward and
backward, bypassing autograd (`x.data.mul_`). torch's backward then computes with the current
values, pydist's also with halos and statistics of the forward pass."""


def ranks_of(seed: int, ingredients: Collection[str] = INGREDIENTS) -> int:
    """Returns the number of ranks of a seed's program."""
    writer = _Writer(seed, ingredients)
    writer.split()
    return len(writer.groups) * writer.channel * math.prod(writer.spatial)


def program_of(seed: int, ingredients: Collection[str] = INGREDIENTS) -> Program | None:
    """Returns the program of a seed, without statements that torch refuses; `None` if empty."""
    return legal(draft_of(seed, ingredients))


def draft_of(seed: int, ingredients: Collection[str] = INGREDIENTS) -> Program:
    """Returns the program of a seed, with statements that torch may refuse."""
    return _with_steady_weights(_Writer(seed, ingredients).program())


def _with_steady_weights(program: Program) -> Program:
    """Returns the program without spectral norm, if a checkpoint has second derivatives.

    Each recomputation moves the weight, so there is no unique second derivative. In torch itself,
    a norm whose backward recomputes, as a split one's does, differs from torch's own (1.9e-5 for a
    convolution with spectral norm before a group norm; 1e-16 without).
    """
    text = f"{program.statements} {program.networks}".lower()
    if "create_graph" not in text or "checkpointed(" not in text:
        return program
    lines = (each.split("\n") for each in program.statements)
    kept = ("\n".join(x for x in each if not x.startswith("spectral(")) for each in lines)
    return replace(program, statements=tuple(kept))


_PRELU = call("nn.PReLU")

_OVER_SAMPLES = re.compile(r"\.(?:mean|sum|min|max|std|var)\(\)")
"""Reductions over all of a group's samples, so that several groups differ from one device."""


class _Writer(Steps):
    def __init__(self, seed: int, ingredients: Collection[str]) -> None:
        super().__init__(seed, ingredients)
        self.networks: dict[str, tuple[Source, ...]] = {}

    def program(self) -> Program:
        self.split()
        if max(self.spatial) > 1 and self.takes("different", 0.03):
            return self.different()
        possible = [t for t in THEMES if t in self.ingredients]
        count = min(len(possible), self.numbers.randint(1, 3))
        self.themes = self.numbers.sample(possible, count)
        self.accumulates = "hooks" not in self.themes and self.takes("accumulate", 0.15)
        self.checkpointed = self.takes("checkpoint", 0.07)
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

    def finished(self, **changes: Any) -> Program:
        made = Program(
            statements=tuple(self.lines), networks=self.networks, sample=self.sample,
            groups=self.groups, spatial=self.spatial, channel=self.channel,
            points=self.points, keep_thin_blocks=self.maybe(0.7) or self.thin,
            seed=self.seed,
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
        self.channels(count)
        if count == 1:
            self.groups: tuple[int, ...] = (self.numbers.choice((1, 2, 2, 3)),)
        else:
            first = self.numbers.randint(1, 2)
            unequal = self.takes("unequal", 0.7)
            self.groups = tuple(
                self.numbers.randint(1, 2) if unequal else first for _ in range(count)
            )
            if unequal and self.takes("empty", 0.2):
                none = self.numbers.randrange(count)
                self.groups = tuple(n * (i != none) for i, n in enumerate(self.groups))
        self.points: tuple[tuple[int, ...], ...] = ()
        if dims < 3 or self.maybe(0.4 if max(self.spatial) < 3 else 0.8):
            self.points = tuple(
                self.cuts(n, parts) for n, parts in zip(self.sample[1:], self.spatial, strict=False)
            )
        self.thin = dims == 3 and count == 1 and self.takes("thin", 0.05)
        if self.thin:
            channels, extent, *rest = self.sample
            extent = max(extent, 6)
            self.sample, self.spatial = (channels, extent, *rest), (2, 1, 1)
            self.points = (
                (0, self.numbers.choice((1, extent - 1)), extent),
                *((0, n) for n in rest),
            )

    def channels(self, count: int) -> None:
        """Draws the ranks of the channel axis; other programs' draws stay as they are."""
        numbers, ranks = random.Random(f"channels {self.seed}"), count * math.prod(self.spatial)
        self.channel = 1
        if "channels" not in self.ingredients or ranks > 3 or numbers.random() > 0.2:
            return
        self.channel = numbers.choice((2, 2, 3))
        if numbers.random() < 0.3:
            self.spatial = (1, 1, 1)

    def cuts(self, extent: int, parts: int) -> tuple[int, ...]:
        """Draws split points: even, uneven, thin or empty blocks."""
        if self.maybe(0.3):
            sizes = [extent // parts + (i < extent % parts) for i in range(parts)]
            return tuple(sum(sizes[:i]) for i in range(parts + 1))
        inner = [self.numbers.randint(0, extent) for _ in range(parts - 1)]
        if inner and self.maybe(0.4):
            inner[0] = self.numbers.choice((1, extent - 1))
        return (0, *sorted(inner), extent)

    def network(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        # torch itself refuses some calls for zero samples.
        make = network if min(self.groups) else plain_network
        first: list[Source] = []
        if self.thin and name == "m0":
            first, shape = fitted(self.numbers, shape, FAR)
        layers, after = make(self.numbers, shape)
        while len(self.groups) > 1 and any(_OVER_SAMPLES.search(layer) for layer in layers):
            layers, after = make(self.numbers, shape)
        layers = first + layers
        if self.checkpointed and name == "m0":
            layers += [Spot(self.numbers, after, 0).layer("InstanceNorm", after[1]), _PRELU]
        if self.dropout and name == "m0":
            place = self.numbers.randint(0, len(layers))
            kind = self.any(("nn.Dropout", f"nn.Dropout{len(shape) - 2}d"))
            layers.insert(place, call(kind, 0.4))
        self.networks[name] = tuple(layers)
        return after

    def models(self) -> None:
        shape = (max(self.groups), *self.sample)
        after = self.network("m0", shape)
        self.lines.append(self.prepared())
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
            how = "copy.deepcopy(m0)" if self.maybe(0.7) else "averaged(m0)"
            self.lines.append(f"e = {how}")
        if "look" in self.themes:
            self.add(self.any(s for s in words.LOOKING if "forward" in s))

    def prepared(self) -> str:
        """Returns the first network as one statement, since it must not exist without `ready`."""
        before, after_ready = ["m0 = net('m0')"], []
        if self.takes("frozen", 0.1):
            before.append(self.fill("part(M, K).requires_grad_(False)"))
        if self.takes("weight_norm", 0.06):
            before.append(
                "nn.utils.parametrizations.weight_norm("
                "next(m for m in m0 if hasattr(m, 'transposed')))"
            )
        if self.takes("spectral_norm", 0.06):
            before.append(self.fill("spectral(m0, K)"))
        if self.takes("surgery", 0.05):
            before.append("m0.float()")
            after_ready += ["m0.double()", "stir(m0)"]
        return "\n".join([*before, "m0 = ready(m0)", *after_ready])

    def input(self) -> None:
        self.is_plain = not self.points and len(self.sample) == 4 and self.maybe(0.3)
        how = "rows" if self.is_plain else "cut"
        self.leaf = self.maybe(0.5)
        # Users that do not name the first sample let pydist compute it.
        unnamed = ", False" if how == "cut" and self.maybe(0.5) else ""
        self.lines.append(f"x = {how}(0, {self.leaf}{unnamed})")
        if self.is_plain:
            self.themes = [t for t in self.themes if t != "views"]

    def optimizer(self) -> None:
        self.scaled = False
        self.lbfgs = not self.dropout and self.takes("lbfgs", 0.03)
        if self.lbfgs:
            return
        self.add(f"opt = {self.any(words.OPTIMIZERS)}")
        if not self.outside and not self.second and self.takes("share", 0.15):
            self.lines.append("opt = share(opt, m0)")
        if "saving" in self.themes:
            self.lines.append("states = reloaded((m0.state_dict(), opt.state_dict()))")
        if self.takes("scaler", 0.08):
            self.scaled = True
            scale, every = self.any(("1.0", "4.0", "1024.0")), self.any("123")
            self.lines.append(
                f"scaler = torch.amp.GradScaler('cpu', {scale}, growth_interval={every})"
            )
        elif "hooks" in self.themes and "raise" not in self.themes and self.maybe(0.15):
            # An optimizer that steps in backward.
            self.lines.append("own = {p: torch.optim.SGD([p], 0.1) for p in params(m0)}")
            self.lines.append(
                "for p in own: p.register_post_accumulate_grad_hook("
                "lambda p: (own[p].step(), own[p].zero_grad()) and None)"
            )

    def closure(self) -> None:
        search = self.any(("None", "'strong_wolfe'"))
        # Groups are only compared with each other: there steps may have any length.
        rate = self.any(("0.5", "1.0") if len(self.groups) == 1 else ("0.5", "20.0"))
        self.add(f"opt = torch.optim.LBFGS(P, {rate}, max_iter=4, line_search_fn={search})")
        self.add(
            "def closure():\\n    opt.zero_grad()\\n    L = (M(x) - 1).square().mean()\\n"
            "    L.backward()\\n    return full(L)"
        )
        for _ in range(2):
            self.lines.append("opt.step(closure)")
        over = "same" if len(self.groups) == 1 else "together"
        self.lines.append(f"see_model('m0', m0, {over!r})")

    # -- different data ---------------------------------------------------------------------

    def different(self) -> Program:
        """Makes a program of sixty steps, where one rank has other data from some step on."""
        self.points, self.dropout, self.checkpointed = (), False, False
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
        # Inputs other than volumes stay plain: each rank computes such a network in full.
        plain = len(self.sample) != 4
        kinds = [s for s in words.DIFFERENT if not (plain and "rows" in s)]
        kinds += [] if plain else words.OTHER_NUMBERS
        change = self.fill(self.any(kinds), K=str(self.numbers.randint(0, 8)))
        lines.insert(3 if change.startswith("y ") else 1, change)
        if change.startswith("y "):
            lines[2], lines[3] = lines[3], lines[2]
        self.lines = [
            "m0 = ready(net('m0'))",
            "opt = torch.optim.SGD(params(m0), 0.01)",
            "for t in range(60):\n" + "\n".join(f"    {line}" for line in lines),
            "see('weights', nn.utils.parameters_to_vector(m0.parameters()))",
        ]
        made = self.finished(differs=True)
        # A rank without samples has no data that could differ.
        a_group = made.ranks // len(made.groups)
        ranks = [rank for rank in range(made.ranks) if made.groups[rank // a_group]]
        return replace(made, looker=self.numbers.choice(ranks))
