"""How far the files of a data set are trusted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydist.data.regular import TrustedTree


@dataclass(frozen=True)
class FileTrust:
    """Trust that a user has in the files of a data set.

    Attributes:
        allow_roots: folders outside of the data set to which symbolic links may lead.
        untrusted: read the files in another process with limited memory, so that a file that
            crashes a library is an error.
    """

    allow_roots: tuple[Path, ...] = ()
    untrusted: bool = False

    def path(self, root: Path, name: str) -> Path:
        """Returns the path of one of the data set's files, whether or not it exists.

        Args:
            root: the data set's folder.
            name: its path relative to `root`, with forward slashes.

        Raises:
            DataError: the name, or a symbolic link on the path, leads out of `root`.
        """
        return TrustedTree(root, self.allow_roots).path(name)
