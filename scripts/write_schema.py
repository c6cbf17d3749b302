"""Writes configs/maxlite.schema.json, from which editors complete and check config keys."""

import json
from pathlib import Path

from maxlite.config import Config
from maxlite.config.show import json_schema

if __name__ == "__main__":
    target = Path(__file__).parents[1] / "configs" / "maxlite.schema.json"
    target.write_text(json.dumps(json_schema(Config), indent=2) + "\n", encoding="utf-8")
