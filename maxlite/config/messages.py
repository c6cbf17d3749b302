"""Turns pydantic's findings into one line each: where, which key, what is wrong, what would do."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from typing import Any

from maxlite.config.fields import Section, type_name
from maxlite.config.read import Setting, shorten

LIMITS = {
    "greater_than_equal": ("ge", "must be at least"),
    "greater_than": ("gt", "must be more than"),
    "less_than_equal": ("le", "must be at most"),
    "less_than": ("lt", "must be less than"),
    "multiple_of": ("multiple_of", "must be a multiple of"),
}


def show(value: object) -> str:
    """A value as a person would write it, short."""
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "a map"
    if value is None or (isinstance(value, str) and not value.strip()):
        return "nothing"
    return shorten(str(value))


def of_key(detail: Mapping[str, Any], merged: Mapping[str, Setting], section: type[Section]) -> str:
    """One pydantic error detail as one line."""
    if not detail["loc"]:
        return _of_combination(str(detail["ctx"]["error"]), merged, section)
    key = str(detail["loc"][0])
    annotation = section.model_fields[key].annotation
    origin = merged[key].origin if key in merged else "default"
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in LIMITS:
        name, words = LIMITS[kind]
        what = f"{words} {context[name]:,}" if isinstance(context[name], int) else f"{words} {context[name]:g}"
    elif kind == "string_too_short":
        what = "needs a value"
    elif kind == "too_short":
        what = "needs at least one value"
    elif kind == "value_error":
        what = str(context["error"])
    elif kind == "finite_number":
        what = "must be finite"
    elif kind == "literal_error":
        choices = [str(choice) for choice in _choices(annotation)]
        near = difflib.get_close_matches(str(detail["input"]), choices, n=1)
        what = f"expected {' | '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
    else:
        what = f"expected {type_name(annotation)}"
    return f"{origin}: {key}={show(detail['input'])}: {what}"


def _choices(annotation: object) -> tuple[Any, ...]:
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return args
    return next((_choices(arg) for arg in args if _choices(arg)), ())


def _of_combination(message: str, merged: Mapping[str, Setting], section: type[Section]) -> str:
    """A check over several keys names them in its message; say where those that were given come from."""
    named = [key for key in section.model_fields if re.search(rf"\b{key}\b", message)]
    origins = dict.fromkeys(merged[key].origin for key in named if key in merged)
    return f"{', '.join(origins) or 'default'}: {message}"
