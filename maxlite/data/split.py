"""Which documents are held out for evaluation: chosen by their content, whole, and the same every time."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Split:
    """How documents part into train and held out.

    A document is held out if the hash of its text is at most `cutoff`, so a document keeps its side when others
    come or go (but for the few nearest the cutoff), and all copies of a text are on one side. Where there is but
    one text, its end is held out: whole paragraphs, or else lines, or words, about `tail_fraction` of it.
    """

    cutoff: int = -1
    tail_fraction: float = 0.0

    def parts(self, text: str) -> tuple[str, str]:
        """(train, held out) parts of a document; together they are the document."""
        if self.tail_fraction > 0:
            return _cut_tail(text, self.tail_fraction)
        return ("", text) if digest(text) <= self.cutoff else (text, "")


def digest(text: str) -> int:
    """64-bit hash of a document."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def digests(texts: Iterable[str]) -> np.ndarray:
    """Sorted hashes of documents, uint64 [documents], 8 bytes of memory each."""
    return np.sort(np.frombuffer(array("Q", map(digest, texts)), np.uint64))


def plan_split(hashes: np.ndarray, fraction: float) -> Split:
    """The split that holds out `fraction` of the documents whose sorted hashes are given.

    At least one document is held out when fraction > 0, and at least one is left to train on.
    """
    if fraction == 0:
        return Split()
    distinct = np.unique(hashes)
    if len(distinct) == 1:
        return Split(tail_fraction=fraction)
    wanted = max(1, round(fraction * len(hashes)))
    return Split(cutoff=int(min(hashes[wanted - 1], distinct[-2])))


def _cut_tail(text: str, fraction: float) -> tuple[str, str]:
    """A text cut at the break between paragraphs (else lines, words) nearest to the start of its last `fraction`."""
    wanted = min(max(1, round(len(text) * fraction)), len(text) - 1)
    target = len(text) - wanted
    for separator in ("\n\n", "\n", " "):
        breaks = [text.rfind(separator, 0, target), text.find(separator, max(0, target - len(separator)))]
        cuts = [found + len(separator) for found in breaks if found >= 0]
        cut = min(cuts, key=lambda cut: abs(cut - target), default=0)
        # Further off, much more or less would be held out than asked for.
        if wanted / 2 <= len(text) - cut <= min(wanted * 2, len(text) - 1):
            return text[:cut], text[cut:]
    return text[:target], text[target:]
