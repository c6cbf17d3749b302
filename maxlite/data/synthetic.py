"""Random ids in place of text, for speed tests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from maxlite.config import DataConfig
from maxlite.data.batches import Dataset, batch_sequence
from maxlite.data.windows import Batch


class SyntheticDataset(Dataset):
    """Row r of batch N is drawn from (seed, N, r) alone: one document of uniform ids. Nothing is held out."""

    tokenizer = None
    num_eval_batches = 0
    steps_per_epoch = math.inf

    def __init__(self, config: DataConfig, *, vocab_size: int, global_batch_size: int, rows: slice) -> None:
        super().__init__()
        self._length = config.max_target_length
        self._key = np.array([config.data_shuffle_seed, 0], np.uint64)
        self._vocab_size = vocab_size
        self._global_batch_size = global_batch_size
        self._rows = range(global_batch_size)[rows]
        identity = ("synthetic", 1, self._length, config.data_shuffle_seed, vocab_size, global_batch_size)
        self.fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]

    @cached_property
    def _sequence(self) -> Any:
        return batch_sequence(self._batch)

    def _batch(self, index: int) -> Batch:
        rows, length = len(self._rows), self._length
        tokens = np.empty((rows, length + 1), np.int32)
        for row, global_row in enumerate(self._rows):
            # A counter-based generator starts anywhere at no cost.
            counter = np.array([0, 0, index, global_row], np.uint64)
            bits = np.random.Philox(key=self._key, counter=counter)
            tokens[row] = np.random.Generator(bits).integers(self._vocab_size, size=length + 1, dtype=np.int32)
        ones = np.ones((rows, length), np.int32)
        return {
            "inputs": tokens[:, :-1].copy(),
            "inputs_position": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
            "inputs_segmentation": ones,
            "targets": tokens[:, 1:].copy(),
            "targets_segmentation": ones.copy(),
        }

    def eval_batches(self, limit: int = -1) -> Iterator[Batch]:
        return iter(())

    def describe(self) -> str:
        return (
            f"data: synthetic, uniform ids below {self._vocab_size:,}, "
            f"{self._global_batch_size} sequences of {self._length} tokens a step; nothing held out"
        )
