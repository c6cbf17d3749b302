"""`python -m maxlite.checkpoint show`."""

from __future__ import annotations

import argparse
import base64
import json
import math
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (numpy knows bfloat16 from it)
import numpy as np
from etils import epath

from maxlite.checkpoint import layout
from maxlite.checkpoint.cli_text import duration, json_number, moment, table
from maxlite.checkpoint.errors import Damage
from maxlite.checkpoint.inventory import Entry, State, find_step, inspect
from maxlite.checkpoint.stats import in_bytes
from maxlite.config import Config, InputError
from maxlite.config.resolve import sections_of

PARAMETERS = "params/"
SHARDING_FILE = "_sharding"  # of Orbax, in the state's directory


class Array(NamedTuple):
    """One array of a step, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    sharding: str | None  # as saved, in words; None: not known

    @property
    def elements(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


def run(options: argparse.Namespace, clock: Callable[[], float] = time.time) -> int:
    """Prints what the step holds; returns the exit status. Raises InputError, Damage, OSError."""
    path = find_step(options.path)
    state = State.COMMITTED if layout.is_committed(path) else State.TORN
    entry = inspect(int(path.name), path, State.COMMITTED)
    if entry is None:
        raise InputError(f"{path} was deleted just now")
    if entry.metadata is None:
        raise Damage(f"{path} cannot be shown: {entry.problem}")
    problem = entry.problem if state is State.COMMITTED else "no commit marker"
    mesh, shardings = saved_shardings(path)
    arrays = [
        Array(name, info.shape, info.dtype, _bytes(info.shape, info.dtype), shardings.get(name.replace("/", ".")))
        for name, info in entry.metadata.arrays.items()
    ]
    if options.json:
        print(json.dumps(to_json(entry, problem, mesh, arrays), indent=1))
    else:
        print(*head(entry, problem, mesh, clock()), "", *tree(arrays), "", totals(arrays), sep="\n")
    return 0


def to_json(entry: Entry, problem: str, mesh: str | None, arrays: list[Array]) -> dict[str, Any]:
    """All of `show --json`."""
    assert entry.metadata is not None
    return {
        "step": entry.step,
        "path": str(entry.path),
        "created": entry.created,
        "parent_step": entry.parent_step,
        "verified": not problem,
        "problem": problem or None,
        "metrics": {name: json_number(value) for name, value in entry.metrics.items()},
        "mesh": mesh,
        "run": entry.metadata.run,
        "arrays": [array._asdict() for array in arrays],
        "parameters": _parameters(arrays),
        "bytes": sum(array.bytes for array in arrays),
        "bytes_on_storage": entry.bytes,
    }


def head(entry: Entry, problem: str, mesh: str | None, now: float) -> list[str]:
    """What the step says about itself. `now`: seconds since 1970."""
    assert entry.metadata is not None
    run = dict(entry.metadata.run)
    config, versions = run.pop("config", None), run.pop("versions", None)
    rows = {
        "step": f"{entry.step}",
        "path": str(entry.path),
        "created": f"{moment(entry.created)} ({duration(now - entry.created)} ago)",
        "parent step": "none" if entry.parent_step is None else f"{entry.parent_step}",
        "files": f"DAMAGED: {problem}" if problem else "right (verify reads the arrays too)",
        "metrics": ", ".join(f"{name} {value:.4f}" for name, value in entry.metrics.items()),
        "mesh": mesh or "",
        "versions": _pairs(versions) if isinstance(versions, Mapping) else "",
        **{name.replace("_", " "): _text(value) for name, value in run.items()},
        "config": _pairs(unusual(config), "=") if isinstance(config, Mapping) else "",
    }
    width = max(map(len, rows)) + 2
    indent = " " * width
    return [
        line
        for name, value in rows.items()
        if value
        for line in textwrap.wrap(
            f"{name:<{width}}{value}",
            119,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def unusual(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a saved config that differ from their defaults, or that this version does not know."""
    defaults = {
        key: json.loads(json.dumps(field.get_default(call_default_factory=True), default=str))
        for section in sections_of(Config).values()
        for key, field in section.model_fields.items()
    }
    return {key: value for key, value in config.items() if key not in defaults or defaults[key] != value}


def tree(arrays: list[Array]) -> list[str]:
    """The arrays as an indented tree, every inner node with the bytes below it."""
    below: dict[str, int] = {}
    for array in arrays:
        parts = array.name.split("/")
        for depth in range(1, len(parts)):
            node = "/".join(parts[:depth])
            below[node] = below.get(node, 0) + array.bytes
    rows, seen = [("array", "dtype and shape", "bytes", "sharding as saved")], set[str]()
    for array in arrays:
        *parents, last = array.name.split("/")
        for depth in range(len(parents)):
            node = "/".join(parents[: depth + 1])
            if node not in seen:
                seen.add(node)
                rows.append(("  " * depth + parents[depth], "", in_bytes(below[node]), ""))
        kind = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        rows.append(("  " * len(parents) + last, kind, in_bytes(array.bytes), array.sharding or ""))
    return table(rows, (0, 1, 3))


def totals(arrays: list[Array]) -> str:
    """One line."""
    total = sum(array.bytes for array in arrays)
    return f"{len(arrays)} arrays, {in_bytes(total)}; {_parameters(arrays):,} parameters under {PARAMETERS}"


def saved_shardings(path: epath.Path) -> tuple[str | None, dict[str, str]]:
    """The mesh, and the sharding of every array by its dotted name, in words, as Orbax noted them; empty if not.

    Raises Damage if the note is damaged, OSError if it cannot be read.
    """
    try:
        noted = json.loads((path / layout.STATE / SHARDING_FILE).read_text())
        shardings = {base64.b64decode(name).decode(): json.loads(text) for name, text in noted.items()}
        meshes = [_mesh(each) for each in shardings.values() if each["sharding_type"] == "NamedSharding"]
        words = {name: _sharding(each) for name, each in shardings.items()}
    except FileNotFoundError:
        return None, {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damage(f"{path}: {layout.STATE}/{SHARDING_FILE} is damaged") from error
    return next(iter(meshes), None), words


def _mesh(noted: Mapping[str, Any]) -> str:
    return " x ".join(f"{name} {size}" for name, size in zip(noted["axis_names"], noted["shape"], strict=True))


def _sharding(noted: Mapping[str, Any]) -> str:
    if noted["sharding_type"] == "SingleDeviceSharding":
        return "one device"
    if noted["sharding_type"] != "NamedSharding":
        return str(noted["sharding_type"])
    axes = [
        "-" if axis is None else "+".join(axis) if isinstance(axis, list) else axis for axis in noted["partition_spec"]
    ]
    return f"({', '.join(axes)})" if set(axes) - {"-"} else "replicated"


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _parameters(arrays: list[Array]) -> int:
    return sum(array.elements for array in arrays if array.name.startswith(PARAMETERS))


def _pairs(values: Mapping[str, Any], between: str = " ") -> str:
    return (" " if between == "=" else ", ").join(f"{key}{between}{_text(value)}" for key, value in values.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
