"""Program: a training script that one device and a mesh can both run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from support.random_networks.spot import Source


@dataclass(frozen=True)
class Program:
    """Statements, the networks that they name, and the split.

    Attributes:
        statements: Python source, each run in the namespace of `hunter.world.World`.
        networks: source of each network's layers, in the namespace of `random_networks.blocks`.
        sample: shape of one sample: channels, then the spatial extents.
        groups: number of samples of each data group.
        spatial: ranks along the spatial dims.
        channel: ranks along the channel axis.
        points: split points of each spatial dim of the input; empty for an even split.
        keep_thin_blocks: option of the mesh.
        looker: the rank on which `here` is true; negative for none.
        reference: "torch", or "one rank": pydist on one rank, for pydist's random numbers.
        differs: whether ranks get different data on purpose, so that pydist must raise.
    """

    statements: tuple[str, ...]
    networks: dict[str, tuple[Source, ...]]
    sample: tuple[int, ...]
    groups: tuple[int, ...] = (2,)
    spatial: tuple[int, ...] = (2, 1, 1)
    channel: int = 1
    points: tuple[tuple[int, ...], ...] = ()
    keep_thin_blocks: bool = False
    looker: int = 0
    reference: str = "torch"
    differs: bool = False
    seed: int = field(default=-1, compare=False)

    @property
    def ranks(self) -> int:
        return len(self.groups) * self.channel * math.prod(self.spatial)

    @property
    def batch(self) -> int:
        return sum(self.groups)

    def script(self, comment: str) -> str:
        """Returns a script that runs the program and prints the verdict."""
        fields = [
            f"    {name}={getattr(self, name)!r},"
            for name in (
                "sample", "groups", "spatial", "channel", "points", "keep_thin_blocks",
                "looker", "reference", "differs", "seed",
            )
        ]  # fmt: skip
        networks = [
            f"        {name!r}: (\n"
            + "".join(f"            Source({str(layer)!r}),\n" for layer in layers)
            + "        ),"
            for name, layers in self.networks.items()
        ]
        statements = [f"        {_quoted(s)}," for s in self.statements]
        return "\n".join(
            [
                *(f"# {line}" for line in comment.splitlines()),
                "# Run with PYTHONPATH=tests/lib.",
                "from support.hunter.judge import replay",
                "from support.hunter.program import Program",
                "from support.random_networks.spot import Source",
                "",
                "replay(Program(",
                "    networks={",
                *networks,
                "    },",
                *fields,
                "    statements=(",
                *statements,
                "    ),",
                "))",
                "",
            ]
        )


def _quoted(text: str) -> str:
    if "\n" not in text:
        return repr(text)
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{escaped}"""' if not escaped.endswith('"') else repr(text)
