"""TensorBoard files, through the optional tensorboardX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from maxlite.config import InputError


class TensorBoard:
    """Writes every number of a record as a scalar of the same name."""

    def __init__(self, directory: Path) -> None:
        """Opens the event file.

        Raises:
            InputError: tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise InputError(
                "enable_tensorboard=true needs tensorboardX: pip install 'maxlite[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(directory))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes a record of `metrics.jsonl` at its step."""
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, record["step"])
