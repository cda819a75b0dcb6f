"""Deep Gradient Compression: only the largest elements of what a group has not sent yet.

With the gradient g of a group, momentum m, velocity u and rest v of each element:

    u ← m u + g        v ← v + u        (momentum correction)
    send the largest |v|: a fraction of the elements, the density
    where sent: v ← 0, u ← 0            (the latter is momentum factor masking)

The gradient is the mean over the groups of what they send, and has momentum already: the optimizer
must have none. With Nesterov's momentum u ← m (u + g) and v ← v + u + g. Parameters with one dim
are averaged as they are, and get the same momentum afterwards. Optionally g is first clipped by its
norm, see `pydist.gradients.forms.clipping`.

Source: Lin, Han, Mao, Wang and Dally (2018), arXiv:1712.01887.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.comm.interface.handles import Work
from pydist.gradients.forms.clipping import LocalClipping
from pydist.gradients.forms.stateful import LeafState, StatefulForm, divided, joined

if TYPE_CHECKING:
    from pydist.gradients.forms.messages import Messages
    from pydist.gradients.leaf import Leaf

_FEW = 0.8
"""Fraction of the wanted elements below which a threshold is lowered, and by which."""
_TRIES = 10
_LEAST_SAMPLED = 2
"""Elements of a sample above the threshold, at least."""


class SparseForm(StatefulForm):
    """Form that sends the largest elements between sample groups (Deep Gradient Compression).

    State of a parameter: "velocity" and "rest", of the shape of the parameter; "momentum" of those
    with one dim, which all groups share.
    """

    name = "dgc"
    shared = frozenset({"momentum"})

    def __init__(
        self,
        within: Messages,
        between: Messages,
        leaves: Iterable[Leaf],
        seed: int,
        *,
        densities: Sequence[float],
        warmup: int,
        momentum: float,
        nesterov: bool,
        masking: bool,
        sample: float,
        clip_norm: float | None = None,
    ) -> None:
        """Takes the settings of `pydist.gradients.DGC`.

        Args:
            within: the sample group.
            between: the ranks with one index in all sample groups.
            leaves: the parameters.
            seed: of random numbers.
            densities: one for each of the warm-up's equal parts, and the last one.
            warmup: number of steps of the warm-up.
            momentum: m.
            nesterov: whether it has Nesterov's form.
            masking: whether u becomes 0 where elements are sent.
            sample: fraction of the elements that determine the threshold.
            clip_norm: the threshold of local gradient clipping; None without.
        """
        self._densities, self._warmup = densities, warmup
        self._momentum, self._nesterov, self._masks = momentum, nesterov, masking
        self._sample = sample
        super().__init__(within, between, leaves, seed)
        self._clipping: LocalClipping | None = None
        if clip_norm is not None:
            self._clipping = LocalClipping(self.within, between.size, clip_norm)

    @property
    def runs_ahead(self) -> bool:
        """Whether messages may start in backward; not with clipping. See `Levels.runs_ahead`."""
        return self._clipping is None and super().runs_ahead

    @property
    def density(self) -> float:
        """The fraction of the elements that the running pass sends."""
        if self.steps >= self._warmup:
            return self._densities[-1]
        return self._densities[self.steps * (len(self._densities) - 1) // self._warmup]

    def quantities(self, name: str) -> Mapping[str, torch.Size]:
        """Returns the shapes of a parameter's momentum and rest; see `StatefulForm.quantities`."""
        shape = self.shapes[name]
        of_momentum = ["velocity" if len(shape) > 1 else "momentum"] if self._momentum else []
        return dict.fromkeys([*of_momentum, *(["rest"] if len(shape) > 1 else [])], shape)

    def abandon(self) -> None:
        """Forgets the pass and its norms; see `Form.abandon`."""
        super().abandon()
        if self._clipping is not None:
            self._clipping.clear()

    def _await(self, part: Tensor, work: Work | None) -> Iterator[Work]:
        if self._clipping is None:
            yield from super()._await(part, work)
        else:
            yield from self._clipping.until_known(part, work or Work(), self.scale)

    def _compresses(self, leaf: Leaf) -> bool:
        return len(leaf.kind.shape) > 1

    def _exchange_both(
        self,
        part: Tensor,
        compressed: Sequence[tuple[Leaf, Tensor]],
        plain: Sequence[tuple[Leaf, Tensor]],
    ) -> Iterator[Work]:
        if self._clipping is not None:
            self._clipping.clip(part)
        if plain:
            message = joined([piece for _, piece in plain], part)
            yield from self._average(message)
            shapes = [piece.shape for _, piece in plain]
            for (leaf, piece), mean in zip(plain, divided(message, shapes), strict=True):
                piece.copy_(self._with_momentum(leaf, mean))
        if not compressed:
            return
        first, places, values = 0, [], []
        elements = sum(leaf.numel for leaf, _ in compressed)
        for leaf, piece in compressed:
            found, sent = self._take(leaf, piece)
            # Every group sends as many: places that a group does not need are past the end.
            count = self._count(leaf) - found.numel()
            places.append(torch.nn.functional.pad(found + first, (0, count), value=elements))
            values.append(torch.nn.functional.pad(sent, (0, count)))
            first += leaf.numel
        where, what = torch.cat(places), torch.cat(values)
        if elements < torch.iinfo(torch.int32).max:
            where = where.to(torch.int32)
        groups = self.between.size
        all_where, all_what = where.new_empty(groups * len(where)), what.new_empty(
            groups * len(what)
        )  # fmt: skip
        yield self.between.all_gather(where, all_where, [len(where)] * groups)
        yield self._last(self.between.all_gather(what, all_what, [len(what)] * groups))
        total = part.new_zeros(elements + 1)
        # In the order of ranks, without atomic additions: the same bits on all ranks.
        for index, value in zip(all_where.chunk(groups), all_what.chunk(groups), strict=True):
            total[index.long()] += value
        total = total[:-1].div_(groups)
        shapes = [piece.shape for _, piece in compressed]
        for (_, piece), mean in zip(compressed, divided(total, shapes), strict=True):
            piece.copy_(mean).mul_(self.scale)

    def _count(self, leaf: Leaf) -> int:
        """Returns the number of elements of a parameter that each group sends."""
        return math.ceil(self.density * leaf.numel)

    def _take(self, leaf: Leaf, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a gradient to the state, and takes the largest elements out of it.

        Returns:
            The positions of these elements in the parameter, and their values.
        """
        grad = piece.reshape(-1) / self.scale
        count = self._count(leaf)
        if not bool(torch.isfinite(grad).all()):
            # All groups must see it; what the pass makes of the state is dropped.
            return torch.arange(count, device=grad.device), torch.full_like(grad[:count], torch.nan)
        kept = self.state.get(leaf.name, {})
        velocity, step = self._advance(kept.get("velocity"), grad)
        rest = step + kept["rest"].view(-1) if kept else step.clone()
        found = largest(rest.abs(), count, self._sample, self.steps)
        sent = rest[found]
        rest[found] = 0
        after: LeafState = {"rest": rest.view(leaf.kind.shape)}
        if velocity is not None:
            if self._masks:
                velocity[found] = 0
            after["velocity"] = velocity.view(leaf.kind.shape)
        self._changed[leaf.name] = after
        return found, sent

    def _with_momentum(self, leaf: Leaf, mean: Tensor) -> Tensor:
        """Returns the gradient with momentum of a parameter that is not compressed."""
        kept = self.state.get(leaf.name, {})
        velocity, step = self._advance(kept.get("momentum"), mean.reshape(-1) / self.scale)
        if velocity is not None:
            self._changed[leaf.name] = {"momentum": velocity.view(leaf.kind.shape)}
        return step.view(mean.shape) * self.scale

    def _advance(self, kept: Tensor | None, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        """Returns the new velocity, in new memory, and the gradient with momentum."""
        if not self._momentum:
            return None, grad
        before = torch.zeros_like(grad) if kept is None else kept.view(-1)
        if self._nesterov:
            velocity = (before + grad).mul_(self._momentum)
            return velocity, velocity + grad
        velocity = grad + before * self._momentum
        return velocity, velocity


def largest(sizes: Tensor, count: int, fraction: float, turn: int) -> Tensor:
    """Returns positions of nearly the largest elements, at most `count`, in ascending order.

    A threshold is estimated on elements at equal distances. If many more elements are above it, the
    largest of these are taken; if far fewer, it is lowered.

    Args:
        sizes: [n], not negative.
        count: how many are wanted, 1 to n.
        fraction: of the elements in the sample; at least enough that two are above the threshold.
        turn: decides where the sample begins.
    """
    elements = sizes.numel()
    if count >= elements:
        return torch.arange(elements, device=sizes.device)
    share = count / elements
    wanted = max(fraction * elements, _LEAST_SAMPLED / share)
    stride = max(1, int(elements // wanted))
    sample = sizes[turn % stride :: stride]
    above = min(max(1, math.ceil(share * sample.numel())), sample.numel())
    threshold = float(sample.topk(above).values[-1])
    found = (sizes >= threshold).nonzero().view(-1)
    for _ in range(_TRIES):
        if found.numel() >= _FEW * count:
            break
        threshold *= _FEW
        found = (sizes >= threshold).nonzero().view(-1)
    if found.numel() > count:
        found = found[sizes[found].topk(count).indices].sort().values
    return found
