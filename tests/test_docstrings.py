"""Tests that the first sentence of each docstring says something in a tooltip.

`LEAST` lists the folders to which this applies. A sentence passes if it has a finite verb by the
rules of `has_verb`. They know no dictionary: they look for an auxiliary, for a relative or other
clause, or for a first word in the third person. A sentence that fails usually gets better with the
clause that it lacks: "Halo in flight." does not say whose; "Halo that a convolution has sent and
not received." does.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAST = {"pydist": 3000, "tests/lib": 500, "benchmarks/python": 400, "tools": 20}
"""Number of docstrings that each folder at least has, so that a test can't pass on nothing."""
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

AUXILIARIES = frozenset(
    "is are was were has have does do did can cannot could may must will would should need needs"
    .split()
)  # fmt: skip
CLAUSES = frozenset(
    "that which who whose whom where whether how what when while if unless until because"
    .split()
)  # fmt: skip
# After them a first word like "Sums" or "Pads" is the plural of a noun, ...
PREPOSITIONS = frozenset(
    "of and or that with without in into between per for from over on at by to as along".split()
)
# ... except for verbs that need no object.
WITHOUT_OBJECT = frozenset(
    "waits looks asks searches trains runs begins starts continues resumes joins prepares chooses "
    "sums reduces indexes convolves normalizes communicates connects adds belongs converts decides "
    "reshapes divides multiplies pools smooths scatters raises".split()
)
# Plurals that a noun or a participle may follow: "Bytes read so far."
NOUNS = frozenset(
    "axes bytes dims elements errors losses options ranks samples seconds shapes tensors "
    "types values voxels".split()
)


def is_plural_or_verb(word: str) -> bool:
    return bool(re.fullmatch(r"[a-z-]*[^suia]s|[a-z-]*(ses|ias)", word)) and word not in NOUNS


def begins_with_verb(words: list[str]) -> bool:
    """Whether the first word is a verb, or all of "Generates, converts and verifies data" are."""
    word = then = ""
    rest = iter([*words, ""])
    for word in rest:
        if not is_plural_or_verb(word):
            return False
        then = next(rest)
        if then not in (",", "and", "or"):
            break
    is_noun = then in PREPOSITIONS and (word not in WITHOUT_OBJECT or then == "of")
    return not is_noun and bool(re.match(r"\w|[\[({]", then))


def has_verb(sentence: str, *, may_begin: bool = True) -> bool:
    """Whether a sentence has a finite verb.

    Args:
        sentence: without line breaks.
        may_begin: whether it may begin with a verb in the third person, as "Returns the sum."
    """
    text = re.sub(r"^`[^`]*`: ", "", sentence)  # a command's name
    words = re.findall(r"[a-z0-9'-]+|[^\sa-z]", re.sub(r"`[^`]*`", "X", text).lower())
    if AUXILIARIES.intersection(words) or (may_begin and begins_with_verb(words)):
        return True
    pairs = itertools.pairwise(words)
    return any(word in CLAUSES and re.match(r"\w", then) and then != "of" for word, then in pairs)


def says_nothing(sentence: str) -> bool:
    """Whether a sentence only refers elsewhere, or begins with words that any docstring could."""
    elsewhere = r"(As|Like|See) (in )?`[^`]*`"
    anything = r"(This|The) (class|function|method|module|package|property)\b"
    return bool(re.match(f"{elsewhere}|{anything}", sentence))


def summaries(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Yields place, first sentence, and whether that may begin with a verb, of each docstring."""
    for node in definitions(ast.parse(path.read_text())):
        text = ast.get_docstring(node)
        if text is None:
            continue
        summary = " ".join(text.partition("\n\n")[0].split())
        place = f"{path.relative_to(ROOT)}:{node.body[0].lineno}"
        yield place, re.split(r"(?<=[.!?])\s", summary)[0], not is_property(node)


def definitions(node: ast.stmt | ast.Module) -> Iterator[Definition]:
    """Yields a module, class or function, and all that its statements define."""
    if isinstance(node, Definition):
        yield node
    for part in ("body", "orelse", "finalbody"):
        for child in getattr(node, part, []):
            yield from definitions(child)


def is_property(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any("property" in ast.unparse(each) for each in decorators)


@pytest.mark.parametrize("folder", LEAST)
def test_first_sentences_have_a_verb(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [each for path in files for each in summaries(path)]
    assert len(found) > LEAST[folder]
    lacking = [f"{at}: {text}" for at, text, may in found if not has_verb(text, may_begin=may)]
    empty = [f"{at}: {text}" for at, text, _ in found if says_nothing(text)]
    assert lacking + empty == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Halo in flight.",
        "2D U-Net.",
        "The stages of a network.",
        "Call on sharded tensors.",
        "Sums, means and variances over any dims.",
        "Parts of an extent, from measured times.",
        "Bytes read so far.",
        "Kernels for the convolution of one shard.",
        "The class of each voxel, that of the label.",
        "`pydist train`: configuration of a run.",
        "Statistics of every row.",
        "See `Work.wait`.",
        "This class represents a halo.",
    ],
)
def test_phrases_without_a_verb_are_found(sentence: str) -> None:
    assert not has_verb(sentence) or says_nothing(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "Returns torch's index of each element.",
        "Returns [N, C] values.",
        "Joins and repeats tensors.",
        "`pydist data`: generates, converts and verifies data sets.",
        "Trains for some steps.",
        "`pydist train`: trains as a single process.",
        "Fraction of the elements that a pass sends.",
        "Whether a graph exists.",
        "A halo is a correction.",
        "Processes messages in order.",
    ],
)
def test_sentences_with_a_verb_pass(sentence: str) -> None:
    assert has_verb(sentence)


def test_a_property_does_not_begin_with_a_plural() -> None:
    assert not has_verb("Names without duplicates.", may_begin=False)
