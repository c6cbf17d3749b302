"""What a config section is made of: the base class, the one-line field, and the lax number types.

Every value arrives as text, from YAML, the environment and the command line alike, and is converted by
the type of its key. So `run_name: 123` is a string, `steps: 1e3` a whole number, and `remat_policy: none`
a choice, without one rule per source.
"""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NULL_WORDS = frozenset({"null", "none", "~", ""})


def key(default: Any, doc: str, unit: str = "", **limits: Any) -> Any:
    """One config key: its default, its doc, the unit of its value, and pydantic's limits (`ge=`, `gt=`, ...)."""
    options: dict[str, Any] = {"json_schema_extra": {"unit": unit} if unit else None, **limits}
    return Field(default, description=doc, **options)


def _whole_number(value: object) -> object:
    """`1e3` and `2_000.0` are whole numbers to a person, not to `int()`."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        if number.is_integer() and not value.strip().lstrip("+-").replace("_", "").isdecimal():
            return int(number)
    return value


Int = Annotated[int, BeforeValidator(_whole_number)]
Float = float


def accepts_none(annotation: object) -> bool:
    """Whether a key may be null."""
    return type(None) in typing.get_args(annotation)


def is_list(annotation: object) -> bool:
    """Whether a key holds a list."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(is_list(arg) for arg in typing.get_args(annotation))
    return typing.get_origin(annotation) in (list, tuple)


class Section(BaseModel):
    """A frozen group of config keys that one part of maxlite takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
