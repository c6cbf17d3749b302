"""What a config section is made of: the base class, the one-line key, and what its type accepts.

Every value arrives as text, from YAML, the environment and the command line alike, and is converted by
the type of its key. So `run_name: 123` is a string, `steps: 1e3` a whole number, and `remat_policy: none`
a choice, without one rule per source.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def key(default: Any, doc: str, unit: str = "", aka: str = "", **limits: Any) -> Any:
    """One config key: default, doc, unit of its value, another name for it, pydantic's limits (`ge=`, `gt=`, ...)."""
    extra = {name: text for name, text in (("unit", unit), ("aka", aka)) if text}
    options: dict[str, Any] = {"json_schema_extra": extra or None, **limits}
    return Field(default, description=doc, **options)


def _whole_number(value: object) -> object:
    """`1e3` and `2_000.0` are whole numbers to a person, not to `int()`."""
    if isinstance(value, str) and any(mark in value for mark in ".eE"):
        try:
            number = float(value)
        except ValueError:
            return value
        if number.is_integer():
            return int(number)
    return value


# Steps and token ids are int32 on the device, so no count in a config can be larger.
Int = Annotated[int, BeforeValidator(_whole_number), Field(le=2**31 - 1)]
Seed = Annotated[int, BeforeValidator(_whole_number), Field(ge=0, lt=2**32)]


def _usable_path(path: str) -> str:
    if "\0" in path:
        raise ValueError("no path can hold a NUL")
    try:
        Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError("there is no such user, or no home directory") from error
    return path


# As written: `~` is expanded where the path is used, so that a run's config.yml serves another user too.
LocalPath = Annotated[str, AfterValidator(_usable_path)]


def is_null(value: object) -> bool:
    """Whether a value as written means null."""
    return value is None or (isinstance(value, str) and value.strip().lower() in ("null", "none", "~", ""))


def accepts_none(annotation: object) -> bool:
    """Whether a key may be null."""
    return type(None) in typing.get_args(annotation)


def holds_list(annotation: object) -> bool:
    """Whether a key holds a list."""
    return typing.get_origin(annotation) is list


def type_name(annotation: object) -> str:
    """The type of a key in words: `whole number`, `adamw | lion`, `text or null`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else type_name(arg) for arg in args)
    if origin is typing.Literal:
        return " | ".join(str(arg) for arg in args)
    if origin is Annotated:
        return type_name(args[0])
    if origin is list:
        return f"list of {type_name(args[0])}"
    if origin is tuple:
        return f"[{', '.join(type_name(arg) for arg in args)}]"
    names: dict[object, str] = {bool: "true | false", int: "whole number", float: "number", str: "text"}
    return names[annotation]


class Section(BaseModel):
    """A frozen group of config keys that one part of maxlite takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
