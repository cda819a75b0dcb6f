"""The table "train.batch_schedule" of a configuration: a global batch that changes in a run.

Nothing here imports torch, so that `pydist train --help` answers quickly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from pydist.train.config.settings import Count, Epochs, Flag, Table


@dataclass(frozen=True)
class BatchScheduleConfig(Table):
    """Configuration of a batch that changes in a run: at milestones, or by the noise scale."""

    milestones: tuple[tuple[Epochs, Count], ...] = ()
    """Places, in `unit`, and the batch from then on, as in [[30.0, 256], [60.0, 1024]]."""
    unit: Literal["epochs", "samples"] = "epochs"
    """Unit of `milestones` and `decide_every`."""
    by: Literal["accumulate", "batch", "both"] = "accumulate"
    """What grows with the batch: passes of a step, samples of a pass, or both: samples of a pass up
    to `largest_pass`, then passes."""
    largest_pass: Count | None = None
    """Samples of a pass, over all sample groups, up to which by = "both" does not accumulate."""
    noise_scale: Flag = False
    """Whether the batch doubles while the measured gradient noise scale is larger."""
    largest: Count | None = None
    """Largest batch with `noise_scale`."""
    decide_every: Epochs = 1.0
    """Interval, in `unit`, at which `noise_scale` may change the batch."""
    measure_every: Count = 10
    """Steps between measurements of the noise scale."""

    @property
    def changes(self) -> bool:
        """Whether the batch may change."""
        return bool(self.milestones) or self.noise_scale

    def samples(self, place: float, epoch: int) -> int:
        """Returns a place or an interval in samples.

        Args:
            place: in `unit`.
            epoch: samples of the data set.
        """
        return max(1, round(place * (epoch if self.unit == "epochs" else 1)))

    def mistakes(self, batch: int, accumulate: int) -> Iterator[str]:
        """Yields what does not suit each other, with what is possible.

        Args:
            batch: the batch at the beginning.
            accumulate: passes over it.
        """
        shown = [list(each) for each in self.milestones]
        places = [place for place, _ in self.milestones]
        if accumulate > batch:
            yield (
                f"train.accumulate = {accumulate}: a batch of train.batch = {batch} has at most "
                f"{batch} passes"
            )
            return
        if places != sorted(set(places)):
            yield f"train.batch_schedule.milestones = {shown}: expected ascending places"
        if places and self.noise_scale:
            yield (
                f"train.batch_schedule.milestones = {shown} with noise_scale = true: either is "
                "possible"
            )
        if not self.changes:
            default = BatchScheduleConfig()
            for name in (each.name for each in fields(self)):
                if getattr(self, name) != getattr(default, name):
                    yield (
                        f"train.batch_schedule.{name} = {getattr(self, name)!r}: it is for a batch "
                        "that changes, and neither milestones nor noise_scale is set"
                    )
            return
        yield from self._mistakes_in_sizes(batch, accumulate)

    def _mistakes_in_sizes(self, batch: int, accumulate: int) -> Iterator[str]:
        if (self.by == "both") != (self.largest_pass is not None):
            yield (
                f'train.batch_schedule.by = "{self.by}" with largest_pass = {self.largest_pass}: '
                'by = "both" needs the samples of the largest pass, and other values have none'
            )
        first = -(-batch // accumulate)
        if self.largest_pass is not None and self.largest_pass < first:
            yield (
                f"train.batch_schedule.largest_pass = {self.largest_pass}: the first passes have "
                f"{first} samples"
            )
        if self.noise_scale != (self.largest is not None):
            yield (
                f"train.batch_schedule.largest = {self.largest} with noise_scale = "
                f"{str(self.noise_scale).lower()}: noise_scale needs the largest batch, and "
                "milestones name theirs"
            )
        elif self.largest is not None and self.largest < batch:
            yield (
                f"train.batch_schedule.largest = {self.largest} is below train.batch = {batch}, "
                "with which the run begins"
            )
        least = min([batch, *(size for _, size in self.milestones)])
        if self.by != "accumulate" and least < accumulate:
            yield (
                f"train.batch_schedule: a batch of {least} in train.accumulate = {accumulate} "
                f"passes; possible are up to {least}"
            )
