"""Post-local SGD: sample groups that train by themselves, and average parameters now and then.

Relaxed: from its first local step on a split run no longer computes what one device computes.

Source: Lin, Stich, Patel and Jaggi (2020), arXiv:1808.07217.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from pydist.comm.interface.reduction import divide_
from pydist.errors import UsageError
from pydist.gradients.forms.messages import Sequel
from pydist.gradients.forms.stateful import SteppedForm

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Work
    from pydist.gradients.forms.messages import Messages
    from pydist.gradients.leaf import Leaf


class LocalForm(SteppedForm):
    """Form that averages over all sample groups at first, and later over this rank's group alone.

    Its only state is the number of steps, equal on all ranks: all backward passes count, as groups
    may see different gradients.
    """

    name = "post_local"

    def __init__(self, within: Messages, between: Messages, *, every: int, start: int) -> None:
        """Takes the settings of `pydist.gradients.PostLocal`."""
        super().__init__(within, between)
        self._every, self._start = every, start
        self._alone = 0  # passes since the groups were equal
        self._averages = False

    @property
    def is_local(self) -> bool:
        """Whether the first steps, with means over all groups, are over; see `Form.is_local`."""
        return self.steps >= self._start

    @property
    def is_due(self) -> bool:
        """Whether it is the step after which the groups average their parameters."""
        return self._alone >= self._every

    @property
    def differs(self) -> bool:
        """Whether the groups may have different parameters."""
        return self._alone > 0

    def start(self, row: Tensor, leaves: Sequence[Leaf]) -> Work:
        """Starts the reduction of a row; see `Form.start`.

        Raises:
            UsageError: the groups' parameters were not averaged when they should have been.
        """
        if self.is_due:
            raise UsageError(
                f'gradients="post_local": {self._alone} steps without an average of the sample '
                "groups' parameters: call pydist.optim.average_parameters(model, optimizer) after "
                "each step, which has one backward pass outside of no_sync"
            )
        return super().start(row, leaves)

    def conclude(self, kept: Callable[[Leaf], bool]) -> None:
        """Counts the steps without an average of the parameters; see `Form.conclude`."""
        was_local, before = self.is_local, self.steps
        super().conclude(kept)
        self._alone += was_local and self.steps > before

    def restart(self, steps: int) -> None:
        """Continues after an average of the parameters; see `SteppedForm.restart`."""
        super().restart(steps)
        self._alone = 0

    def average(self, rows: Sequence[Tensor]) -> None:
        """Averages rows over the sample groups, in place. Collective.

        Args:
            rows: contiguous, and equal on the ranks of a sample group.
        """
        self._averages = True
        try:
            for work in [Sequel(self._reduce(row, ())) for row in rows]:
                work.wait()
        finally:
            self._averages = False
        self._alone = 0

    def _exchange(self, part: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        del leaves
        if not self.is_local or self._averages:
            yield self.between.all_reduce(part)
            divide_(part, self.between.size)
