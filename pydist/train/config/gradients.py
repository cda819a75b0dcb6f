"""Defines the configuration of gradient reduction: a name, or a table with a form's settings.

Nothing here imports torch, so that `pydist train --help` answers quickly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from pydist.train.config.settings import (
    Count,
    CountOrZero,
    EpochsOrZero,
    Flag,
    Fraction,
    Positive,
    Table,
)  # fmt: skip

if TYPE_CHECKING:
    from pydist.gradients.forms.settings import Gradients

_Part = Annotated[float, Field(gt=0, le=1, strict=True)]


class FormConfig(Table):
    """Table that configures a form which has settings."""

    name: str

    def settings(self, steps: Callable[[float], int]) -> Gradients:
        """Returns the form as `pydist.parallelize` takes it; see `settings`."""
        raise NotImplementedError


class StatefulConfig(FormConfig):
    """Configuration of a form that keeps something from step to step."""


@dataclass(frozen=True)
class TorusConfig(FormConfig):
    """Table that configures the 2-D torus; see `pydist.gradients.Torus`."""

    name: Literal["torus"] = "torus"
    """The form: "torus"."""
    row: Count | None = None
    """Ranks in a row; by default all ranks of a host."""

    def settings(self, steps: Callable[[float], int]) -> Gradients:
        """Returns the form; see `FormConfig.settings`."""
        from pydist.gradients import Torus

        return Torus(self.row)


@dataclass(frozen=True)
class PowerSgdConfig(StatefulConfig):
    """Table that configures PowerSGD; see `pydist.gradients.PowerSGD`."""

    name: Literal["powersgd"] = "powersgd"
    """The form: "powersgd"."""
    rank: Count = 4
    """Columns of the two matrices that represent a gradient."""
    start: CountOrZero = 100
    """First steps that send gradients as they are."""
    least_saving: Positive = 2.0
    """How many times smaller the matrices are at least; other gradients are sent as they are."""

    def settings(self, steps: Callable[[float], int]) -> Gradients:
        """Returns the form; see `FormConfig.settings`."""
        from pydist.gradients import PowerSGD

        return PowerSGD(self.rank, self.start, self.least_saving)


@dataclass(frozen=True)
class DgcConfig(StatefulConfig):
    """Table that configures Deep Gradient Compression; see `pydist.gradients.DGC`."""

    name: Literal["dgc"] = "dgc"
    """The form: "dgc"."""
    density: _Part = 0.001
    """Fraction of the elements that each sample group sends."""
    momentum: Fraction = 0.9
    """Momentum, which the optimizer must not have."""
    nesterov: Flag = False
    """Nesterov's form of momentum."""
    masking: Flag = True
    """Whether sending an element resets its velocity."""
    warmup_epochs: EpochsOrZero = 4.0
    """First epochs with higher densities."""
    densities: tuple[_Part, ...] = (0.25, 0.0625, 0.015625, 0.004)
    """Those densities, for equal parts of the warm-up."""
    sample: _Part = 0.01
    """Fraction of the elements on which a threshold is estimated."""
    clip_norm: Positive | None = None
    """Threshold of the gradient's norm: each of N sample groups clips its share, its own gradient
    over N, to clip_norm / √N."""

    def settings(self, steps: Callable[[float], int]) -> Gradients:
        """Returns the form; see `FormConfig.settings`."""
        from pydist.gradients import DGC

        own = asdict(self)
        warmup = steps(own.pop("warmup_epochs"))
        del own["name"]
        return DGC(**own, warmup=warmup)


@dataclass(frozen=True)
class PostLocalConfig(StatefulConfig):
    """Table that configures post-local SGD; see `pydist.gradients.PostLocal`."""

    name: Literal["post_local"] = "post_local"
    """The form: "post_local"."""
    every: Count = 8
    """Steps between two averages of the sample groups' parameters."""
    start_epochs: EpochsOrZero = 30.0
    """First epochs with the gradients of all sample groups."""

    def settings(self, steps: Callable[[float], int]) -> Gradients:
        """Returns the form; see `FormConfig.settings`."""
        from pydist.gradients import PostLocal

        return PostLocal(self.every, steps(self.start_epochs))


TABLES: dict[str, type[FormConfig]] = {
    "torus": TorusConfig,
    "powersgd": PowerSgdConfig,
    "dgc": DgcConfig,
    "post_local": PostLocalConfig,
}
"""The forms with settings. pydantic adds the name to the location of an error."""
NAMES = ("dense", "fp16", "bf16", "torus", "hierarchical", "powersgd", "dgc", "post_local")
PLAIN = tuple(name for name in NAMES if name not in TABLES)
STATEFUL = tuple(name for name, table in TABLES.items() if issubclass(table, StatefulConfig))


def _as_table(given: Any) -> Any:
    """Returns the table of a form that is given by its name, if the form has settings."""
    name = given.get("name") if isinstance(given, dict) else getattr(given, "name", given)
    if not isinstance(name, str) or name not in NAMES:
        raise PydanticCustomError(
            "gradients",
            "possible are {names}, and a table such as {table}",
            {"names": ", ".join(NAMES), "table": '{name = "powersgd", rank = 4}'},
        )
    if isinstance(given, dict) and name in PLAIN:
        if len(given) > 1:
            raise PydanticCustomError(
                "gradients", "{name} has no settings; {tables} have some",
                {"name": name, "tables": ", ".join(TABLES)},
            )  # fmt: skip
        return name
    return {"name": given} if isinstance(given, str) and given in TABLES else given


def _kind_of(given: Any) -> str:
    name = given.get("name") if isinstance(given, dict) else getattr(given, "name", "")
    return name if name in TABLES else "(a name)"


FORMS = Annotated[
    Annotated[Literal["dense", "fp16", "bf16", "hierarchical"], Tag("(a name)")]
    | Annotated[TorusConfig, Tag("torus")]
    | Annotated[PowerSgdConfig, Tag("powersgd")]
    | Annotated[DgcConfig, Tag("dgc")]
    | Annotated[PostLocalConfig, Tag("post_local")],
    Discriminator(_kind_of),
]
GradientsConfig = Annotated[FORMS, BeforeValidator(_as_table)]


def name_of(config: GradientsConfig) -> str:
    """Returns the name of a form."""
    return config if isinstance(config, str) else config.name


def settings(config: GradientsConfig, steps: Callable[[float], int]) -> Gradients:
    """Returns a form as `pydist.parallelize` takes it.

    Args:
        config: the configuration.
        steps: returns the number of steps in a number of epochs from the beginning.
    """
    if isinstance(config, FormConfig):
        return config.settings(steps)
    from pydist.gradients.forms.settings import settings_of

    return settings_of(config)


def effective(config: GradientsConfig) -> Any:
    """Returns the settings that affect the result of a step by more than rounding."""
    if name_of(config) in ("dense", "torus", "hierarchical"):
        return "dense"
    if isinstance(config, str):
        return config
    # Checkpoints from before there was a setting lack it.
    return {name: value for name, value in asdict(config).items() if value is not None}
