"""Batch N as a function of N, and an iterator that makes the next ones in the background."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from maxlite.data.tokenizer import Tokenizer
from maxlite.data.windows import Batch

# Two threads hide a page fault of one behind the other; eight batches ride over a pause of the machine.
_THREADS = 2
_BATCHES_AHEAD = 8


def window_order(windows: int, *, seed: int | None) -> Any:
    """Grain MapDataset: index of the window at each place of an endless sequence of epochs.

    Each epoch holds each of the windows once: in order if seed is None, else shuffled anew.
    """
    import grain  # imports jax, which must not happen before the config is known to be good

    order = grain.MapDataset.range(windows)
    if seed is not None:
        order = order.seed(seed).shuffle()
    return order.repeat()


def batch_sequence(make: Callable[[int], Batch]) -> Any:
    """Grain MapDataset without end: element N-1, which is batch N, is make(N-1)."""
    import grain

    return grain.MapDataset.range(2**62).map(make)


class TrainBatches(Iterator[Batch]):
    """Batches start_step+1, start_step+2, ... without end, made ahead of time in threads that `close` ends."""

    def __init__(self, sequence: Any, start_step: int) -> None:
        import grain

        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_BATCHES_AHEAD)
        self._batches = iter(sequence[start_step:].to_iter_dataset(options))

    def __next__(self) -> Batch:
        return next(self._batches)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. Calling it again does nothing."""
        self._batches.close()


class Dataset(ABC):
    """Train batches by step, held-out batches in order. A context manager.

    Steps count from 1: update N uses batch N, and step 0 is the initial state. Batch N is a pure function of the
    data config, the global batch size and N; a process that asks for some rows of it gets the same rows whatever
    the other processes do.

    A batch maps inputs, inputs_position, inputs_segmentation, targets and targets_segmentation to int32 arrays
    [rows, max_target_length]; see maxlite.data.windows.
    """

    tokenizer: Tokenizer | None  # None: the ids are not text
    fingerprint: str  # the same for two data sets whose train batches are the same, one by one
    num_eval_batches: int  # 0: nothing is held out
    steps_per_epoch: float  # updates that use each training sequence once; inf: sequences never repeat

    def __init__(self) -> None:
        self._open: WeakSet[TrainBatches] = WeakSet()

    @property
    @abstractmethod
    def _sequence(self) -> Any:
        """Grain MapDataset whose element N-1 is batch N."""

    def train_batch(self, step: int) -> Batch:
        """The batch of update `step`, from 1. Takes the same time for any step."""
        if step < 1:
            raise ValueError(f"step {step}: the first update is step 1")
        return self._sequence[step - 1]

    def train_batches(self, start_step: int) -> TrainBatches:
        """Batches of the updates after `start_step`, the step of the state that training goes on from: the first
        one is train_batch(start_step + 1). To be used as a context manager, which ends its threads.
        """
        if start_step < 0:
            raise ValueError(f"start_step {start_step}: the initial state is step 0")
        batches = TrainBatches(self._sequence, start_step)
        self._open.add(batches)
        return batches

    @abstractmethod
    def eval_batches(self, limit: int = -1) -> Iterator[Batch]:
        """The first `limit` batches of the held-out documents, -1 for all, each of the full shape.

        All of them hold every held-out token as a target once, but for each document's first.
        """

    @abstractmethod
    def describe(self) -> str:
        """A few lines for people: documents, tokens, sequences, steps per epoch, where the cache is."""

    def close(self) -> None:
        """End the threads of every iterator that is still open. Calling it again does nothing."""
        for batches in list(self._open):
            batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
