"""The processes of a run, as far as saving needs them: short texts exchanged beside the training.

Texts go through the key-value store of jax's coordination service, so this works while the devices train, from a
background thread. (What every process must decide at the same step goes through the train step instead.)
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from maxlite.checkpoint.errors import PeerError

OUTCOME_SECONDS = 5.0  # for the primary's word, after all texts must be there
_ROOT, _TEXTS, _OUTCOME = "maxlite", "texts", "outcome"
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

        The primary process gathers the texts and tells the outcome, so that all have the same one, and each of many
        processes reads one answer and not all of the others: every text, or the first error, or who did not answer
        in time. Raises PeerError for both, and if the primary did not answer or `abandoned` was set meanwhile.
        """
        if self.count == 1:
            if error:
                raise PeerError(error)
            return [text]
        said = self._said.setdefault(topic.split("/", 1)[0], [])
        spent = len(said)
        self._say(said, f"{topic}/{_TEXTS}/{self.index}", _FAILED + error if error else f" {text}")
        deadline = time.monotonic() + timeout_seconds
        outcome: dict[str, Any] = {}
        if self.primary:
            outcome = self._gather(topic, deadline, timeout_seconds, abandoned)
            self._say(said, f"{topic}/{_OUTCOME}/0", json.dumps(outcome))
        if error:
            raise PeerError(error)  # the others hear of it when the primary comes; this one need not wait for that
        if not self.primary:
            outcome = self._await_outcome(topic, deadline + OUTCOME_SECONDS, timeout_seconds, abandoned)
        if "texts" not in outcome:
            raise PeerError(outcome["error"])
        for key in said[:spent]:  # everybody is here, so nobody reads the exchanges before any more
            self._store.key_value_delete(key)
        del said[:spent]
        return outcome["texts"]

    def _say(self, said: list[str], key: str, text: str) -> None:
        said.append(f"{_ROOT}/{key}")
        self._store.key_value_set(said[-1], text)

    def _gather(
        self, topic: str, deadline: float, timeout_seconds: float, abandoned: threading.Event | None
    ) -> dict[str, Any]:
        """The outcome of an exchange: {"texts": all} or {"error": in words}."""
        given: dict[int, str] = {}
        for _ in _until(deadline, abandoned):
            found = self._store.key_value_dir_get(f"{_ROOT}/{topic}/{_TEXTS}/")
            given = {int(key.rsplit("/", 1)[1]): text for key, text in found}
            for index, text in sorted(given.items()):
                if text.startswith(_FAILED):
                    return {"error": f"process {index}: {text[1:]}"}
            if len(given) == self.count:
                return {"texts": [given[index][1:] for index in range(self.count)]}
        if abandoned is not None and abandoned.is_set():
            return {"error": "given up"}
        missing = ", ".join(str(index) for index in range(self.count) if index not in given)
        return {"error": f"process {missing} did not answer within {timeout_seconds:g} s"}

    def _await_outcome(
        self, topic: str, deadline: float, timeout_seconds: float, abandoned: threading.Event | None
    ) -> dict[str, Any]:
        for _ in _until(deadline, abandoned):
            if given := self._store.key_value_dir_get(f"{_ROOT}/{topic}/{_OUTCOME}/"):
                return json.loads(given[0][1])
        if abandoned is not None and abandoned.is_set():
            return {"error": "given up"}
        return {"error": f"process 0 did not answer within {timeout_seconds:g} s"}


def _until(deadline: float, abandoned: threading.Event | None) -> Iterator[None]:
    """One look at the store after the other, ever less often; at least one."""
    pause = 0.002
    while True:
        yield
        if time.monotonic() > deadline or (abandoned is not None and abandoned.is_set()):
            return
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
