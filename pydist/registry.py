"""Registries of named implementations, which other packages extend by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydist.errors import UsageError


class Registry:
    """Registry that holds named implementations: pydist's own, and those of installed packages.

    A package declares one in its pyproject.toml; it is imported on first use:

        [project.entry-points."pydist.transports"]
        ucx = "my_package.ucx:UcxTransport"

    Args:
        kind: name of the kind of implementation, such as "transport".
        own: pydist's own by name, as "module:attribute".
    """

    def __init__(self, kind: str, own: Mapping[str, str]) -> None:
        self.kind, self.group = kind, f"pydist.{kind}s"
        self._own = own

    @cached_property
    def _points(self) -> dict[str, EntryPoint]:
        own = {name: EntryPoint(name, path, self.group) for name, path in self._own.items()}
        return {point.name: point for point in entry_points(group=self.group)} | own

    @property
    def names(self) -> tuple[str, ...]:
        """Names that are registered, pydist's own first."""
        return (*self._own, *sorted(self._points.keys() - self._own.keys()))

    def get(self, name: str) -> Any:
        """Returns the implementation with a name.

        Raises:
            UsageError: the name is unknown, or the package that declares it can't be imported.
        """
        point = self._points.get(name)
        if point is None:
            raise UsageError(f"{self.kind} '{name}' is none of {', '.join(self.names)}")
        return imported(point.value, f"{self.kind} '{name}'")


def imported(path: str, what: str) -> Any:
    """Imports the object that a path such as "module:attribute" names.

    Args:
        path: the path.
        what: description of the object, for errors.

    Raises:
        UsageError: the path has another form, or can't be imported.
    """
    try:
        return EntryPoint(what, path, "").load()
    except Exception as error:  # the import of a module may raise anything
        raise UsageError(f"{what} ({path}): {' '.join(str(error).split())}") from error


JOINS = ("auto", "mpi", "c10d", "local", "cuda", "host")
"""Ways to join a job, which build on no other transport; see `pydist.runtime.connect`."""

FORMATS = Registry(
    "format",
    {
        "hdf5": "pydist.data.safe_open:SafeFile",
        "zarr": "pydist.data.zarr_file:ZarrFile",
        "numpy": "pydist.data.numpy_file:NumpyFolder",
        "tfrecord": "pydist.data.tfrecord_file:TfrecordFile",
    },
)
"""Formats of a data set's files: subclasses of `pydist.data.formats.StoredFile`."""

MODELS = Registry(
    "model",
    {
        "cosmoflow": "pydist.train.config.model:CosmoFlowConfig",
        "unet3d": "pydist.train.config.model:UNet3dConfig",
        "factory": "pydist.train.config.model:FactoryConfig",
    },
)
"""Tables "model" of a configuration: subclasses of `pydist.train.config.model.ModelConfig`."""

OPTIMIZERS = Registry(
    "optimizer",
    {
        "adam": "pydist.train.config.optimizers:AdamConfig",
        "sgd": "pydist.train.config.optimizers:SgdConfig",
        "lars": "pydist.train.config.optimizers:LarsConfig",
        "lamb": "pydist.train.config.optimizers:LambConfig",
    },
)
"""Tables "optimizer": subclasses of `pydist.train.config.optimizers.OptimizerConfig`."""

TRANSPORTS = Registry(
    "transport",
    {
        "nccl": "pydist.comm.transports.nccl.transport:NcclTransport",
        "ipc": "pydist.comm.transports.ipc.transport:IpcTransport",
        "cuda-mpi": "pydist.comm.transports.cuda_mpi.transport:CudaMpiTransport",
        "staged": "pydist.comm.transports.staged:StagedTransport",
    },
)
"""Subclasses of `pydist.comm.Transport` whose class method `over` builds on another transport."""


def transport_names() -> tuple[str, ...]:
    """Returns the names that `pydist.init(transport=...)` accepts."""
    return *JOINS, *TRANSPORTS.names
