"""The data set of a config: `open_dataset`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from maxlite.config import DataConfig, InputError
from maxlite.data.batches import Dataset, batch_sequence, window_order
from maxlite.data.cache import TokenCache, open_cache
from maxlite.data.synthetic import SyntheticDataset
from maxlite.data.tokenizer import Tokenizer, load_tokenizer
from maxlite.data.windows import PADDING, Batch, cut_windows

_ALL = slice(None)


def open_dataset(
    config: DataConfig,
    *,
    vocab_size: int,
    global_batch_size: int,
    eval_batch_size: int,
    rows: slice = _ALL,
    eval_rows: slice = _ALL,
) -> Dataset:
    """The data set of a config, its text tokenised if it is not yet.

    vocab_size: the model's, in ids. global_batch_size, eval_batch_size: sequences in one update's, one evaluation
    batch, over all processes. rows, eval_rows: the rows of them that this process gets.

    Raises InputError for text, a tokenizer or a cache directory that cannot be used, and for settings that do not
    fit them.
    """
    for size in (global_batch_size, eval_batch_size):
        if size < 1:
            raise ValueError(f"a batch of {size} sequences")
    if config.dataset_type == "synthetic":
        return SyntheticDataset(config, vocab_size=vocab_size, global_batch_size=global_batch_size, rows=rows)
    tokenizer = load_tokenizer(config)
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"vocab_size={vocab_size}: the tokenizer has {tokenizer.vocab_size} ids; "
            f"set vocab_size={tokenizer.vocab_size} or more, or choose another tokenizer_path"
        )
    return TextDataset(
        config, tokenizer, open_cache(config, tokenizer), global_batch_size, eval_batch_size, rows, eval_rows
    )


class TextDataset(Dataset):
    """Sequences of tokenised documents, in an order that the seed and the epoch decide."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        cache: TokenCache,
        global_batch_size: int,
        eval_batch_size: int,
        rows: slice,
        eval_rows: slice,
    ) -> None:
        """Raises InputError where the train documents are shorter than one sequence."""
        super().__init__()
        self.tokenizer = tokenizer
        self._tokenizer_ids = tokenizer.vocab_size
        self._cache = cache
        self._length = config.max_target_length
        self._global_batch_size = global_batch_size
        self._rows = range(global_batch_size)[rows]
        self._eval_rows = eval_rows
        self._windows = cache.train.full_windows(self._length)
        if not self._windows:
            tokens = len(cache.train.tokens)
            raise InputError(
                f"max_target_length={self._length}: text_files hold {tokens} tokens to train on, "
                f"less than one sequence and its last target; "
                + (
                    f"give more text, or set max_target_length={tokens - 1} or less"
                    if tokens > 1
                    else "give more text"
                )
            )
        self._order = window_order(
            self._windows, seed=config.data_shuffle_seed if config.enable_data_shuffling else None
        )
        self.steps_per_epoch = self._windows / global_batch_size
        self._eval_order = _eval_order(cache.held_out.evaluation_windows(self._length), eval_batch_size)
        self.num_eval_batches = len(self._eval_order)
        self.fingerprint = self._fingerprint()

    def _fingerprint(self) -> str:
        # The first places of two epochs stand for the order, so that a Grain that shuffles otherwise shows.
        places = [*range(min(self._windows, 64)), *range(self._windows, self._windows + min(self._windows, 64))]
        identity = {
            "version": 1,
            "tokens": self._cache.digest,
            "length": self._length,
            "windows": self._windows,
            "global_batch_size": self._global_batch_size,
            "order": [int(self._order[place]) for place in places],
        }
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]

    @cached_property
    def _sequence(self) -> Any:
        return batch_sequence(self._train_batch)

    def _train_batch(self, index: int) -> Batch:
        # Only this process's rows are looked up: a global batch may have thousands.
        first = index * self._global_batch_size
        windows = np.array([self._order[first + row] for row in self._rows], np.int64)
        return cut_windows(self._cache.train, windows, self._length)

    def eval_batches(self, limit: int = -1) -> Iterator[Batch]:
        for indexes in islice(self._eval_order, None if limit < 0 else limit):
            yield cut_windows(self._cache.held_out, indexes[self._eval_rows], self._length)

    def describe(self) -> str:
        cache = self._cache
        train, held_out = (len(stream.tokens) for stream in (cache.train, cache.held_out))
        held = f"{_count(len(cache.held_out.ends), 'document')}, {held_out:,} tokens"
        if cache.tail_held_out:
            held = f"the end of the only text, {held_out:,} tokens,"
        left_out = [
            f"; left out: {_count(documents, kind)}{why}"
            for documents, kind, why in (
                (cache.empty_documents, "empty document", ""),
                (cache.overlapping_documents, "document", " of text_files, held out by eval_text_files"),
            )
            if documents
        ]
        return (
            f"data: {_count(len(cache.train.ends), 'document')}, {train:,} tokens to train on; {held} held out"
            f"{''.join(left_out)}\n"
            f"sequences: {self._windows:,} of {self._length} tokens; an epoch is {self.steps_per_epoch:,.1f} steps "
            f"of {_count(self._global_batch_size, 'sequence')}\n"
            f"tokenizer: {self._tokenizer_ids:,} ids, {cache.characters / (train + held_out):.2f} characters a token; "
            f"cache: {cache.path}"
        )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _eval_order(windows: np.ndarray, batch_size: int) -> np.ndarray:
    """Held-out windows by batch [batches, batch_size], the end padded.

    Their order is shuffled, the same every time, so that the first few batches are a fair sample of all documents.
    """
    count = len(windows)
    order = np.full(-(-count // batch_size) * batch_size, PADDING, np.int64)
    if count:
        places = window_order(count, seed=0)  # by index: to iterate starts threads, and is slow
        order[:count] = windows[[places[index] for index in range(count)]]
    return order.reshape(-1, batch_size)
