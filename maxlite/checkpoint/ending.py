"""How a run ends: its last state is committed, on every process alike, or it is said why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from etils import epath

from maxlite.checkpoint import layout
from maxlite.checkpoint.background import Job
from maxlite.checkpoint.errors import PeerError, RestoreError, SaveError, in_words
from maxlite.checkpoint.inflight import InFlight
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.policy import NONE, worth_another_save
from maxlite.checkpoint.reading import check_step
from maxlite.checkpoint.saving import Saver
from maxlite.config import CheckpointConfig

FINAL_ATTEMPTS = 2


class Ending:
    """The last saves. All processes call each at the same step, and agree beside the training on what to do next."""

    def __init__(
        self,
        directory: epath.Path,
        config: CheckpointConfig,
        peers: Peers,
        saver: Saver,
        saves: InFlight,
        *,
        report: Callable[[str], None],
        record: Callable[..., None],
    ) -> None:
        self._directory = directory
        self._config = config
        self._peers = peers
        self._saver = saver
        self._saves = saves
        self._stats = saves.stats
        self._clock = saves.stats.clock
        self._report = report
        self._record = record
        self._agreements = 0

    def save_final(self, step: int, state: Any, metrics: Mapping[str, float]) -> None:
        """See `Checkpointer.save_final`."""
        began = self._clock()
        problem = ""
        try:
            self._saves.wait()
            committed = self._all_have(step)
            for left in reversed(range(FINAL_ATTEMPTS)):
                if not committed:
                    self._saves.start(step, state, metrics)
                    self._saves.wait(then="trying again at once" if left else "")
                    committed = self._all_have(step)
                problem = self._verify(step, state) if committed else self._why_not()
                if not problem:
                    self._saver.delete_old()  # what it replaces, now that it is known to be good
                    self._saves.wait_for_deletions()
                    return
                committed = False
        finally:
            self._record("final_save", step=step, seconds=self._clock() - began)
        raise SaveError(f"the final state, step {step}, is not saved in {self._directory}: {problem}")

    def save_preempted(self, step: int, state: Any, grace_seconds: float, metrics: Mapping[str, float]) -> int:
        """See `Checkpointer.save_preempted`."""
        # A save that one process has seen to end may still be pending in another: what all do goes by all answers.
        pending = self._saves.pending
        last, writing = self._stats.last_committed_step, NONE if pending is None else pending.step
        answers = self._agree([last, writing, grace_seconds], grace_seconds)
        if all(answer[0] == step for answer in answers):
            return step
        writing, deadline = max(answer[1] for answer in answers), self._clock() + min(answer[2] for answer in answers)
        safe: int | None = None
        if writing != NONE:
            self._saves.wait(deadline - self._clock(), then="")
            safe = writing if self._all_have(writing, deadline) else None
        if self._saves_another(step, safe, deadline):
            self._saves.start(step, state, metrics)
            self._saves.wait(deadline - self._clock(), then="")
            safe = step if self._all_have(step, deadline) else safe
        if safe is None:
            why = f"{self._why_not()}; {self._stats.where_it_stands()}"
            raise SaveError(f"step {step} is not saved within preemption_grace_seconds: {why}")
        return safe

    def _saves_another(self, step: int, safe: int | None, deadline: float) -> bool:
        """Whether all save `step` too, when `safe` is committed on all of them."""
        left, work = deadline - self._clock(), self._clock() - self._stats.safe_since
        worth = safe is None or worth_another_save(left, save_seconds=self._stats.usual_seconds, work_seconds=work)
        return safe != step and all(self._agree(left > 0 and worth, max(left, 1.0)))

    def _verify(self, step: int, state: Any) -> str:
        """What is wrong with a committed step, which then is one no more; empty if it holds what was saved."""
        path = layout.step_path(self._directory, step)
        check = partial(check_step, path, self._report, abstract_state=state, config=self._config, peers=self._peers)
        reading, longest = Job("checkpoint-verify", check), self._config.checkpoint_timeout_seconds
        try:
            if not reading.wait(longest):
                raise RestoreError(f"not read back within {longest:g} s")
            problem = reading.result()
            if problem:
                self._stats.last_committed_step = None
                self._report(f"checkpoint {path} is damaged: {problem}")
                self._record("checkpoint_damaged", step=step, why=problem)
                if moved := self._saver.set_aside(step):
                    self._report(moved)
        except (RestoreError, OSError) as error:  # nothing says that the step is bad: it stays
            raise SaveError(
                f"the final state, step {step}, is committed but not verified: {in_words(error)}"
            ) from error
        if not problem:
            self._saver.verified(step)
        return problem

    def _agree(self, answer: Any, timeout_seconds: float) -> list[Any]:
        """Every process's answer, anything JSON can hold; for the end of a run, when no train step carries it.

        Raises SaveError if one does not answer in time.
        """
        self._agreements += 1
        try:
            topic, text = f"agree/{self._agreements}", json.dumps(answer)
            return [json.loads(text) for text in self._peers.exchange(topic, text, timeout_seconds=timeout_seconds)]
        except PeerError as error:
            raise SaveError(f"{error}; {self._stats.where_it_stands()}") from error

    def _all_have(self, step: int, deadline: float | None = None) -> bool:
        """Whether every process knows the step to be committed."""
        left = self._config.checkpoint_timeout_seconds if deadline is None else deadline - self._clock() + 1.0
        return all(last == step for last in self._agree(self._stats.last_committed_step, left))

    def _why_not(self) -> str:
        """Why a step that this process has saved is not committed on all."""
        return self._stats.last_failure or "another process does not know it to be committed"
