"""Reads config sources into settings: the text of a value and where it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Setting:
    """A value as written (text, or a list or map of text) and its origin, such as `config.yml:12`."""

    value: object
    origin: str


Settings = dict[str, Setting]


def _yaml_problem(name: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}" if mark else name
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
    return f"{where}: malformed YAML: {what}"


def parse_flow(text: str, origin: str, problems: list[str]) -> object:
    """A list or map written on one line, as in `text_files=[a.txt, b.txt]`; its scalars stay text."""
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        problems.append(f"{origin}: malformed list: {shorten(text)}")
        return None


def read_yaml(path: Path, problems: list[str], asked_by: str = "") -> Settings:
    """The settings of one flat YAML file; what is wrong with it goes to `problems`, a line each."""
    name = shorten(str(path), 200)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        problems.append(f"{name}: no such file{asked_by}")
        return {}
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(f"{name}: cannot be read: {reason}{asked_by}")
        return {}
    loader = yaml.BaseLoader(b"")
    try:
        loader = yaml.BaseLoader(data)
        root = loader.get_single_node()
        return _settings_of(loader, root, name, problems)
    except yaml.YAMLError as error:
        problems.append(_yaml_problem(name, error))
    except UnicodeDecodeError as error:
        problems.append(f"{name}: not a text file: {error.reason} at byte {error.start}")
    except RecursionError:
        problems.append(f"{name}: nested too deeply")
    finally:
        loader.dispose()
    return {}


def _settings_of(loader: yaml.BaseLoader, root: yaml.Node | None, name: str, problems: list[str]) -> Settings:
    if root is None:
        problems.append(f"{name}: is empty; write one `key: value` per line")
        return {}
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        problems.append(f"{name}:{root.start_mark.line + 1}: holds {kind}; write one `key: value` per line")
        return {}
    settings: Settings = {}
    for key_node, value_node in root.value:
        origin = f"{name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{origin}: a key must be a single word")
            continue
        key = key_node.value
        if key in settings:
            first = settings[key].origin.rsplit(":", 1)[1]
            problems.append(f"{origin}: {shorten(key)}: given twice; first on line {first}")
            continue
        settings[key] = Setting(loader.construct_object(value_node, deep=True), origin)
    return settings


def read_environment(environ: Mapping[str, str]) -> Settings:
    """The settings given as `M_KEY` variables."""
    return {
        name[2:].lower(): Setting(value, f"environment {shorten(name)}")
        for name, value in environ.items()
        if name.startswith("M_") and name[2:]
    }


def read_arguments(arguments: Iterable[str], problems: list[str]) -> Settings:
    """The settings given as `key=value`; the last of several wins, as on any command line."""
    settings: Settings = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            problems.append(f"command line: {shorten(argument)}: expected key=value")
        elif key.startswith("-"):
            problems.append(f"command line: {shorten(argument)}: write {shorten(argument.lstrip('-'))}, no dashes")
        else:
            settings[key] = Setting(value, "command line")
    return settings


def shorten(text: str, limit: int = 60) -> str:
    """Printable and short, whatever was typed, so that a message stays a line."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: 4 * limit])
    return text if len(text) <= limit else text[: limit - 3] + "..."
