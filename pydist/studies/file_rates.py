"""Models how many files per second nodes read from a pack that is spread over them.

Each node has its part of the pack's partitions, and reads files of the full pack in random order:
on P nodes, (P - 1) / P of them from another node's server. A local read takes the profile's time of
reading files. A remote one also takes a round trip, and its bytes' time on the node's link, which
the node's processes share. Switches are no limit, as in a fat tree: the model shows what nodes
lose, not what a congested network would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydist.hardware import Hardware
from pydist.studies.published import PUBLISHED_FILES
from pydist.tables import table

SIZES = {"128 KB": 128 << 10, "512 KB": 512 << 10, "2 MB": 2 << 20, "8 MB": 8 << 20}
"""File sizes of FanStore's benchmarks."""
NODES = (1, 16, 64, 128, 256, 512)
_FROM = 64
"""Nodes of the smallest published run on CPUs, to which its efficiency is relative."""
_SERVED = 36e3
"""Requests that a node's server answers per second: measured on 2 cores, with 128 KB each."""


class FileRate(NamedTuple):
    """Rate at which some nodes read files.

    Attributes:
        size: bytes of a file.
        nodes: number of nodes.
        files_per_second: of all nodes.
        efficiency: of a node, relative to one that has all partitions.
    """

    size: int
    nodes: int
    files_per_second: float
    efficiency: float


def file_rates(hardware: Hardware) -> list[FileRate]:
    """Returns the modeled rates of `SIZES` on `NODES`.

    Args:
        hardware: profile of the nodes; every rank of a node reads.
    """
    found = []
    for size in SIZES.values():
        alone = _of_a_node(hardware, size, 1)
        for nodes in NODES:
            own = _of_a_node(hardware, size, nodes)
            found.append(FileRate(size, nodes, own * nodes, own / alone))
    return found


def _of_a_node(hardware: Hardware, size: int, nodes: int) -> float:
    """Returns the files that each of some nodes reads per second."""
    remote = 1 - 1 / nodes
    link = size / hardware.between.bandwidth
    seconds = size / hardware.reading + remote * (2 * hardware.between.latency + link)
    limits = [hardware.ranks_per_node / seconds]
    if remote:
        limits += [1 / (remote * link), _SERVED / remote]
    return min(limits)


def file_rates_table(rates: Sequence[FileRate], hardware: str) -> str:
    """Formats modeled rates.

    Args:
        rates: from `file_rates`.
        hardware: name of the profile.
    """
    names = {size: name for name, size in SIZES.items()}
    of_a_node = {(r.size, r.nodes): r.files_per_second / r.nodes for r in rates}
    lines: list[tuple[str, ...]] = [
        (f"modeled, {hardware}", "nodes", "files/s", "MB/s a node", "of 1 node", f"of {_FROM}")
    ]
    for each in rates:
        own = of_a_node[each.size, each.nodes]
        since = own / of_a_node[each.size, _FROM]
        lines.append(
            (
                names[each.size], str(each.nodes), f"{each.files_per_second:,.0f}",
                f"{own * each.size / 1e6:,.0f}", f"{each.efficiency:.0%}",
                f"{since:.0%}" if each.nodes >= _FROM else "",
            )
        )  # fmt: skip
    return table(lines, left=1)


def published_files_table() -> str:
    """Formats FanStore's published rates; efficiency is relative to its fewest nodes."""
    lines: list[tuple[str, ...]] = [("published, files", "nodes", "files/s", "of fewest")]
    for each in PUBLISHED_FILES:
        first = next(other for other in PUBLISHED_FILES if other.run == each.run)
        own, least = (x.files_per_second / x.nodes for x in (each, first))
        lines.append(
            (each.run, str(each.nodes), f"{each.files_per_second:,.0f}", f"{own / least:.0%}")
        )
    return table(lines, left=1)
