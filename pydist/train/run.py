"""Runs a complete training, from a configuration to the files of results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from pydist._loader import native
from pydist.backend.autotuner import autotuner_of
from pydist.comm.consensus import require_same, together
from pydist.data import ShardDataset
from pydist.data.loader import Loader
from pydist.data.lock import FolderLock
from pydist.data.publish import make_folder, publish
from pydist.errors import CheckpointError, DoesNotFit, Stopped, UsageError, out_of_memory
from pydist.figures import MISSING_PLOT_LIBRARY, can_draw
from pydist.optim import SampleLR, schedule
from pydist.optim.layerwise import LayerwiseOptimizer
from pydist.train import checkpoint, config_io, report
from pydist.train.config.optimizers import LayerwiseConfig
from pydist.train.curves import drawn_in
from pydist.train.data_folder import refuse_data_folder
from pydist.train.datasets import (
    check_one_sample,
    make_loader,
    open_datasets,
    store_options,
)
from pydist.train.device import (
    facts_of_run,
    in_format,
    memory_format,
    own_stream,
    slow_precision,
)
from pydist.train.folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    PICTURES,
    refuse_foreign,
    remove_unfinished,
)
from pydist.train.job import Job
from pydist.train.layer_log import LayerLog
from pydist.train.log import LOG_FILE, EventLog, Listener, done_at, losses
from pydist.train.loop import Trainer
from pydist.train.metadata import CheckpointMetadata
from pydist.train.network import place_network
from pydist.train.noise import AdaptiveBatch
from pydist.train.ranks import meshes_of
from pydist.train.rebalancing import Rebalancing, resumed
from pydist.train.shortage import with_advice
from pydist.train.signals import Ending
from pydist.train.state import RunState, seed_everything
from pydist.train.tasks import Task, Validation, task_of
from pydist.watchdog import phase

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.mesh import Mesh
    from pydist.stages import Stages
    from pydist.train.config import Config, OptimizerConfig, Resume


_ONE_NETWORK = threading.Lock()
"""Held while a network is built: ranks that are threads share the random state."""
_TELL_SECONDS = 10.0
"""Time between two notices of a store's progress."""


@dataclass(frozen=True)
class Result:
    """Result that a run has, equal on all ranks."""

    steps: int
    loss: float
    """Training loss of the last step; NaN if a resumed run had nothing left to do."""
    validation: Validation | None


def train(
    config: Config,
    ranks: Mesh | Stages,
    listeners: Sequence[Listener] = (),
    prepare: Callable[[torch.nn.Module], None] | None = None,
) -> Result:
    """Trains the network of a configuration. Collective.

    One rank writes the resolved configuration, `log.jsonl`, checkpoints, a table of the validation
    (`predictions.csv`, for segmentation `dice.csv`) and, optionally, `result.png` to
    `config.output.folder`. It locks the folder meanwhile: a second run there is refused before it
    writes anything (see `pydist.data.lock`). So is a run in a folder with files of these names that
    no run has written, and a run in the data set's folder.

    Args:
        config: see `pydist.train.config`; `ranks` were made from its table "mesh".
        ranks: the mesh, or the stages.
        listeners: called with each event on the rank that writes (`Job.writes`), to draw progress.
        prepare: called on rank 0 with the plain network after initialization, to change its weights
            in place; the other ranks receive rank 0's.

    Returns:
        The last loss and validation.

    Raises:
        Stopped: a signal arrived; a checkpoint was saved.
        PydistError: any other error; every rank raises.
    """
    job = Job.of(ranks)
    require_same_settings(config, job.world)
    with ExitStack() as stack:
        lock = None
        with together(job.world):
            if job.writes:
                refuse_data_folder(config.output.folder, config.data.path)
                make_folder(config.output.folder)
                lock = stack.enter_context(FolderLock(config.output.folder))
                refuse_foreign(config.output.folder)
        return _logged(config, job, lock, listeners, prepare)


def require_same_settings(config: Config, world: Transport) -> None:
    """Raises `UsageError` if ranks have different versions or configurations. Collective."""
    versions = f"{native.__version__} with torch {torch.__version__}"
    facts = {"the version of pydist": versions}
    for table, values in config_io.to_dict(config).items():
        facts |= {f"the configuration's {table}.{key}": str(each) for key, each in values.items()}
    require_same(world, facts)


def _logged(
    config: Config,
    job: Job,
    lock: FolderLock | None,
    listeners: Sequence[Listener],
    prepare: Callable[[torch.nn.Module], None] | None,
) -> Result:
    """Runs, and logs the end; `lock` is the writer's lock on the output folder."""
    path = config.output.folder / LOG_FILE
    drawing: list[Listener] = []
    with together(job.world):
        if lock is not None:
            drawing = drawn_in(config.output, path)
    log = EventLog(path if lock else None, [*listeners, *drawing] if lock else ())
    began = time.perf_counter()
    status, reason = "failed", ""
    missing: DoesNotFit | None = None
    try:
        try:
            result = _run(config, job, lock, log, prepare)
        except Exception as error:
            if not out_of_memory(error):
                raise
            missing = with_advice(error, config, job.mesh.grid)
        else:
            status = "done"
            return result
        if lock is None:  # the rank that writes is ended by this one, and does not know why
            log.path = path
        raise missing
    except BaseException as error:
        status = "stopped" if isinstance(error, Stopped | Ending) else "failed"
        reason = str(error)
        raise
    finally:
        seconds = time.perf_counter() - began
        log.emit("end", status=status, step=log.step, seconds=seconds, reason=reason)
        log.close()


def _run(
    config: Config,
    job: Job,
    lock: FolderLock | None,
    log: EventLog,
    prepare: Callable[[torch.nn.Module], None] | None,
) -> Result:
    """Runs from the opening of the data to the results, on one mesh after the other."""
    resume: Resume = config.checkpoint.resume
    rebalancing: Rebalancing | None = None
    if config.mesh.rebalance is not None:
        config, job = resumed(config, job)
    while True:
        result, rebalancing = _run_on(config, job, lock, log, prepare, resume, rebalancing)
        if rebalancing is None or rebalancing.chosen is None:
            return result
        (config, job), resume = rebalancing.moved(), "must"


def _run_on(
    config: Config,
    job: Job,
    lock: FolderLock | None,
    log: EventLog,
    prepare: Callable[[torch.nn.Module], None] | None,
    resume: Resume,
    before: Rebalancing | None,
) -> tuple[Result, Rebalancing | None]:
    """Runs on one mesh, to the results or until other parts of the mesh are to follow."""
    with ExitStack() as stack:
        task = task_of(config)
        with together(job.world, "opening the data"):
            data, validation_data = open_datasets(config, task)
            stores = store_options(config, data, validation_data)
            loader = stack.enter_context(make_loader(config, data, job, stores[0]))
            stack.enter_context(own_stream(loader.device))
        require_same(job.world, {f"the data set {data.root} (its SHA-256)": data.manifest.digest})
        state = make_state(config, task, job, data, loader, validation_data, prepare)
        validation_loader: Loader | None = None
        with together(job.world, "opening the data"):
            if validation_data is not None:
                validation_loader = stack.enter_context(
                    make_loader(config, validation_data, job, stores[1], state.model)
                )
        _resume(config, state, resume)
        rebalancing = None
        if config.mesh.rebalance is not None:
            with together(job.world):
                rebalancing = Rebalancing(config, job, loader.device, before)
        folder = config.output.folder
        validated, ended = _done_before(folder / LOG_FILE, state)
        with together(job.world):
            if job.writes and config.checkpoint.on_error == "stop":
                make_folder(folder / CHECKPOINTS)
        trainer = Trainer(
            state,
            task,
            validation_loader,
            log,
            config.train,
            config.checkpoint,
            folder / CHECKPOINTS,
            lock,
            rebalancing,
            pictures=folder / PICTURES if config.output.plot else None,
        )
        _announce(log, config, task, trainer)
        slow = slow_precision(loader.device, config.train.amp)
        for text in filter(None, (slow, *state.network.notices)):
            log.emit("notice", text=text)
        with together(job.world):  # not before: a refused resume leaves the file unchanged
            if job.writes:
                publish(folder / CONFIG_FILE, config_io.dumps(config).encode())
        for left in remove_unfinished(folder) if lock is not None else ():
            log.emit("notice", text=f"removed {left}, which an interrupted run left")
        complete = ended and trainer.is_done
        complete = complete and (validated or validation_loader is None)
        if complete:
            log.emit(
                "notice",
                text=f"nothing left to do: step {state.step} of {trainer.expected()[0]} is done, "
                "and its results were written; increase train.epochs to continue",
            )
        if not complete:
            with together(job.world, "reading samples into the store"):
                for each in filter(None, (loader, validation_loader)):
                    _preload(each, log)
        # The results need the last validation: if they are missing, it is repeated.
        validation = trainer.fit(complete or (validated and not trainer.is_done))
        result = Result(state.step, trainer.loss, validation)
        if rebalancing is not None and rebalancing.chosen is not None:
            return result, rebalancing
    with together(job.world, "writing the results"):
        # A complete run keeps its figure, as its validation is not available.
        drawn = complete and (folder / report.PICTURE_FILE).exists()
        if job.writes and not drawn:
            _write_results(config, task, data, job, validation, log)
    return result, rebalancing


def _preload(loader: Loader, log: EventLog) -> None:
    """Reads a loader's samples before the first step, if its store is to; tells how far it is."""
    told = time.monotonic()

    def progress(done: int, batches: int) -> None:
        nonlocal told
        if done == batches or time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            text = f"samples of {done} of {batches} batches are in the store before the first step"
            log.emit("notice", text=text)

    loader.preload(progress)


def make_state(
    config: Config,
    task: Task,
    job: Job,
    data: ShardDataset,
    loader: Loader,
    validation_data: ShardDataset | None = None,
    prepare: Callable[[torch.nn.Module], None] | None = None,
) -> RunState:
    """Creates the initial state of a run, on the loader's device. Collective.

    Args:
        config: model, optimizer and schedule.
        task: creates the network.
        job: the ranks.
        data: the training set.
        loader: the loader of its batches.
        validation_data: the validation set, if there is one.
        prepare: see `train`.
    """
    with _ONE_NETWORK, phase("building the network"):
        seed_everything(config.train.seed)
        model = task.network(data.manifest)
    if prepare is not None and job.world.rank == 0:
        prepare(model)
    with together(job.world):
        if validation_data is not None:
            check_one_sample(model, validation_data)
    device = loader.device
    model.to(device)
    if not job.world.mixes:  # memory is summed in its order, so that it must be the same on all
        in_format(model, memory_format(config.train, device))
    network = place_network(model, job, task, loader, config)
    job.world.barrier()
    seed_everything(config.train.seed)  # ranks may have drawn unequally many numbers so far
    if config.train.tuning is not None:
        with together(job.world, "reading the tuning file"):
            autotuner_of(job.mesh).pin(config.train.tuning, network.own_tuning)
    settings = config.optimizer.at(config.train.batch)
    made = settings.optimizer(settings.groups(model))
    optimizer = network.partitioned(made, settings.sharded)
    sizes = loader.sampler.sizes

    def factor(seen: int) -> float:
        """Returns the factor of the rates after a number of samples, as the batch changes."""
        return settings.lr_factor(sizes.at(seen) / sizes.first)

    follows = config.optimizer.lr_batch is not None
    scheduler = _schedule(settings, optimizer, len(loader.dataset), factor if follows else None)
    scaler = GradScaler(device.type, enabled=config.train.amp == "fp16")
    metadata = CheckpointMetadata(config, data.manifest).dump()
    planned = config.train.batch_schedule
    adaptive = AdaptiveBatch(planned, loader) if planned.noise_scale else None
    layers = None
    if isinstance(settings, LayerwiseConfig) and isinstance(made, LayerwiseOptimizer):
        layers = LayerLog(made, model, job, settings.log_every) if settings.log_every else None
    return RunState(
        job,
        network,
        optimizer,
        scheduler,
        scaler,
        loader,
        metadata,
        layers=layers,
        adaptive=adaptive,
    )


def _schedule(
    config: OptimizerConfig,
    optimizer: Optimizer,
    epoch: int,
    batch: Callable[[int], float] | None,
) -> SampleLR:
    """Creates the schedule, in samples, from a configuration in epochs; see `schedule`."""
    return schedule(
        optimizer,
        config.decay_epochs * epoch,
        config.end_lr,
        config.decay,
        warmup=config.warmup_epochs * epoch,
        warmup_start=config.warmup_start,
        power=config.decay_power,
        milestones=[(place * epoch, factor) for place, factor in config.milestones],
        batch=batch,
    )


def _resume(config: Config, state: RunState, resume: Resume) -> None:
    """Resumes from the last checkpoint; `resume` is as in the configuration."""
    folder = config.output.folder / CHECKPOINTS
    job = state.job
    # One rank decides for all: the ranks must agree even if the folder changes meanwhile.
    names = [p.name for p in checkpoint.complete(folder)] if job.writes else []
    latest = job.world.broadcast_bytes(names[-1].encode() if names else b"", job.writer).decode()
    if latest and resume == "never":
        raise UsageError(
            f"{folder} holds checkpoints (the last is {latest}), and checkpoint.resume is "
            '"never": choose another output.folder, delete them, or resume'
        )
    if not latest and resume == "must":
        raise CheckpointError(f'{folder} holds no checkpoint, and checkpoint.resume is "must"')
    if latest:
        state.load(folder / latest)


def _done_before(path: Path, state: RunState) -> tuple[bool, bool]:
    """Returns `log.done_at` of the step from which the run resumes. Collective."""
    job = state.job
    if state.step == 0:
        return False, False
    found = (False, False)
    with together(job.world, "reading the log"):
        if job.writes:
            found = done_at(path, state.step)
    validated, ended = job.world.broadcast_bytes(bytes(found), job.writer)
    return bool(validated), bool(ended)


def _announce(log: EventLog, config: Config, task: Task, trainer: Trainer) -> None:
    job, state = trainer.job, trainer.state
    steps, epochs = trainer.expected()
    log.emit(
        "start",
        **facts_of_run(trainer.loader.device, config.train.device, config.train.amp, job.world),
        version=native.__version__,
        torch=torch.__version__,
        ranks=job.world.size,
        mesh=str(job),
        threads=torch.get_num_threads(),
        parameters=sum(p.numel() for p in state.model.parameters()),
        samples=len(trainer.loader.dataset),
        batch=config.train.batch,
        accumulate=config.train.accumulate,
        epochs=epochs,
        steps=steps,
        step=state.step,
        predicts=_predicts(task, trainer.loader.dims),
        config=config_io.to_dict(config),
    )


def _predicts(task: Task, dims: int) -> str:
    """Returns what `pydist predict` takes for a task; see `pydist.train.log`."""
    if task.multiple is None:
        return "samples"
    return "volumes" if dims == 3 else "images"


def _write_results(
    config: Config,
    task: Task,
    data: ShardDataset,
    job: Job,
    validation: Validation | None,
    log: EventLog,
) -> None:
    folder = config.output.folder
    if validation is not None:
        task.write_results(folder, data, validation)
    if config.output.plot and not can_draw():
        log.emit("notice", text=f"no result.png: {MISSING_PLOT_LIBRARY}")
    elif config.output.plot:
        curves = {str(job): losses(folder / LOG_FILE)}
        task.draw(folder, curves, data, meshes_of(config.mesh)[0])
