"""Divides ranks into groups for all-reduces in two levels: hosts, or rows and columns of a grid."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydist.errors import UsageError

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport


def own_host(rank: int) -> str:
    """Returns the name of the host that runs a rank: this one."""
    del rank
    return socket.gethostname()


def hosts_of(group: Transport) -> list[list[int]]:
    """Returns the ranks of a group by host, hosts in the order of their first ranks. Collective."""
    found: dict[bytes, list[int]] = {}
    for rank, host in enumerate(group.all_gather_bytes(own_host(group.rank).encode())):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def rows_of(hosts: Sequence[Sequence[int]], width: int | None) -> list[list[int]]:
    """Arranges ranks in a grid, neighbors on one host in a row.

    Args:
        hosts: the ranks of each host.
        width: number of ranks in a row; by default the ranks of a host, if all have as many, or
            else the largest for which rows are no longer than columns.

    Raises:
        UsageError: the ranks have no rows of this width.
    """
    ranks = [rank for host in hosts for rank in host]
    possible = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
    if width is None:
        sizes = {len(host) for host in hosts}
        width = sizes.pop() if len(hosts) > 1 and len(sizes) == 1 else 1
        if width == 1:
            width = max(n for n in possible if n <= math.isqrt(len(ranks)))
    if width not in possible:
        raise UsageError(
            f"Torus(row={width}): {len(ranks)} ranks have no rows of {width}; possible are "
            f"{', '.join(map(str, possible))}"
        )
    return [ranks[i : i + width] for i in range(0, len(ranks), width)]


def split_rows(group: Transport, rows: Sequence[Sequence[int]]) -> tuple[Transport, Transport]:
    """Returns the ranks of this rank's row, and those with its index in the other rows. Collective.

    Args:
        group: the ranks.
        rows: their indices in the group; rows may have different lengths.
    """
    number, index = next(
        (number, row.index(group.rank)) for number, row in enumerate(rows) if group.rank in row
    )
    return group.split(number, index), group.split(index, number)
