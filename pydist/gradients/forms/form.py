"""`Form`, which says how the ranks average the gradients of a bucket; and the dense form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pydist.comm.interface.reduction import divide_
from pydist.gradients.forms.messages import Messages

if TYPE_CHECKING:
    from torch import Tensor

    from pydist.comm.interface.handles import Work
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.leaf import Leaf


class Form(Protocol):
    """How the ranks of a lane average the rows of its buckets.

    All ranks start the same rows in the same order. They wait for them in the same order, after all
    of them have started.
    """

    @property
    def name(self) -> str:
        """Name that errors and logs show."""
        ...

    @property
    def transports(self) -> Sequence[Transport]:
        """The groups whose collectives it uses."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether the running pass leaves the sample groups with different gradients."""
        ...

    def arrange(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns the parameters of a bucket in the order of their gradients in its row."""
        ...

    def start(self, row: Tensor, leaves: Sequence[Leaf]) -> Work:
        """Starts the reduction of a row, in place.

        Args:
            row: this rank's gradients, [elements], of one floating-point dtype.
            leaves: the parameters, in the order of `arrange`.
        """
        ...

    def progress(self) -> None:
        """Starts messages that follow complete ones, while backward runs. Does not wait."""
        ...

    def complete(self, row: Tensor) -> None:
        """Makes the result of a complete reduction the mean over the ranks, in place."""
        ...

    def conclude(self, kept: Callable[[Leaf], bool]) -> None:
        """Ends a backward pass, after all its reductions.

        Args:
            kept: returns whether a parameter has received its mean; the same on all ranks.
        """
        ...

    def abandon(self) -> None:
        """Ends a backward pass whose reductions are dropped."""
        ...

    def sent(self) -> Mapping[str, int]:
        """Returns the bytes that this rank has sent so far, by the kind of group."""
        ...


class Stateless:
    """Base of forms that keep nothing between backward passes."""

    @property
    def is_local(self) -> bool:
        """Whether groups end with different gradients, here never; see `Form.is_local`."""
        return False

    def arrange(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Keeps the order of the parameters; see `Form.arrange`."""
        return list(leaves)

    def progress(self) -> None:
        """Does nothing, as no message follows another; see `Form.progress`."""

    def complete(self, row: Tensor) -> None:
        """Does nothing, as the reduction itself divides; see `Form.complete`."""

    def conclude(self, kept: Callable[[Leaf], bool]) -> None:
        """Does nothing, as nothing is kept between passes; see `Form.conclude`."""

    def abandon(self) -> None:
        """Does nothing, as nothing is kept between passes; see `Form.abandon`."""


class DenseForm(Stateless):
    """Form that averages each bucket by one all-reduce over all ranks.

    Attributes:
        messages: the collectives of all ranks.
    """

    name = "dense"

    def __init__(self, transport: Transport) -> None:
        self.messages = Messages(transport)
        self.transports = [transport]

    def start(self, row: Tensor, leaves: Sequence[Leaf]) -> Work:
        """Starts the all-reduce of a row; see `Form.start`."""
        del leaves
        return self.messages.all_reduce(row)

    def scatter(self, row: Tensor, out: Tensor, counts: Sequence[int]) -> Work:
        """Starts a reduce-scatter: this rank gets the means of its interval (ZeRO-1).

        Args:
            row: this rank's gradients.
            out: receives this rank's interval.
            counts: elements of each rank's interval.
        """
        return self.messages.reduce_scatter(row, out, counts, self.messages.size)

    def complete(self, row: Tensor) -> None:
        """Divides the sum by the number of ranks; see `Form.complete`."""
        divide_(row, self.messages.size)

    def sent(self) -> Mapping[str, int]:
        """Returns the bytes sent to all ranks; see `Form.sent`."""
        return {"all": self.messages.sent}
