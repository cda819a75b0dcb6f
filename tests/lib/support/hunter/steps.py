"""Generates a program's steps: forward, loss, backward, optimizer, statements between them."""

from __future__ import annotations

import itertools
import math
import re

from support.hunter import statements as words
from support.hunter.draws import Draws
from support.random_networks.spot import Source


class Steps(Draws):
    """Generator that adds training steps to a program.

    Attributes:
        groups, spatial, channel, networks: those of the program.
        themes: kinds of statements between the calls of a step.
        accumulates: whether steps may accumulate gradients.
        checkpointed: whether all forward passes are checkpoints.
        leaf: whether the input requires a gradient.
        is_plain: whether the model cuts the input itself.
        second: the call of a second network, or "".
        outside: whether parameters outside of networks are trained.
        scaled: whether a GradScaler makes the steps.
        waiting: whether a graph waits for its backward.
        called: the latest forward pass.
    """

    groups: tuple[int, ...]
    spatial: tuple[int, ...]
    channel: int
    networks: dict[str, tuple[Source, ...]]
    themes: list[str]
    accumulates: bool
    checkpointed: bool
    leaf: bool
    is_plain: bool
    second: str
    outside: bool
    scaled: bool
    waiting = False
    called = ""

    def step(self) -> None:
        """Adds one step of training, or a forward pass without a graph."""
        self.gap(before=True)
        if self.maybe(0.15):
            self.lines.append(self.any(("m0.eval()", "m0.train()")))
        graph = self.maybe(0.8)
        if self.accumulates and self.maybe(0.5):
            self.lines.append(
                f"with no_sync(m0): (m0(x).square().mean() * {self.any('23')}).backward()\n"
                "m0(x).sin().mean().backward()"
            )
        if not self.second and not self.scaled and self.takes("closure", 0.06):
            self.closed_step()
            return
        self.called = forward = self.fill(self.any(self.forwards()))
        # For outputs without a graph, a head keeps the gradients of its own group, as documented.
        grouped = self.outside and len(self.groups) > 1
        if grouped:
            forward += "\ngraph = torch.is_grad_enabled()"
        if not graph:
            forward = "with torch.no_grad():\n    " + forward.replace("\n", "\n    ")
        self.lines.append(forward)
        self.waiting = self.waiting or graph
        if self.second:
            self.lines.append(self.second if graph else f"with torch.no_grad(): {self.second}")
        self.gap()
        if self.maybe(0.6):
            self.lines.append("see('y', y, 'rows')")
        if not graph:
            self.gap()
            self.lines.append("see('y', y, 'rows')")
            return
        self.lines.append(("assert graph\n" if grouped else "") + f"L = {self.loss()}")
        self.gap()
        if self.maybe(0.3):
            self.lines.append("see('loss', L, 'mean')")
        if self.scaled:
            self.scaled_step()
            return
        self.backward()
        self.after_backward()

    def backward(self) -> None:
        """Adds the gradients of the loss."""
        # When a checkpointed part is called again, torch has restored the model's own weights.
        if "Checkpointed" not in str(self.networks) and self.takes("fast", 0.1):
            self.add(self.any(words.FAST))
        often = 0.7 if self.checkpointed else 0.1
        if len(self.groups) == 1 and self.leaf and self.takes("penalty", often):
            self.add(self.any(words.PENALTIES))
        else:
            self.add(self.any(s for s in words.BACKWARDS if self.leaf or "X" not in s))
            self.waiting = "raise" in self.themes  # its backwards use older graphs

    def forwards(self) -> list[str]:
        """Returns ways of calling the network."""
        if self.checkpointed:
            return [s for s in words.FORWARDS if "checkpoint" in s]
        # A part called by itself has no group weights, as documented. With a plain input it is
        # torch's own, which would see the changes that in-place layers make to a block.
        whole_only = self.is_plain or len(set(self.groups)) > 1
        # Such a hook changes weights again in the recomputation, unlike the ones torch has saved.
        hooked = any("forward_hook" in s and "in m.parameters()" in s for s in self.lines)
        left_out = ["each in M"] * whole_only + ["checkpoint"] * hooked
        return [s for s in words.FORWARDS if not any(each in s for each in left_out)]

    def loss(self) -> str:
        """Returns an expression for the loss."""
        pool = list(words.LOSSES)
        if len(self.groups) == 1:
            pool += words.SUMS
        if self.outside and self.maybe(0.6):
            pool = words.OUTSIDE
        text = self.fill(self.any(pool))
        if self.second.startswith("z"):
            text += " + z.sin().mean()"
        return text

    def after_backward(self) -> None:
        """Adds inspections and changes of gradients, and the optimizer step."""
        if self.leaf and self.maybe(0.5):
            self.lines.append("see('x.grad', x.grad, 'share')")
        if self.maybe(0.7):
            self.see_models()
        if self.maybe(0.3):
            self.add(self.any(words.AFTER_BACKWARD))
        if self.maybe(0.6):
            self.lines.append("opt.step()")
            if self.maybe(0.8):
                self.add(self.any(words.ZEROING))
            self.see_models()
        self.gap()

    def closed_step(self) -> None:
        """Adds a step whose optimizer calls forward and backward itself."""
        self.add(
            "def closure():\\n    opt.zero_grad()\\n    y = M(X)\\n"
            f"    L = {self.loss()}\\n    L.backward()\\n    return L"
        )
        self.lines.append("see('loss', opt.step(closure), 'mean')")
        self.see_models()
        self.gap()

    def scaled_step(self) -> None:
        """Adds a step by a GradScaler, which sometimes overflows."""
        factor = ""
        if self.maybe(0.3):
            factor = " * float('inf')"
            # A group with one rank may overflow alone, if its samples count. The gradients then
            # differ from those of one device, so nothing may see them.
            alone = (
                self.channel * math.prod(self.spatial) == 1
                and min(self.groups)
                and "hooks" not in self.themes
            )
            if alone and self.maybe(0.5):
                factor = " * (float('inf') if here else 1.0)"
        self.lines.append(f"scaler.scale(L{factor}).backward()")
        self.waiting = False
        self.gap()
        if self.maybe(0.4):
            self.lines.append("scaler.unscale_(opt)")
            if not factor:
                self.see_models()
                self.add(self.any(words.AFTER_BACKWARD))
        self.lines += ["scaler.step(opt)", "scaler.update()", "see('scale', scaler.get_scale())"]
        if "here" in factor:
            self.add("for p in P: p.grad = None")
        elif factor or self.maybe(0.8):
            self.add(self.any(words.ZEROING))
        self.see_models()

    def see_models(self) -> None:
        """Adds records of all parameters, gradients and buffers."""
        self.lines.append("see_model('m0', m0)")
        if self.second:
            self.lines.append("see_model('m1', m1)")
        if self.outside:
            self.lines += ["see_model('head', head)", "see('learned', [learned, learned.grad])"]

    # -- between the calls ------------------------------------------------------------------

    def gap(self, before: bool = False) -> None:
        """Adds some statements of the program's themes."""
        for theme in self.themes:
            if not self.maybe(0.45) or (theme == "data" and self.recomputes()):
                continue
            model = self.any(("m0", "m0", "e")) if self.averages() else "m0"
            if theme == "look":
                self.add(self.any(self.looks()))
            elif theme == "data":
                self.add(self.any([*self.changes(), *self.unless_waiting(words.REPLACING)]))
            elif theme == "surgery":
                self.add(self.any(self.surgery()), M=model, E="e")
            elif theme == "saving":
                self.add(self.any(words.SAVING), M=model)
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
        if self.averages() and self.maybe(0.2):
            self.lines.append("see('average', e(x), 'rows')")

    def surgery(self) -> list[str]:
        """Returns changes of the network; a recomputation in another mode saves other tensors."""
        kinds = [*words.SURGERY, *self.unless_waiting(words.CASTING)]
        if not self.recomputes():
            return kinds
        changing = ("requires_grad_", "eval()", "train()")
        return [s for s in kinds if not any(change in s for change in changing)]

    def changes(self) -> list[str]:
        """Returns changes that bypass autograd; in a forward pass only if it runs once."""
        once = self.computes_once()
        return [s for s in words.DATA if once or "forward_hook" not in s]

    def computes_once(self) -> bool:
        """Returns whether no part of a network is recomputed in a backward pass."""
        layers = "".join(map(str, itertools.chain(*self.networks.values())))
        again = "Checkpointed" in layers or self.checkpointed or "checkpoint" in self.called
        return not again

    def recomputes(self) -> bool:
        """Returns whether a waiting checkpoint needs the same weights for its backward."""
        return self.waiting and "checkpoint" in self.called

    def looks(self) -> list[str]:
        """Returns inspections; pydist refuses hooks on parameters with partitioned gradients."""
        partitioned = "opt = share(opt, m0)" in self.lines
        looks = [s for s in words.LOOKING if not (partitioned and "pick(M, K).register" in s)]
        return self.recomputable(looks)

    def recomputable(self, statements: list[str]) -> list[str]:
        """Returns the statements that do not change the recomputation of a part.

        A full backward hook saves more. A forward hook that changes arguments or results of a layer
        affects only the recomputation if the result depends on tensors that torch has saved.
        """
        if not self.waiting or self.computes_once():
            return statements
        changing = ("register_full_backward", "o * 1.5", "o.mul_(", "a[0] * 0.5")
        return [s for s in statements if not any(change in s for change in changing)]

    def hooks(self) -> list[str]:
        """Returns hooks, without clamps that show the scale of an activation's gradient.

        A clamp shows that this gradient is of the group's own loss, and, under a GradScaler, which
        gradients are infinite and which are NaN.
        """
        several, raising = len(self.groups) > 1, "raise" in self.themes
        return [
            s
            for s in self.recomputable(words.HOOKS)
            if not ((several or self.scaled) and s.startswith("Y.") and "clamp" in s)
            # The point that an interrupted pass reaches differs from torch's.
            and not (raising and ("see(" in s or "i[0]" in s))
        ]

    def unless_waiting(self, changes: list[str]) -> list[str]:
        """Returns the changes of parameters' memory; by default none while a graph waits."""
        return changes if "replaced" in self.ingredients or not self.waiting else []

    def noticed(self, statements: list[str], y: str) -> list[str]:
        """Excludes, by default, `.data` of tensors that a waiting graph saved: torch misses it."""
        unseen = statements if y != "y" else self.unless_waiting(statements)
        return unseen or [s for s in statements if ".data" not in s]

    def views(self) -> None:
        """Adds a view, changes of it or its base, and records of both."""
        y = "y"
        if self.maybe(0.4):
            y = "w"
            self.add(self.any(("w = x * 1", "w = y * 1", "w = y + 0")))
        self.add(self.any(self.noticed(words.VIEWS, y)), Y=y)
        if self.maybe(0.2):
            self.add("u = v[:1]")
        for _ in range(self.numbers.randint(1, 2)):
            self.add(self.any(self.noticed(words.CHANGES, y)), Y=y)
        self.lines.append("see('v', v * 1)")
        self.lines.append(f"see('base', {y} * 1)")

    def raising(self) -> None:
        """Adds a hook that raises, in a pass whose error the program catches.

        The point that this pass reaches shows in buffers of its recomputed parts.
        """
        if not self.computes_once():
            return
        graphs = words.RAISING_LATER if self.waiting else []
        register, call = self.any([*words.RAISING, *graphs]).split("|")
        self.add(f"with raising({register}): {call}\\nopt.zero_grad()\\nM.zero_grad()")
        if self.leaf:
            self.lines.append("x.grad = None")
        if self.maybe(0.3):
            self.lines += ["m0(x).square().mean().backward()", "see_model('m0', m0)"]
