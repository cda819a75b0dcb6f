"""The autotuner, which chooses among kernels by measurement.

All ranks of a sample group choose together. When a problem first occurs in training, all its
candidates are measured, while the other ranks of the group compute as well. Other groups measure
the same problem at about the same time. Later runs measure a few candidates again that may
be the fastest, the least measured ones first. This revises choices that were made on a busy
machine. Within a run, a choice stays; `Autotuner.everyones` is for
checkpoints, and for files that pin the choices of another run, which makes results bit-identical.

With `PYDIST_TUNE=0`, where no file can be stored, or if the ranks of a group have unlike processors
or numbers of threads, a fixed rule chooses without measuring.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydist.backend.records import Records, TuningRecord, is_wanted, key_of
from pydist.errors import UsageError
from pydist.parsing import parse_json
from pydist.watchdog import phase

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.mesh import Mesh

PIN_VARIABLE = "PYDIST_TUNING"
_TURNS = 2
"""Rounds of first measurements over all candidates, as the load of the machine varies."""
_HOPELESS = 2.0
"""A candidate slower than its best rival by this factor is not measured in the second round."""
_REVISED = 3
"""Number of candidates of a problem that a later run measures again."""
_ENOUGH = 12
"""Visits after which a candidate is not measured again."""

Choice = Any
"""The choice of one rank, as a JSON value."""


class Subject(Protocol):
    """A problem of one rank, and the candidate kernels among which the autotuner chooses."""

    @property
    def key(self) -> str:
        """Key of the problem and everything else that times depend on; see `key_of`."""

    @property
    def choice_key(self) -> str:
        """Key of the problem and what a choice depends on, also beside other numbers of groups."""

    @property
    def candidates(self) -> Sequence[str]:
        """Names that identify the candidates."""

    def rivals(self, candidate: str) -> Sequence[str]:
        """Returns the candidates that compute the same as this one, including itself."""


class Autotuner:
    """Measures candidate kernels, and keeps the choices that one rank of a mesh has made.

    Attributes:
        seconds: spent on measuring.
        problems: number of problems measured.
        listener: called once per problem when measuring begins.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Begins with the choices of the file that `PYDIST_TUNING` names, if it is set."""
        self._mesh = weakref.ref(mesh)
        self._chosen: dict[str, list[Choice]] = {}
        self._kept: dict[str, list[Choice]] = {}
        self._is_pinned = False
        self.seconds, self.problems = 0.0, 0
        self.listener: Callable[[], None] | None = None
        if path := os.environ.get(PIN_VARIABLE):
            self.pin(Path(path))

    def _of_mesh(self) -> Mesh:
        mesh = self._mesh()
        assert mesh is not None
        return mesh

    def pin(self, path: Path, own: Callable[[list[Any]], list[Any]] = list) -> None:
        """Loads the choices of a file with the result of `everyones`, and disables measuring.

        Args:
            path: the file.
            own: selects the groups of this mesh, in a file for several.

        Raises:
            UsageError: the file can't be read, or is not such a file.
        """
        what = f"the tuning file {path} can't be used"
        if path.exists() and not path.is_file():
            raise UsageError(f"{what}: it is no regular file")  # reading a pipe would block
        try:
            self.load(parse_json(path.read_bytes()), own)
        except OSError as error:
            raise UsageError(f"{what}: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{what}: {error}") from error
        self._is_pinned = True

    def load(self, groups: Any, own: Callable[[list[Any]], list[Any]] = list) -> None:
        """Stores earlier choices, which are used wherever they fit.

        Args:
            groups: the result of `everyones`.
            own: selects the groups of this mesh, in a list for several.

        Raises:
            ValueError: `groups` is something else.
        """
        is_list = isinstance(groups, list) and groups
        if not is_list or not all(isinstance(each, dict) for each in groups):
            raise ValueError("it holds no choices of sample groups")
        groups = own(groups)
        self._kept = dict(groups[self._of_mesh().data_index % len(groups)])

    def everyones(self) -> list[dict[str, list[Choice]]]:
        """Returns the choices of all sample groups, for checkpoints and files. Collective."""
        return self._of_mesh().data.all_gather_json({**self._kept, **self._chosen})

    def choose(
        self,
        group: Transport,
        subjects: Sequence[Sequence[Subject]],
        visit: Callable[[str, str], float],
        pick: Callable[[Mapping[str, Mapping[str, float]]], Sequence[Choice]],
        is_possible: Callable[[Sequence[Choice]], bool],
        learns: bool,
    ) -> tuple[Choice | None, bool]:
        """Chooses for every rank of a group. Collective over it.

        Args:
            group: the ranks that choose together.
            subjects: of every rank; equal keys are one problem.
            visit: returns the seconds of a candidate of one of this rank's subjects; called with
                the subject's key and the candidate.
            pick: returns the choices of all ranks, from the least seconds of candidates by key.
            is_possible: returns whether stored choices can still be made.
            learns: whether to measure unknown candidates; the first rank's value counts.

        Returns:
            This rank's choice, `None` for the fixed rule's; and whether the choice is final.
        """
        name = key_of("choice", {"subjects": [[s.choice_key for s in each] for each in subjects]})
        distinct = {subject.key: subject for each in subjects for subject in each}
        said = self._plan(name, distinct, is_possible, learns) if group.rank == 0 else {}
        plan = group.broadcast_json(said)
        if "choice" in plan:
            choices = plan["choice"]
        elif "records" not in plan:
            return None, bool(plan["final"])
        elif b"1" in group.all_gather_bytes(b"%d" % (plan["records"].keys() != distinct.keys())):
            return None, True  # ranks with other processors or threads, whose times differ
        else:
            mine = [subject.key for subject in subjects[group.rank]]
            found = self._measured(group, distinct, mine, visit, plan)
            choices = list(pick({key: record.seconds for key, record in found.items()}))
        self._chosen[name] = choices
        return choices[group.rank], True

    def _plan(
        self,
        name: str,
        subjects: Mapping[str, Subject],
        is_possible: Callable[[Sequence[Choice]], bool],
        learns: bool,
    ) -> dict[str, Any]:
        """Decides on the first rank for all: use a stored choice or the rule, or measure."""
        kept = self._kept.get(name)
        if kept is not None and is_possible(kept):
            return {"choice": kept}
        records = Records()
        if self._is_pinned or not is_wanted() or not records.is_writable():
            return {"final": True}
        known = {key: records.read(key, each.candidates) for key, each in subjects.items()}
        missing = {
            key: [c for c in each.candidates if c not in known[key].seconds]
            for key, each in subjects.items()
        }
        if not learns and any(missing.values()):
            return {"final": False}
        visits: dict[str, list[str]] = {}
        if learns:
            for key, each in subjects.items():
                visits[key] = missing[key] * _TURNS or _worth_another_look(each, known[key])
        return {"records": {key: each.dump() for key, each in known.items()}, "visits": visits}

    def _measured(
        self,
        group: Transport,
        subjects: Mapping[str, Subject],
        mine: Sequence[str],
        visit: Callable[[str, str], float],
        plan: Mapping[str, Any],
    ) -> dict[str, TuningRecord]:
        """Measures what the plan lists, and returns all records; `mine` are this rank's keys."""
        found = {
            key: TuningRecord.load(plan["records"][key], each.candidates)
            for key, each in subjects.items()
        }
        visits: Mapping[str, list[str]] = plan["visits"]
        if not any(visits.values()):
            return found
        if self.listener is not None:
            self.listener()
        began = time.perf_counter()
        own = {key: TuningRecord() for key in mine}
        queue = [(key, name) for key in own for name in visits[key]]
        with phase("autotuning"):
            counts = group.all_gather_bytes(str(len(queue)).encode())
            for number in range(max(map(int, counts))):
                group.barrier()  # so that other ranks compute as well, as in a step
                if number < len(queue):
                    key, name = queue[number]
                    if not _is_hopeless(subjects[key], name, own[key]):
                        own[key].add(name, visit(key, name))
            said = {key: record.dump() for key, record in own.items()}
            everyone = group.all_gather_json(said)
        for records_of_rank in everyone:
            for key, content in records_of_rank.items():
                found[key].merge(TuningRecord.load(content, subjects[key].candidates))
        if group.rank == 0:
            records = Records()
            for key, record in found.items():
                records.write(key, record)
        self.seconds += time.perf_counter() - began
        self.problems += 1
        return found


def _worth_another_look(subject: Subject, known: TuningRecord) -> list[str]:
    """Returns candidates that may be the fastest, the least measured ones first."""
    seconds, visits = known.seconds, known.visits
    possible = [
        name
        for name in subject.candidates
        if visits[name] < _ENOUGH
        and len(subject.rivals(name)) > 1
        and seconds[name] <= _HOPELESS * min(seconds[rival] for rival in subject.rivals(name))
    ]
    return sorted(possible, key=lambda name: (visits[name], seconds[name]))[:_REVISED]


def _is_hopeless(subject: Subject, name: str, own: TuningRecord) -> bool:
    if name not in own.seconds:
        return False
    best = min(own.seconds[rival] for rival in subject.rivals(name) if rival in own.seconds)
    return own.seconds[name] > _HOPELESS * best


def autotuner_of(mesh: Mesh) -> Autotuner:
    """Returns the autotuner of a mesh, and creates it on first use."""
    return mesh.session.service(Autotuner, lambda: Autotuner(mesh))
