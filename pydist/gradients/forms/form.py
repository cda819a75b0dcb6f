"""`Form`, which says how the ranks average the gradients of a bucket; and the dense form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pydist.comm.interface.reduction import divide_
from pydist.gradients.forms.messages import Messages

if TYPE_CHECKING:
    from torch import Tensor

    from pydist.comm.interface.handles import Work
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.leaf import Leaf


class Form(ABC):
    """How the ranks of a lane average the rows of its buckets.

    All ranks start the same rows in the same order. They wait for them in the same order, after all
    of them have started. Defaults are those of forms that keep nothing between backward passes.

    Attributes:
        name: shown in errors and logs.
        transports: the groups whose collectives it uses.
    """

    name: str
    transports: Sequence[Transport]

    @property
    def is_local(self) -> bool:
        """Whether the running pass leaves the sample groups with different gradients."""
        return False

    def arrange(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns the parameters of a bucket in the order of their gradients in its row."""
        return list(leaves)

    @abstractmethod
    def start(self, row: Tensor, leaves: Sequence[Leaf]) -> Work:
        """Starts the reduction of a row, in place.

        Args:
            row: this rank's gradients, [elements], of one floating-point dtype.
            leaves: the parameters, in the order of `arrange`.
        """

    def progress(self) -> None:  # noqa: B027  (not abstract: most forms send one message)
        """Starts messages that follow complete ones, while backward runs. Does not wait."""

    def complete(self, row: Tensor) -> None:  # noqa: B027  (where the reduction itself divides)
        """Makes the result of a complete reduction the mean over the ranks, in place."""

    def conclude(self, kept: Callable[[Leaf], bool]) -> None:  # noqa: B027  (no state)
        """Ends a backward pass, after all its reductions.

        Args:
            kept: returns whether a parameter has received its mean; the same on all ranks.
        """

    def abandon(self) -> None:  # noqa: B027  (no state)
        """Ends a backward pass whose reductions are dropped."""

    @abstractmethod
    def sent(self) -> Mapping[str, int]:
        """Returns the bytes that this rank has sent so far, by the kind of group."""


class DenseForm(Form):
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
