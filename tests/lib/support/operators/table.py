"""Writes docs/operators.md: the behavior of every call, by split, type and derivative.

    PYTHONPATH=tests/lib python -m support.operators.table > docs/operators.md

Every call of `operators.cases` runs on one device and on sharded tensors, and the results are
compared. A difference ends the script: the table only has calls that are equal or refused.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pydist import Mesh
from pydist.errors import NotSupported
from pydist.tensor import HANDLERS
from pydist.tensor.refusals import name_of
from support.equivalence import on_ranks
from support.operators.cases import FAMILIES
from support.operators.runs import TYPES, cell, on_one_device, run


def elementwise_texts(known: set[str]) -> list[str]:
    """Returns calls of the element-wise functions that no text has yet, found by name."""
    forms = [
        "torch.{}(x)", "torch.{}(u)", "torch.{}(x, y)", "F.{}(x)", "torch.special.{}(u)",
        "torch.special.{}(u, v)", "x.{}()", "x.{}(y)",
    ]  # fmt: skip
    texts = []
    for name in sorted(handled() - known):
        for form in forms:
            text = form.format(name)
            first = on_one_device(text, "fp64")[:1]
            if first and all(t.isfinite().all() for t in first[0]):
                texts.append(text)
                break
    return texts


def short(name: str) -> str:
    """Returns sigmoid for torch.sigmoid, torch.Tensor.sigmoid_ and so on; "" for attributes."""
    last = name.rsplit(".", 1)[-1]
    return "" if last.startswith("__") or name.endswith(" ") else last.rstrip("_").lstrip("_")


ASKED = frozenset(
    "backward grad register_hook retain_grad item tolist numpy dim size numel nelement ndimension "
    "element_size get_device is_complex is_conj is_contiguous is_floating_point is_inference "
    "is_neg is_signed is_tensor data requires_grad cpu cuda type imag "
    "register_post_accumulate_grad_hook "
    "has_compatible_shallow_copy_type amp_foreach_non_finite_check_and_unscale foreach_zero "
    "foreach_add foreach_sub foreach_mul foreach_div foreach_copy foreach_norm foreach_clamp_min "
    "foreach_clamp_max foreach_lerp "
    "nested_tensor_from_mask_left_aligned neighborhood_attention_generic "
    "constant kaiming_normal kaiming_uniform normal uniform exponential log_normal cauchy "
    "random".split()
)
"""Functions that return no tensor or have their own tests."""


def handled() -> set[str]:
    """Returns the short names of all functions that have a handler and return tensors."""
    return {short(name_of(function)) for function in HANDLERS} - ASKED - {""}


class _Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(short(name_of(func)))
        return func(*args, **(kwargs or {}))


def names_in(texts: Sequence[str]) -> set[str]:
    """Returns the short names of the functions that the texts call on sharded tensors."""

    def body(mesh: Mesh) -> set[str]:
        with _Seen() as seen:
            for text in texts:
                with suppress(NotSupported):
                    next(run(text, "fp64", mesh))
        return seen.names

    return on_ranks((1, 1, 1), body)[0]


@functools.cache
def all_texts() -> dict[str, list[str]]:
    """Returns the calls of the table, by family."""
    families = {name: text.strip().splitlines() for name, text in FAMILIES.items()}
    known = names_in([text for texts in families.values() for text in texts])
    families["Element by element"] += elementwise_texts(known)
    return families


def rows() -> dict[str, dict[str, list[str]]]:
    """Returns the cells of every call, by family: unsplit and split, each in all types."""
    families = all_texts()
    calls = [text for texts in families.values() for text in texts]
    expected = {(text, kind): on_one_device(text, kind) for text in calls for kind in TYPES}

    def body(mesh: Mesh) -> dict[str, list[str]]:
        return {
            text: [cell(text, kind, expected[text, kind], mesh) for kind in TYPES] for text in calls
        }

    columns = []
    for spatial in ((1, 1, 1), (2, 1, 1)):
        ranks = on_ranks(spatial, body)
        assert all(rank == ranks[0] for rank in ranks)
        columns.append(ranks[0])
    return {
        name: {text: [*columns[0][text], *columns[1][text]] for text in texts}
        for name, texts in families.items()
    }


TORCH = f"torch {torch.__version__.split('+')[0]}"

HEAD = f"""# Operators

Results of each call on sharded tensors: with one rank, where nothing is split, and with the first
spatial dim of every tensor cut unevenly over two. `tests/lib/support/operators/table.py` runs them
all against {TORCH} on one device and writes this page; a test checks it.

`FBD`: forward, backward and double backward equal those of one device. `·`: torch itself has none
(no derivative, or not in this type). `refused`: an error names the call, the module and a
workaround; `F, then refused`: the result exists, its derivative does not. bf16 is autocast of fp32.

x and y are `[N, C, D, H, W]`, x1 `[N, C, W]`, x2 `[N, C, H, W]`, u and v like x with values between
0 and 1; mask is boolean, labels are integers; `p(...)` is a parameter. `assigned(x, y)` does
`x[:, :2] = y[:, 2:]`. Functions, methods, operators and in-place forms of the same name behave
identically.
"""


def page() -> str:
    """Returns the full text of the page."""
    parts = [HEAD]
    for name, calls in rows().items():
        parts.append(f"\n## {name}\n")
        parts.append("| call | fp64 | fp32 | bf16 | split: fp64 | fp32 | bf16 |")
        parts.append("|---|---|---|---|---|---|---|")
        parts += [f"| `{text}` | {' | '.join(cells)} |" for text, cells in calls.items()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(page(), end="")
