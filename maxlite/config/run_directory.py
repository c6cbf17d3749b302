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
            self._lock = self._take(key)
        except OSError as error:
            raise InputError(f"{key}: {self.path} cannot be used: {error.strerror}") from error
        return self

    def _take(self, key: str) -> int:
        """The lock. Raises InputError, which begins with `key`, if another process has it, and OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # The kernel drops the lock with the process, so a killed run leaves nothing to clean up.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 32, 0).decode() or "unknown"
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise InputError(
                f"{key}: process {holder} is training in {self.path}; wait for it, or choose another run_name"
            ) from None
        with suppress(OSError):  # who holds the lock is a courtesy; on a full disk it stays unsaid
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        return lock

    def check(self) -> list[str]:
        """Takes the directory again if it was removed while the run trains there; what happened, in words.

        Otherwise the next start would not know of this run. Storage that fails is said and never ends training.
        Raises InputError if another process has the directory by now.
        """
        if not self._primary:
            return []
        try:
            if (self.path / LOCK_NAME).stat().st_ino == os.fstat(self._lock).st_ino:
                return []
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # storage that does not answer says nothing
            return []
        removed = f"run directory {self.path} was removed"
        try:
            lock = self._take(f"{removed} while this run trained there")
            os.close(self._lock)
            self._lock = lock
            self._write_config()
        except OSError as error:
            return [f"{removed}, and cannot be made again: {error.strerror}"]
        return [
            f"{removed} and is made again; its metrics and events until now are lost, and "
            "none are added before a restart"
        ]

    def __exit__(self, *exc: object) -> None:
        if self._primary:
            os.close(self._lock)

    def begin(self, step: int, resumed: bool) -> list[str]:
        """Writes `config.yml`; in words: where the run is, and from which step it goes on. For the primary alone.

        `resumed`: from its own checkpoint.
        """
        last = self._config.run.steps
        where = f"run directory: {self.path}"
        begins = f"resuming from step {step}" if resumed else f"starting at step {step}"
        if step >= last:
            begins += f": nothing left of steps={last}"
        elif step > 0:
            begins += f" of {last}"
        try:
            self._write_config()
        except OSError as error:
            raise InputError(f"{self.path / CONFIG_NAME} cannot be written: {error.strerror}") from error
        return [where, begins]

    def _write_config(self) -> None:
        temporary = self.path / f".{CONFIG_NAME}.tmp"
        try:
            temporary.write_text(config_yaml(self._config), encoding="utf-8")
            temporary.replace(self.path / CONFIG_NAME)  # whole or not at all
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
