"""Fixed-length training sequences cut out of a stream of documents.

The stream is cut every `length` tokens. Window i holds the inputs [i*length, (i+1)*length) and their targets,
each the next token, so that every token of the stream but the first is the target of exactly one input. Shapes:
R rows, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# inputs, inputs_position, inputs_segmentation, targets, targets_segmentation: int32 [R, L] each.
Batch = dict[str, np.ndarray]
PADDING = -1  # the index of a window that holds nothing


@dataclass(frozen=True)
class TokenStream:
    """Documents one after the other."""

    tokens: np.ndarray  # unsigned integers [tokens], may be memory-mapped
    ends: np.ndarray  # where each document ends, increasing int64 [documents]

    def full_windows(self, length: int) -> int:
        """Windows all of whose inputs have a target."""
        return max(0, len(self.tokens) - 1) // length

    def all_windows(self, length: int) -> int:
        """Windows that hold every input that has a target; the last may be short."""
        return -(-max(0, len(self.tokens) - 1) // length)

    def evaluation_windows(self, length: int) -> np.ndarray:
        """Indexes [windows] of all but the windows in which no target counts, as every document has one token."""
        first = np.arange(self.all_windows(length)) * length
        last = np.minimum(first + length, len(self.tokens) - 1)
        # Targets are the tokens first + 1 to last; those that begin a document do not count.
        begins = np.searchsorted(self.ends, last, side="right") - np.searchsorted(self.ends, first, side="right")
        return np.flatnonzero(last - first > begins)


def cut_windows(stream: TokenStream, indexes: np.ndarray, length: int) -> Batch:
    """The batch of the windows with these indexes [R].

    inputs_segmentation numbers the documents of a row from 1; 0 is padding after the stream's end.
    inputs_position counts from 0 at the start of each document's part of the row. targets_segmentation is the
    document of a target, or 0 where it must not count: padding, and the last token of a document, whose next
    token is another document's. A target that does not count is 0.
    """
    rows = len(indexes)
    starts = np.where(indexes == PADDING, len(stream.tokens), indexes * length)
    tokens = np.zeros((rows, length + 1), np.int32)
    held = np.clip(len(stream.tokens) - starts, 0, length + 1)
    for row, (start, count) in enumerate(zip(starts.tolist(), held.tolist(), strict=True)):
        tokens[row, :count] = stream.tokens[start : start + count]
    columns = np.arange(length + 1, dtype=np.int32)
    segments = np.ones((rows, length + 1), np.int32)
    positions = np.broadcast_to(columns, segments.shape)
    border_rows, border_columns = _borders(stream, starts, length)
    if len(border_rows):
        begins = np.zeros_like(segments)
        begins[border_rows, border_columns] = 1
        segments += np.cumsum(begins, axis=1, dtype=np.int32)
        positions = positions - np.maximum.accumulate(begins * columns, axis=1)
    if held.min(initial=length + 1) <= length:
        padding = columns >= held[:, None]
        segments[padding] = 0
        positions = np.where(padding, 0, positions)
    counted = segments[:, 1:] == segments[:, :-1]
    return {
        "inputs": tokens[:, :-1].copy(),
        "inputs_position": positions[:, :-1].copy(),
        "inputs_segmentation": segments[:, :-1].copy(),
        "targets": np.where(counted, tokens[:, 1:], 0),
        "targets_segmentation": np.where(counted, segments[:, 1:], 0),
    }


def _borders(stream: TokenStream, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each token that begins a document, but for those in column 0; columns 0 to length."""
    first = np.searchsorted(stream.ends, starts, side="right")
    counts = np.searchsorted(stream.ends, starts + length, side="right") - first
    rows = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, stream.ends[first[rows] + within] - starts[rows]
