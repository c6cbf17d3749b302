"""The JSON schema in configs/ is the config's, and the shipped configs resolve."""

import json
from pathlib import Path

import pytest

from maxlite.config import Config, resolve
from maxlite.config.resolve import keys_of
from maxlite.config.show import json_schema

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_schema_is_current():
    shipped = json.loads((CONFIGS / "maxlite.schema.json").read_text())
    assert shipped == json_schema(Config), "run: python scripts/write_schema.py"


def test_every_key_is_documented_and_declared_once():
    sections = [field.annotation for field in Config.model_fields.values()]
    names = [key for section in sections for key in section.model_fields]
    assert len(names) == len(set(names))
    for key, field in keys_of(Config).items():
        assert field.description, key


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yml")), ids=lambda path: path.name)
def test_shipped_configs_resolve(path):
    resolve(Config, str(path), (), {})
