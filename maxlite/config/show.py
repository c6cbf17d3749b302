"""Prints configs: `--help`, `--print_config`, the resolved `config.yml` of a run, and the JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from maxlite.config.fields import type_name
from maxlite.config.resolve import Config, sections_of


def _yaml_value(value: object) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n").strip()
    )


def help_text(kind: type[Config]) -> str:
    """Every key by section: its default, type, doc and unit."""
    lines = []
    for name, section in sections_of(kind).items():
        lines += ["", f"{name}: {(section.__doc__ or '').strip().splitlines()[0]}"]
        for key, field in section.model_fields.items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            unit = f" [{extra['unit']}]" if "unit" in extra else ""
            aka = f"; also {extra['aka']}" if "aka" in extra else ""
            lines.append(f"  {key}={_yaml_value(field.default)}")
            lines.append(f"      {field.description}{unit} ({type_name(field.annotation)}){aka}")
    return "\n".join(lines) + "\n"


def config_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The config as YAML that reads back to the same config, each line with its origin where given."""
    lines = []
    for name in type(config).model_fields:
        lines.append(f"# {name}")
        for key, value in getattr(config, name).model_dump().items():
            line = f"{key}: {_yaml_value(value)}"
            lines.append(f"{line:<56}  # {origins[key]}" if origins else line)
        lines.append("")
    return "\n".join(lines)


def json_schema(kind: type[Config]) -> dict[str, Any]:
    """JSON schema of the flat YAML file, for editors."""
    properties: dict[str, Any] = {}
    for section in sections_of(kind).values():
        for key, schema in section.model_json_schema()["properties"].items():
            schema.pop("title", None)
            properties[key] = schema
            if "aka" in schema:
                properties[schema["aka"]] = schema
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "maxlite config",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
