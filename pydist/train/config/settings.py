"""Defines types of settings, and the base of the tables of a configuration.

Nothing here imports torch, so that `pydist train --help` answers quickly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

import tyro
from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pydist.errors import UsageError
from pydist.grid import OTHER_AXES
from pydist.parsing import byte_count
from pydist.registry import Registry

# Strict: 1 is not a flag and "8" is not a number, in a file or in Python.
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Bounded: products of a few of them and of torch's counts stay within 64 bits.
LARGEST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=LARGEST, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
Epochs = Annotated[float, Field(gt=0, le=LARGEST, strict=True, allow_inf_nan=False)]
EpochsOrZero = Annotated[float, Field(ge=0, le=LARGEST, strict=True, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]
Weight = Annotated[float, Field(ge=0, le=1e6, strict=True)]


def _checked_size(text: str) -> str:
    try:
        byte_count(text)
    except ValueError as error:
        raise PydanticCustomError("size", "{reason}", {"reason": str(error)}) from None
    return text


Size = Annotated[str, AfterValidator(_checked_size)]
"""Number of bytes as text, such as "4GB"; see `byte_count`."""


_T = TypeVar("_T")


def with_axes(text: str, kind: Any, default: object) -> Callable[[type[_T]], type[_T]]:
    """Returns a decorator that gives a class a field for each of `pydist.grid.OTHER_AXES`.

    Args:
        text: the help of a field, with "{}" for what ranks along the axis hold parts of.
        kind: the type of the fields.
        default: their default.

    Returns:
        The decorator, which comes before `dataclass`; `counts_of_axes` returns the fields' values.
    """

    def add(table: type[_T]) -> type[_T]:
        for axis, what in OTHER_AXES.items():
            table.__annotations__[axis] = Annotated[kind, tyro.conf.arg(help=text.format(what))]
            setattr(table, axis, default)
        return table

    return add


def counts_of_axes(table: object) -> dict[str, Any]:
    """Returns the values of the fields that `with_axes` has added, by axis."""
    return {axis: getattr(table, axis) for axis in OTHER_AXES}


class Table:
    """Table of the configuration, in which unknown keys are errors."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


class Chosen(Table):
    """Table whose `name` chooses its class from a registry."""

    registry: ClassVar[Registry]
    default: ClassVar[str]
    """The name of a table without one."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if "registry" not in cls.__dict__:
            return handler(source)  # one of the classes
        classes = {}
        for name in cls.registry.names:
            with contextlib.suppress(UsageError):  # its package can't be imported
                classes[name] = handler.generate_schema(cls.registry.get(name))
        return core_schema.tagged_union_schema(classes, discriminator=cls._name_of)

    @classmethod
    def _name_of(cls, table: Any) -> Any:
        if isinstance(table, dict):
            return table.get("name", cls.default)
        return getattr(table, "name", None)
