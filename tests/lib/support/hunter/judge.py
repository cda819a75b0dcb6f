"""Runs a program on one device and split, and judges the difference."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Variable

from pydist import Mesh, run_local
from pydist.check.reference import Reference
from pydist.comm import Transport
from pydist.errors import PydistError, RankFailed, RankLost
from support.equivalence import FP64_BOUND
from support.hunter.compare import (
    Noise,
    Values,
    by_place,
    difference,
    differences,
    found_instead,
    is_zero,
)
from support.hunter.program import Program
from support.hunter.world import Seen, World

SECONDS = 20.0
"""Time limit of a program on rank-threads; programs take well under one second."""

PARAMETER_NOISES, LAYER_NOISES = (0, 2, 4, 6), (1, 3, 5)
"""Seeds of noise in parameters and inputs, and of noise in every layer's result as well."""

STALE = "after a change in place of another"
"""Text of pydist's refusal to use a copy in place of a view."""

CHANGED = ("modified by an inplace operation", "has been modified inplace")
"""Texts of torch's errors for a tensor that backward needs and that was changed in place."""

LOCAL = (STALE, *CHANGED)
"""Errors that only some ranks raise, as other blocks need no such tensor; pydist reports them."""

ALARMS = ("the ranks make different calls", "it must be equal on all ranks", "on some ranks")
"""Texts of pydist's errors for ranks with different data, which are wrong for most programs."""

BAD = ("wrong", "parted", "hang", "crash", "silent", "alarm")


@dataclass(frozen=True)
class Verdict:
    """Verdict that names the outcome of a program.

    Attributes:
        outcome: equal; refused (by name, on all ranks, or by torch itself for a saved tensor
            that was changed in place); undecided (noise moves the value as well); illegal
            (torch refuses it); raised (as required). Or a failure: wrong; parted (only some ranks
            refuse); hang; crash (another error); silent (data differed, and nothing was raised);
            alarm (an error reports a difference between ranks that does not exist).
        detail: one line.
        statement: the statement that was refused or raised, or -1.
    """

    outcome: str
    detail: str = ""
    statement: int = -1

    @property
    def bad(self) -> bool:
        return self.outcome in BAD


@dataclass
class Run:
    """The values that one device or one rank saw, and the end of its run.

    Attributes:
        seen: values by name.
        failed: the statement that raised, and its error; or None.
        trace: traceback of the error.
        changed: whether only this rank's block of a plain tensor was changed.
    """

    seen: Values
    failed: tuple[int, Exception] | None
    trace: str = ""
    changed: bool = False


def run_in(world: World) -> Run:
    """Runs a program in its environment."""
    failed = world.run()
    trace = ""
    if failed is not None:
        trace = "".join(traceback.format_exception(failed[1]))
        failed[1].__traceback__ = None  # its frames hold tensors
    return Run(world.seen, failed, trace, world.has_changed_plain_tensors())


def run_whole(program: Program, noise: int | None = None) -> Run:
    """Runs a program on one device: plain torch, or one rank if the program requires it."""
    if program.reference == "torch":
        return run_in(World(program, None, noise))
    return run_local(lambda t: run_in(World(program, Mesh(t, 1, (1, 1, 1)), noise)), 1)[0]


def run_rank(program: Program, transport: Transport) -> Run:
    """Runs a program on one rank of its mesh."""
    mesh = Mesh(
        transport, len(program.groups), program.spatial,
        keep_thin_blocks=program.keep_thin_blocks, axes={"channel": program.channel},
    )  # fmt: skip
    return run_in(World(program, mesh))


def judge(program: Program, seconds: float = SECONDS) -> Verdict:
    """Runs a program on one device and on rank-threads, and returns the verdict."""
    whole = run_whole(program)
    if whole.failed is not None:
        return _of_one_device(program, whole.failed)
    weights = whole.seen.get("weights", [])
    if program.differs and not all(each.value.isfinite().all() for each in weights):
        return Verdict("illegal", "the training diverges: without numbers no data differ")
    try:
        ranks = run_local(lambda t: run_rank(program, t), program.ranks, timeout=seconds)
    except RankLost as error:
        return Verdict("hang", str(error))
    verdict = verdict_of(program, None if program.differs else whole, ranks)
    if program.differs and verdict.outcome in ("raised", "crash"):
        healthy = judge(replace(program, differs=False, looker=-1), seconds)
        # Without a difference nothing may be raised, except that a refusal repeats.
        refused = verdict.outcome == "crash" and healthy.outcome == "refused"
        return healthy if healthy.bad or refused else verdict
    return verdict


def _of_one_device(program: Program, failed: tuple[int, Exception]) -> Verdict:
    """Returns the verdict on a program that one device does not complete."""
    number, error = failed
    text = f"{type(error).__name__}: {error}"
    if program.reference == "torch" or run_in(World(program, None)).failed is not None:
        return Verdict("illegal", text, number)
    return Verdict("refused" if _is_refusal(error) else "crash", text, number)


def verdict_of(program: Program, whole: Run | None, ranks: Sequence[Run]) -> Verdict:
    """Compares the values of all ranks with those of one device."""
    failures = {rank: run.failed for rank, run in enumerate(ranks) if run.failed is not None}
    if whole is None:
        return _of_different_data(ranks)
    if failures:
        return _of_failures(program, ranks, failures)
    found = [_assembled(program, ranks, rank) for rank in range(program.ranks)]
    if (verdict := _together(ranks)) is not None:
        return verdict
    wrong = [
        (name, i, rank)
        for rank, seen in enumerate(found)
        for name, i, e in differences(seen, whole.seen)
        if not e <= FP64_BOUND
    ]
    if not wrong:
        return Verdict("equal")
    return _beyond_noise(program, whole, found)


def _of_different_data(ranks: Sequence[Run]) -> Verdict:
    errors = [run.failed[1] for run in ranks if run.failed is not None]
    if len(errors) < len(ranks):
        how = "nothing was raised" if not errors else f"{len(errors)} of {len(ranks)} ranks raised"
        return Verdict("silent", f"ranks had different data, and {how}")
    own = [e for e in errors if not isinstance(e, (RankFailed, RankLost))]
    other = next((e for e in own if not _is_alarm(e)), None)
    if other is not None or not own:
        other = other or errors[0]
        return Verdict("crash", f"{type(other).__name__}: {other}"[:300])
    return Verdict("raised", str(own[0])[:200])


def _of_failures(
    program: Program, ranks: Sequence[Run], failures: dict[int, tuple[int, Exception]]
) -> Verdict:
    own = {
        rank: (number, e)
        for rank, (number, e) in failures.items()
        if not isinstance(e, (RankFailed, RankLost))
    }
    number, e = next(iter((own or failures).values()))
    text = f"{type(e).__name__}: {e}".splitlines()[0][:300]
    where = f"statement {number}: {program.statements[number]!r}"
    if not own:
        return Verdict("crash", f"{where}: {text}", number)
    strange = [r for r, (_, error) in own.items() if not _is_refusal(error)]
    if strange:
        last = ranks[strange[0]].trace.strip().splitlines()[-6:]
        return Verdict("crash", f"{where}: {text}\n" + "\n".join(last), number)
    looked = program.statements[number].startswith("if here") and set(own) == {program.looker}
    if looked and STALE in text:
        return Verdict("refused", text, number)  # a use without messages, on one rank only
    # A plain batch changed in place by the first layer is no longer the same on all ranks.
    is_changed = any(r.changed for r in ranks)
    if any(_is_alarm(error) for _, error in own.values()) and not is_changed:
        return Verdict("alarm", f"{where}: {text}", number)
    stale = all(STALE in str(error) for _, error in own.values())  # found at the first use
    local = all(any(text in str(error) for text in LOCAL) for _, error in own.values())
    # A batch without samples has no differences.
    size = program.ranks // len(program.groups)
    groups = sum(n > 0 for n in program.groups) if is_changed else len(program.groups)
    if len(failures if local else own) < size * groups or (
        len({n for n, _ in own.values()}) > 1 and not stale
    ):
        return Verdict("parted", f"{where}: only ranks {sorted(own)} refuse: {text}", number)
    return Verdict("refused", text, number)


def _is_refusal(error: Exception) -> bool:
    """Returns whether an error is pydist's, or torch's own for a tensor that backward needs."""
    changed = type(error) is RuntimeError and any(text in str(error) for text in CHANGED)
    return isinstance(error, PydistError) or changed


def _is_alarm(error: Exception) -> bool:
    return isinstance(error, PydistError) and any(text in str(error) for text in ALARMS)


def _assembled(program: Program, ranks: Sequence[Run], rank: int) -> Values:
    """Returns the values of one rank, joined with those of ranks of the other groups."""
    found = ranks[rank].seen
    groups = len(program.groups)
    if groups == 1:
        return found
    size = program.ranks // groups
    runs = [ranks[g * size + rank % size] for g in range(groups)]
    joined: Values = {}
    for name, values in found.items():
        joined[name] = []
        for i, each in enumerate(values):
            own = each
            parts = [r.seen[name][i] for r in runs if i < len(r.seen.get(name, ()))]
            if len(parts) == groups and all(isinstance(p.value, Tensor) for p in parts):
                own = each._replace(value=_joined(program, each.over, rank // size, parts))
            joined[name].append(own)
    return joined


def _joined(program: Program, over: str, group: int, parts: Sequence[Seen]) -> Tensor:
    shares = [n / program.batch for n in program.groups]
    values = [p.value for p in parts]
    if over == "rows":
        return torch.cat(values)
    if over == "share":
        return torch.cat([v * s for v, s in zip(values, shares, strict=True)])
    if over == "mean":
        # A mean over zero samples is NaN.
        return torch.stack([v * s for v, s in zip(values, shares, strict=True) if s]).sum(0)
    return values[group]


def _together(ranks: Sequence[Run]) -> Verdict | None:
    for name, values in ranks[0].seen.items():
        for i, seen in enumerate(values):
            if seen.over != "together":
                continue
            for rank, run in enumerate(ranks):
                other = run.seen[name][i]
                if not difference(other, seen) <= 0:
                    return Verdict("wrong", f"{name}[{i}]: rank {rank} differs from rank 0")
    return None


def _beyond_noise(program: Program, whole: Run, found: Sequence[Values]) -> Verdict:
    """Returns the verdict for differences above the floor, by the effect of noise on them."""
    noise = Noise(whole.seen)
    exact = _with_norms_written_out(program)
    for noisy, most in _rounded_otherwise(program, exact):
        if noisy.failed is None:
            noise.add(noisy.seen, most)
    worst, undecided = (0.0, ""), False
    for rank, seen in enumerate(found):
        from_exact = {} if exact is None else by_place(differences(seen, exact.seen))
        for name, i, e in differences(seen, whole.seen):
            # If two ways on one device differ, a match with either is enough: torch's own instance
            # norm has wrong gradients for some strides of dL/dy, and its result is a view.
            nearest = min(e, from_exact.get((name, i), e))
            if nearest <= FP64_BOUND or is_zero(name, i, seen, whole.seen):
                continue
            if noise.decides(name, i, seen):
                undecided = True
            elif nearest > noise.bound(name, i) and e > worst[0]:
                what = (
                    f"{name}[{i}] on rank {rank}: error {e:.3g}, bound {noise.bound(name, i):.3g}"
                )
                worst = e, what + found_instead(name, i, e, seen, whole.seen)
    if worst[1]:
        return Verdict("wrong", worst[1])
    return Verdict("undecided" if undecided else "equal")


def _rounded_otherwise(program: Program, exact: Run | None) -> Iterator[tuple[Run, float]]:
    """Yields runs on one device that differ by rounding, with the largest expected difference."""
    for seed in PARAMETER_NOISES:
        yield run_whole(program, seed), float("inf")
    # Hooks that add noise can undo in-place changes, and so can norms written out.
    for seed in LAYER_NOISES:
        yield run_whole(program, seed), 1e-6
    if "here" in "".join(program.statements):
        # A hook can affect which tensors one device saves, and so which ones change later.
        yield run_whole(replace(program, looker=-1)), float("inf")
    if exact is not None:
        # torch's own norms can be the less exact side, which noise does not show.
        yield exact, 1e-6


def _with_norms_written_out(program: Program) -> Run | None:
    """Runs a program on one device without torch's fused norms, in recomputed parts as well."""
    if program.reference != "torch":
        return None
    engine = Variable._execution_engine

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with reference:  # modes see `backward` and `grad` as calls, and are off inside of them
            return engine.run_backward(*args, **kwargs)

    standing = SimpleNamespace(run_backward=run_backward, queue_callback=engine.queue_callback)
    with Reference() as reference, mock.patch.object(Variable, "_execution_engine", standing):
        return run_whole(program)


def legal(program: Program, tries: int = 12) -> Program | None:
    """Returns the program without the statements that torch itself refuses."""
    for _ in range(tries):
        failed = run_whole(program).failed
        calm = _without_raising(program)
        if failed is None and calm != program:
            # A hook that raises may hide another error; pydist calls hooks last.
            failed = run_whole(calm).failed
        if failed is None:
            return program
        if program.differs:
            return None  # a program with different data is a single loop
        program = without(program, failed[0])
    return None


def _without_raising(program: Program) -> Program:
    """Returns the program with hooks that do not raise."""
    calm = (each.replace("with raising(", "with calm(") for each in program.statements)
    return replace(program, statements=tuple(calm))


def without(program: Program, number: int) -> Program:
    """Returns the program without one statement."""
    kept = program.statements[:number] + program.statements[number + 1 :]
    return replace(program, statements=kept)


@contextmanager
def settings() -> Iterator[None]:
    """Sets up runs of programs: float64, one thread per rank, no warnings."""
    os.environ["PYDIST_TUNE"] = "0"
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)
        torch.set_num_threads(threads)


def replay(program: Program) -> None:
    """Runs one program and prints the verdict."""
    with settings():
        verdict = judge(program)
    print(f"{verdict.outcome}: {verdict.detail}")
