"""The lines that `pydist data info` prints, about a data set or a pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydist.data.info import Facts

_MOST_FAULTS = 20


def lines_of(described: Mapping[str, Any], found: Mapping[str, Facts] | None) -> Iterator[str]:
    """Yields the description of a data set.

    Args:
        described: see `pydist.data.info.outline`.
        found: the facts by split; None if the voxels were not read.
    """
    files, size = described["files"], described["bytes"]
    checksums = "all" if described["checksums"] == files else described["checksums"]
    yield _line(
        "files", f"{files} × {described['format']}, {_size(size)}, {checksums} with checksum"
    )
    splits = ", ".join(f"{count} {split}" for split, count in described["samples"].items())
    yield _line("samples", f"{sum(described['samples'].values())} ({splits})")
    shapes = [f"{shape} voxels: {count}" for shape, count in described["shapes"].items()]
    more = f" and {len(shapes) - 5} more shapes" if len(shapes) > 5 else ""
    yield _line(
        "shape", f"{_count(described['channels'], 'channel')}; {', '.join(shapes[:5])}{more}"
    )
    yield _line(
        "stored", f"{described['dtype']} {described['axes']}: {_names(described['arrays'])}"
    )
    if described["channel_names"]:
        yield _line("channels", _names(described["channel_names"]))
    if described["targets"]:
        yield _line("targets", _names(described["targets"]))
    if described["classes"]:
        yield _line("classes", _names(described["classes"]))
    yield _line("normalize", _names(described["normalizations"]))
    if found is None:
        yield _line("values", "not read; --deep reads all of them")
    else:
        for split, facts in found.items():
            yield from _values(split, facts, described["classes"])


def lines_of_pack(described: Mapping[str, Any], faults: Sequence[str] | None) -> Iterator[str]:
    """Yields the description of a pack.

    Args:
        described: see `pydist.packs.verifying.pack_outline`.
        faults: what does not match its checksums; None if that was not compared.
    """
    size, stored = described["bytes"], described["stored_bytes"]
    yield _line(
        "files",
        f"{described['files']} in {_count(described['folders'], 'folder')}, {_size(size)}",
    )
    codecs = ", ".join(f"{count} {codec}" for codec, count in described["codecs"].items())
    share = f" ({stored / size:.0%})" if stored < size else ""
    yield _line("stored", f"{_size(stored)}{share}: {codecs or 'none'}")
    count, here = described["partitions"], described["partitions_here"]
    yield _line("pack", f"{_count(count, 'partition')}, {'all' if here == count else here} here")
    if faults is None:
        yield _line("checksums", "not compared; --deep compares all of them")
    elif not faults:
        yield _line("checksums", "all match")
    else:
        yield from _damaged(faults)


def _values(split: str, facts: Facts, classes: Sequence[str]) -> Iterator[str]:
    """Yields what was found in the voxels of one split."""
    ranges = [
        "no finite value" if low is None or high is None else f"{low:g} to {high:g}"
        for low, high in zip(facts.low, facts.high, strict=True)
    ]
    values = f"{', '.join(ranges)}; {facts.nan} NaN, {facts.infinite} infinite values"
    yield _line(split, values if ranges else "no file could be read")
    total = sum(facts.labels.values())
    for label, count in facts.labels.items():
        name = classes[label] if 0 <= label < len(classes) else "no class"
        yield _line("", f"label {label} ({name}): {count} voxels, {100 * count / total:.3g} %")
    yield from _damaged(facts.faults)


def _damaged(faults: Sequence[str]) -> Iterator[str]:
    for fault in faults[:_MOST_FAULTS]:
        yield _line("damaged", fault)
    if len(faults) > _MOST_FAULTS:
        yield _line("damaged", f"{len(faults) - _MOST_FAULTS} more files")


def _line(title: str, text: str) -> str:
    return f"{title:<11}{text}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _size(count: int) -> str:
    """Returns bytes in a unit of three or fewer digits before the point."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {units[unit]}"
