"""The run directory: held by one run at a time, with the resolved config of the run in `config.yml`."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from maxlite.config.errors import InputError
from maxlite.config.resolve import Config
from maxlite.config.show import config_yaml

CONFIG_NAME = "config.yml"
LOCK_NAME = ".lock"  # locked while a run trains there


class RunDirectory:
    """Context manager that makes the directory and locks it; `path` is where it is.

    Of several processes of a run only the primary does so; to the others it is just the path.
    """

    def __init__(self, config: Config, primary: bool = True) -> None:
        self._config = config
        self._primary = primary
        self.path = Path(config.run.base_output_directory).expanduser() / config.run.run_name

    def __enter__(self) -> Self:
        """Takes the directory.

        Raises:
            InputError: it cannot be made, or another process is training this run.
        """
        if not self._primary:
            return self
        key = f"base_output_directory={self._config.run.base_output_directory} run_name={self._config.run.run_name}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"{key}: {self.path} cannot be used: {error.strerror}") from error
        try:
            # The kernel drops the lock with the process, so a killed run leaves nothing to clean up.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 32, 0).decode() or "unknown"
            os.close(self._lock)
            if not isinstance(error, BlockingIOError):
                raise InputError(f"{key}: {self.path} cannot be locked: {error.strerror}") from error
            raise InputError(
                f"{key}: process {holder} is training in {self.path}; wait for it, or choose another run_name"
            ) from None
        with suppress(OSError):  # who holds the lock is a courtesy; on a full disk it stays unsaid
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._primary:
            os.close(self._lock)

    def begin(self, step: int) -> list[str]:
        """Writes `config.yml`; in words: where the run is, and from which step it goes on. For the primary alone."""
        last = self._config.run.steps
        where = f"run directory: {self.path}"
        if step == 0:
            begins = "starting at step 0"
        elif step < last:
            begins = f"resuming from step {step} of {last}"
        else:
            begins = f"resuming from step {step}: nothing left of steps={last}"
        temporary = self.path / f".{CONFIG_NAME}.tmp"
        try:
            temporary.write_text(config_yaml(self._config), encoding="utf-8")
            temporary.replace(self.path / CONFIG_NAME)  # whole or not at all
        except OSError as error:
            raise InputError(f"{self.path / CONFIG_NAME} cannot be written: {error.strerror}") from error
        return [where, begins]
