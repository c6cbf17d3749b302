"""Merges the sources of a config, converts each value by its key's type, and says all that is wrong at once.

Later wins: defaults < `base_config:` chain < `model_name:` preset < the YAML file < `M_KEY` < `key=value`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from maxlite.config import messages
from maxlite.config.errors import InputError
from maxlite.config.fields import Section, accepts_none, holds_list, is_null
from maxlite.config.read import Setting, Settings, parse_flow, read_arguments, read_environment, read_yaml, shorten
from maxlite.config.sections import (
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TelemetryConfig,
)


class Config(BaseModel):
    """The whole config: one section per part, their keys disjoint, so that YAML is flat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    telemetry: TelemetryConfig
    compile: CompileConfig

    def flat(self) -> dict[str, object]:
        """Every key with its value, in the order of the sections."""
        return {key: value for section in self.model_dump().values() for key, value in section.items()}


ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class Resolved(Generic[ConfigT]):
    """A valid config, and where each key's value came from (`default` where nothing set it)."""

    config: ConfigT
    origins: Mapping[str, str]


def sections_of(kind: type[Config]) -> dict[str, type[Section]]:
    """The sections of a config class, by name."""
    return {name: field.annotation for name, field in kind.model_fields.items()}  # type: ignore[misc]


def keys_of(kind: type[Config]) -> dict[str, FieldInfo]:
    """Every key of a config class."""
    return {key: field for section in sections_of(kind).values() for key, field in section.model_fields.items()}


def _by_its_name(kind: type[Config], settings: Settings) -> Settings:
    """The settings of one source, with the other name that a key may go by replaced by its own."""
    names = {}
    for key, field in keys_of(kind).items():
        if isinstance(field.json_schema_extra, dict) and "aka" in field.json_schema_extra:
            names[field.json_schema_extra["aka"]] = key
    return {names.get(key, key): setting for key, setting in settings.items()}


def presets_directory() -> Path:
    """Where `model_name:` presets are: beside the package in a clone, inside it when installed from a wheel."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return (inside if inside.is_dir() else package.parent / "configs") / "models"


def resolve(
    kind: type[ConfigT],
    config_file: str | None,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Resolved[ConfigT]:
    """Reads every source of a config of class `kind`.

    Raises:
        InputError: with one line per problem found in any source.
    """
    problems: list[str] = []
    named = partial(_by_its_name, kind)
    nearest = {**named(read_environment(environ)), **named(read_arguments(arguments, problems))}
    if "base_config" in nearest:
        problems.append(f"{nearest['base_config'].origin}: base_config: only a YAML file can name its base")
    own, *bases = map(named, _read_chain(config_file, problems))
    merged: Settings = {}
    for settings in reversed(bases):
        merged |= settings
    preset = _read_preset({**merged, **own, **nearest}.get("model_name"), problems)
    merged |= preset | own | nearest
    if config_file and "run_name" not in merged:
        merged["run_name"] = Setting(Path(config_file).stem, "name of the config file")
    if "base_config" in merged:  # its keys are in `merged` now; the resolved config must not read it again
        merged["base_config"] = Setting("null", f"{merged['base_config'].origin}, merged")

    problems += _unknown_keys(merged, keys_of(kind))
    parsed = {name: _parse(section, merged, problems) for name, section in sections_of(kind).items()}
    if problems:
        raise InputError(*problems)
    origins = {key: merged[key].origin if key in merged else "default" for key in keys_of(kind)}
    return Resolved(kind.model_validate(parsed), origins)


def _read_chain(config_file: str | None, problems: list[str]) -> list[Settings]:
    """The YAML file, the file its `base_config` names, and so on; one empty map where there is no file."""
    if config_file is None:
        return [{}]
    chain: list[Settings] = []
    seen: list[str] = []
    path, asked_by = Path(config_file), ""
    while True:
        if os.path.abspath(path) in seen:  # noqa: PTH100 (Path.resolve raises on a NUL or a loop of links)
            problems.append(f"{path}: base_config goes round in a circle{asked_by}")
            return chain
        seen.append(os.path.abspath(path))  # noqa: PTH100
        chain.append(read_yaml(path, problems, asked_by))
        base = chain[-1].get("base_config")
        if base is None or is_null(base.value):
            return chain
        if not isinstance(base.value, str):
            problems.append(f"{base.origin}: base_config={messages.show(base.value)}: expected the name of one file")
            return chain
        asked_by = f" (base_config, {base.origin})"
        path = path.parent / base.value


def _read_preset(model_name: Setting | None, problems: list[str]) -> Settings:
    if model_name is None or is_null(model_name.value) or not isinstance(model_name.value, str):
        return {}
    known = sorted(path.stem for path in presets_directory().glob("*.yml"))
    if model_name.value not in known:
        near = difflib.get_close_matches(model_name.value, known, n=3, cutoff=0.3) or known
        shown = shorten(model_name.value)
        problems.append(f"{model_name.origin}: model_name={shown}: no such preset; there is {', '.join(near)}")
        return {}
    return read_yaml(presets_directory() / f"{model_name.value}.yml", problems)


def _nearest_keys(key: str, known: Iterable[str]) -> list[str]:
    """Keys that a person may have meant: spelled alike, holding the word, or with these initials (`lr`)."""
    initials = [name for name in known if "".join(word[0] for word in name.split("_")) == key]
    holding = [name for name in known if len(key) > 3 and key in name]
    return list(dict.fromkeys(difflib.get_close_matches(key, known, n=3) + initials + holding))[:3]


def _unknown_keys(merged: Settings, known: Mapping[str, FieldInfo]) -> list[str]:
    problems = []
    for key, setting in merged.items():
        if key not in known:
            near = _nearest_keys(key, known)
            hint = f"did you mean {' or '.join(near)}?" if near else "--help lists every key"
            problems.append(f"{setting.origin}: {shorten(key)}: no such key; {hint}")
    return problems


def _parse(section: type[Section], merged: Settings, problems: list[str]) -> Section | None:
    """The section, or None with what is wrong added to `problems`."""
    values = _values_of(section, merged, problems)
    try:
        return section.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems += [messages.of_key(detail, merged, section) for detail in details]
    bad = {detail["loc"][0] for detail in details if detail["loc"]}
    if bad:  # pydantic checks combinations only once every key is right; say those of the right keys now too
        try:
            section.model_validate({key: value for key, value in values.items() if key not in bad})
        except ValidationError as error:
            found = [messages.of_key(detail, merged, section) for detail in error.errors(include_url=False)]
            problems += [line for line in found if not any(key in line for key in map(str, bad))]
    return None


def _values_of(section: type[Section], merged: Settings, problems: list[str]) -> dict[str, object]:
    """The given values of a section, null and one-line lists understood; the rest is pydantic's to convert."""
    values: dict[str, object] = {}
    for key, field in section.model_fields.items():
        if key not in merged:
            continue
        value, origin = merged[key].value, merged[key].origin
        if isinstance(value, str):
            text = value.strip()
            if accepts_none(field.annotation) and is_null(text):
                value = None
            elif text in ("~", "null") and field.annotation is str:
                value = ""
            elif holds_list(field.annotation):
                listed = bool(re.match(r"\[.*\]$", text, re.DOTALL))
                value = parse_flow(text, f"{origin}: {key}", problems) if listed else [] if is_null(text) else [value]
                if value is None:
                    continue
        values[key] = value
    return values
