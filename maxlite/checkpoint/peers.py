"""The processes of a run, as far as saving needs them: short texts exchanged beside the training.

Texts go through the key-value store of jax's coordination service, so this works while the devices train, from a
background thread. (What every process must decide at the same step goes through the train step instead.)
"""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

from maxlite.checkpoint.errors import PeerError

_FAILED = "!"  # the first letter of a text that says what went wrong


class Peers:
    """This process among those of the run. `store` is the coordination service's client; None: alone."""

    def __init__(self, index: int = 0, count: int = 1, store: Any = None) -> None:
        self.index = index
        self.count = count
        self._store = store
        self._said: dict[str, list[str]] = {}  # this process's keys that are still in the store, by stream

    @classmethod
    def of_this_run(cls) -> Peers:
        """The processes of `jax.distributed`, if that was set up."""
        # Not public; Orbax and MaxText use it too, as jax has no other exchange that leaves the devices alone.
        from jax._src.distributed import global_state

        return cls(jax.process_index(), jax.process_count(), global_state.client)

    @property
    def primary(self) -> bool:
        """Whether this is the process that does what is done once."""
        return self.index == 0

    def exchange(
        self,
        topic: str,
        text: str = "",
        *,
        error: str = "",
        timeout_seconds: float,
        abandoned: threading.Event | None = None,
    ) -> list[str]:
        """Gives `text` to every process and returns every process's, by index. Called once per topic by each.

        The first part of the topic names a stream: a process takes part in the exchanges of one stream in the same
        order as the others, and one after the other; those of two streams may run side by side.

        Either every process gets all texts, or none does: a process with an `error` makes it raise everywhere, at
        once. Raises PeerError, also if a process did not answer in time or `abandoned` was set meanwhile.
        """
        if self.count == 1:
            if error:
                raise PeerError(error)
            return [text]
        key = f"maxlite/{topic}/{self.index}"
        said = self._said.setdefault(topic.split("/", 1)[0], [])
        self._store.key_value_set(key, _FAILED + error if error else f" {text}")
        said.append(key)
        deadline, pause = time.monotonic() + timeout_seconds, 0.002
        while True:
            given = {
                int(name.rsplit("/", 1)[1]): what for name, what in self._store.key_value_dir_get(f"maxlite/{topic}/")
            }
            for index, what in sorted(given.items()):
                if what.startswith(_FAILED):
                    raise PeerError(error if index == self.index else f"process {index}: {what[1:]}")
            if len(given) == self.count:
                while len(said) > 1:  # everybody is here, so nobody reads the exchanges before any more
                    self._store.key_value_delete(said.pop(0))
                return [given[index][1:] for index in range(self.count)]
            if abandoned is not None and abandoned.is_set():
                raise PeerError("given up")
            if time.monotonic() > deadline:
                missing = ", ".join(str(index) for index in range(self.count) if index not in given)
                raise PeerError(f"process {missing} did not answer within {timeout_seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
