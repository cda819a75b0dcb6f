"""Runs the training loop: the same steps on one rank and on many."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from pydist.backend.autotuner import Autotuner, autotuner_of
from pydist.comm.consensus import any_rank, together
from pydist.data.publish import make_folder, publish
from pydist.entry_hook import entry_hook_of
from pydist.errors import DataError, DiskError, PydistError, Stopped
from pydist.figures import can_draw
from pydist.optim import average_parameters
from pydist.train.config.gradients import name_of
from pydist.train.cuda_graph import GraphedStep
from pydist.train.data_log import DataLog
from pydist.train.folder import TUNING_FILE
from pydist.train.readback import LateLosses, TakenStep
from pydist.train.signals import StopRequest
from pydist.train.step import TrainStep
from pydist.train.step_clock import StepClock
from pydist.watchdog import phase

if TYPE_CHECKING:
    from pydist.data.loader import Batch, Loader
    from pydist.data.lock import FolderLock
    from pydist.train.config import CheckpointConfig, TrainConfig
    from pydist.train.log import EventLog
    from pydist.train.noise import SquaredNorms
    from pydist.train.rebalancing import Rebalancing
    from pydist.train.state import RunState
    from pydist.train.tasks import Task, Validation


def _announce_tuning(log: EventLog, tuner: Autotuner) -> None:
    """Logs, once, that the first steps take longer."""
    tuner.listener = None
    text = "autotuning the kernels of convolutions: steps take up to ten times longer meanwhile"
    log.emit("notice", text=text)


class Trainer:
    """Training loop, until the last epoch, a number of steps, or a stop signal.

    Args:
        state: model, optimizer, schedule, training batches, and progress.
        task: the loss and the validation measures.
        validation_loader: the batches of the validation set; their number may differ by group.
        log: receives the events (one rank writes them).
        config: epochs, batch, clipping, precision.
        checkpoints: interval and number of checkpoints.
        folder: the folder of checkpoints.
        lock: the writer's lock on the run's folder; None on other ranks, or if nothing is saved.
        rebalancing: ends the training when other parts of the mesh are to follow.
        pictures: folder for a picture of a sample at each validation; None for none.
    """

    reads_late: ClassVar[bool] = True
    """Whether the loss of a step may be read after the next one was queued."""

    def __init__(
        self,
        state: RunState,
        task: Task,
        validation_loader: Loader | None,
        log: EventLog,
        config: TrainConfig,
        checkpoints: CheckpointConfig,
        folder: Path,
        lock: FolderLock | None = None,
        rebalancing: Rebalancing | None = None,
        pictures: Path | None = None,
    ) -> None:
        self.state = state
        self.task = task
        self._pictures = pictures
        self.job, self.mesh = state.job, state.mesh
        self.loader = state.loader
        self.validation_loader = validation_loader
        self.log = log
        self.config = config
        self.checkpoints = checkpoints
        self.folder = folder
        self._lock = lock
        self._rebalancing = rebalancing
        step = TrainStep(state, task, config)
        self._several = step
        several = config.accumulate > 1 or config.batch_schedule.changes
        if several and config.cuda_graph == "auto" and step.device.type == "cuda":
            log.emit("notice", text="no CUDA graph: steps have several passes or sizes")
        self._take_step = GraphedStep(
            step,
            "never" if several else config.cuda_graph,
            lambda text: log.emit("notice", text=text),
        )
        loader = self.loader  # not self: a reference cycle would keep the trainer and its graph
        self.clock = StepClock(self.mesh.session.timers, lambda: loader.waited_s)
        self.stop = StopRequest()
        self.loss = math.nan
        """Global loss of the last step."""
        self._saved_at = state.step
        self._sent = entry_hook_of(state.model).sent()
        self._sent_in_step: dict[str, int] = {}
        self._data_log = DataLog(log, self.job.world, self.job.ranks_a_sample)
        self._tuner = autotuner_of(self.mesh)
        self._tuner.listener = partial(_announce_tuning, log, self._tuner)
        self._tuned = 0
        self._losses = LateLosses(self.loader.device, self.job.world, self.reads_late)

    @property
    def is_done(self) -> bool:
        """Whether all epochs or steps are done."""
        steps, (epoch, _) = self.config.steps, self.loader.sampler.next
        return epoch >= self.config.epochs or (steps is not None and self.state.step >= steps)

    def expected(self) -> tuple[int, int]:
        """Returns the steps and epochs at the end, if the batch has no changes but known ones."""
        sampler = self.loader.sampler
        epoch, step = sampler.next
        most = sys.maxsize if self.config.steps is None else self.config.steps
        steps = self.state.step - step
        for first, count in sampler.equal_epochs(epoch, self.config.epochs):
            if steps >= most:
                break
            each = sampler.steps(first)
            more = min(count, -((steps - most) // each))  # enough epochs for the last step
            steps, epoch = steps + more * each, first + more
        return min(steps, most), epoch

    def fit(self, validated: bool = False) -> Validation | None:
        """Trains from the current state to the last step, or until other parts are to follow.

        Args:
            validated: whether an earlier run has validated the step from which this one resumes.

        Returns:
            The last validation, if there is a validation set.

        Raises:
            Stopped: a signal arrived; a checkpoint was saved.
            PydistError: the loss is not finite.
            DataError: the loss is not finite because a sample is not.
            DiskError: a checkpoint could not be written.
        """
        result = None
        try:
            with self.stop.listening():
                # The run before may have ended between its checkpoint and the validation.
                if self.state.step and not validated:
                    result = self._validate_if_due()
                while not self.is_done:
                    self._epoch()
                    result = self._validate_if_due()
                    if self._rebalances():
                        break
                self._save()
        finally:
            self._take_step.close()
        return result

    def _rebalances(self) -> bool:
        """Returns whether other parts are to follow, from a checkpoint. Collective."""
        if self._rebalancing is None or self.is_done or not self._rebalancing.decide():
            return False
        self._save()
        if self._saved_at != self.state.step:
            self._rebalancing.chosen = None  # no checkpoint to go on from, on any rank
            return False
        found = self._rebalancing
        self.log.emit(
            "rebalance",
            step=self.state.step,
            axis=found.axis.name,
            sizes=found.sizes,
            busy=found.busy,
            next_sizes=found.chosen,
        )
        return True

    def _epoch(self) -> None:
        """Trains the remainder of the current epoch."""
        self.state.model.train()
        self.clock.start()
        batches = self.loader.batches(*self.loader.sampler.next)
        for batch in batches:
            stop = self._step(batch, islice(batches, 0 if batch.is_last else batch.parts - 1))
            done = batch.ends_epoch or self.is_done
            every = self.checkpoints.every
            saves = stop or (self.state.step % every == 0 if every else done)
            if saves or done:
                stop |= self._read_losses()
            if saves or stop:
                self._save()
            if stop:
                number = self.stop.signal.name if self.stop.signal else "a signal on another rank"
                raise Stopped(f"stopped by {number} after step {self.state.step}, checkpoint saved")
            if done:
                self._data_log(self.loader, "train", batch.epoch, self.state.step)
                break
            self.clock.start()

    def _step(self, batch: Batch, rest: Iterator[Batch]) -> bool:
        """Performs one optimizer step; returns whether any rank was asked to stop.

        Args:
            batch: of the first pass.
            rest: of the other ones.
        """
        state, adaptive = self.state, self.state.adaptive
        figures = None
        if state.layers is not None:
            state.layers.begin(state.step)
        if adaptive is not None and adaptive.is_due(state.step):
            (loss, figures), count = self._several.measured(chain([batch], rest)), 1
        elif batch.is_last:
            loss, count = self._take_step(batch), batch.count
        else:
            loss, count = self._several.accumulated(chain([batch], rest)), 1
        rate = float(state.scheduler.get_last_lr()[0])
        self._adapt(batch, figures)  # before the rate of the next step, which follows the batch
        state.scheduler.step(batch.step_size)

        state.step += 1
        taken = TakenStep(state.step, batch, count, rate)
        self._losses.add(loss, taken)
        stop = self._read_losses(self._losses.behind, taken)
        layers = None if state.layers is None else state.layers.entry()
        if layers:
            self.log.emit("layers", step=state.step, layers=layers)
        if self._tuner.problems > self._tuned:
            self._tuned = self._tuner.problems
            text = f"autotuned {self._tuned} convolutions in {self._tuner.seconds:.1f} s so far"
            self.log.emit("notice", text=text)
        return stop

    def _read_losses(self, most: int = 0, last: TakenStep | None = None) -> bool:
        """Reads losses of steps, reduces them over the ranks, and logs the steps.

        Args:
            most: losses that stay unread, as their steps may still run.
            last: the step that was taken now, whose time ends when losses are read.

        Returns:
            Whether any rank was asked to stop.
        """
        read, stop = [], False
        for value, taken in self._losses.read(most):
            # The mean over no samples is NaN.
            total = value * taken.count if taken.count else 0.0
            self.loss, asked = self._reduce(total, taken.batch)
            stop |= asked
            if not math.isfinite(self.loss):
                self._explain_divergence(taken)
            taken.loss = self.loss
            read.append(taken)
        if last is not None:
            last.seconds, last.parts = self.clock.stop()
            last.sent = self._sent_since()
            if self._rebalancing is not None:
                self._rebalancing.note(last.seconds, last.parts)
        for taken in read:
            self.log.emit("step", **taken.figures())
        return stop

    def _sent_since(self) -> dict[str, int]:
        """Returns the bytes that this rank has sent for gradients in the last step."""
        total = entry_hook_of(self.state.model).sent()
        found = {kind: count - self._sent.get(kind, 0) for kind, count in total.items()}
        self._sent = total
        if self._take_step.captured and not any(found.values()):
            return self._sent_in_step  # nothing counts in a replay, which sends as much as a step
        self._sent_in_step = found
        return found

    def _adapt(self, batch: Batch, figures: SquaredNorms | None) -> None:
        """Adds a measurement of the noise scale, and changes the batch if it is time to."""
        state, adaptive = self.state, self.state.adaptive
        if adaptive is None:
            return
        scale = adaptive.scale
        if figures is not None and scale.add(*figures, batch.step_size):
            self.log.emit(
                "noise_scale",
                step=state.step + 1,
                noise_scale=scale.value,
                noise=scale.noise,
                signal=scale.signal,
                batch=batch.step_size,
            )
        grown = adaptive.decide(self.loader.sampler.position - batch.step_size)
        if grown is not None:
            text = f"batch of {grown} from step {state.step + 2} on: noise scale {scale.value:.4g}"
            self.log.emit("notice", text=text)

    def _reduce(self, loss_sum: float, batch: Batch) -> tuple[float, bool]:
        """Returns the mean loss over the step's samples, and whether any rank wants to stop."""
        # One all-reduce for both. All ranks of a sample group hold the group's sum.
        mine = [loss_sum / self.job.ranks_a_sample, float(self.stop.received)]
        sums = torch.tensor(mine, dtype=torch.float64)
        self.job.world.all_reduce(sums)
        return float(sums[0]) / batch.step_size, bool(sums[1] > 0)

    def _explain_divergence(self, taken: TakenStep) -> None:
        where = f"at step {taken.step} (epoch {taken.batch.epoch + 1})"
        local = taken.batch.inputs.to_local()
        if any_rank(self.job.world, not bool(torch.isfinite(local).all())):
            raise DataError(f"the loss is {self.loss} {where}: its batch holds NaN or infinity")
        compresses = name_of(self.config.gradients) == "dgc"
        clip_norm = "train.gradients.clip_norm" if compresses else "train.clip_norm"
        raise PydistError(
            f"the loss is {self.loss} {where}: training diverged at learning rate {taken.rate:g}; "
            f"lower optimizer.lr, lengthen optimizer.warmup_epochs or set {clip_norm}"
        )

    def _validate_if_due(self) -> Validation | None:
        """Validates after the last step, and every `validate_every` epochs."""
        if self.validation_loader is None:
            return None
        epochs, more = self.loader.sampler.next
        every = self.config.validate_every
        ended = self.is_done
        if not ended and (more or not every or epochs % every):
            return None
        return self.validate(epochs if more else epochs - 1)

    def validate(self, epoch: int) -> Validation:
        """Evaluates the model on the validation set. Collective.

        Each sample group evaluates its own samples independently: groups exchange nothing before
        the final sums, so their numbers of samples may differ.
        """
        assert self.validation_loader is not None
        model = self.state.model
        average_parameters(model, self.state.optimizer, always=True)
        model.eval()
        rows, indices = [], list[int]()
        for batch in self.validation_loader.batches(0):
            output = self.state.network.evaluate(batch.inputs)
            if output is not None:
                with torch.no_grad():
                    measured = self.task.measure(output, batch)
                    measured[(batch.weight == 0).to(measured.device)] = math.nan  # of a replacement
                    rows.append(measured)
                indices += batch.indices
        model.train()
        with phase("collecting the validation"):
            found = self.task.judge(self.state.network.collect(rows, indices))
        self.log.emit(
            "validation",
            step=self.state.step,
            epoch=epoch,
            samples=found.samples,
            **found.figures(),
        )
        self._data_log(self.validation_loader, "val", epoch, self.state.step)
        if self._pictures is not None and self._lock is not None:
            self._draw_sample(self._pictures / f"epoch-{epoch + 1:04}.png", found)
        return found

    def _draw_sample(self, path: Path, found: Validation) -> None:
        """Draws a sample, if the task does; a picture that can't be made ends no run."""
        draw = getattr(self.task, "draw_sample", None)
        if draw is None or self.validation_loader is None or not can_draw():
            return
        try:
            make_folder(path.parent)
            draw(path, self.validation_loader.dataset, found)
        except (DataError, DiskError) as error:
            self.log.emit("notice", text=f"no picture of a sample: {error}")

    def _publish_tuning(self) -> None:
        """Writes the choices of kernels next to the checkpoint folder. Collective."""
        content = json.dumps(self.state.network.tuning(), indent=1).encode()
        with together(self.job.world, "saving the choices of kernels"):
            if self._lock is not None:
                publish(self.folder.parent / TUNING_FILE, content)

    def _save(self) -> None:
        """Writes a checkpoint of the latest step, unless it has one."""
        step = self.state.step
        if step == self._saved_at:
            return
        began = time.perf_counter()
        try:
            path = self.state.save(self.folder, self.checkpoints.keep, self._lock)
            self._publish_tuning()
        except DiskError as error:
            if self.checkpoints.on_error == "stop":
                raise
            self.log.emit("notice", text=f"continuing without a checkpoint: {error}")
            return
        self._saved_at = step
        seconds = time.perf_counter() - began
        self.log.emit("checkpoint", step=step, path=str(path), seconds=seconds)
