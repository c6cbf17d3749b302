"""Text to files of tokens: documents read, split into train and held out, tokenised, written."""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from tqdm import tqdm

from maxlite.config import DataConfig, InputError
from maxlite.data.fingerprint import sampled_hash
from maxlite.data.split import Split, digest, digests, plan_split
from maxlite.data.text import read_documents
from maxlite.data.tokenizer import Tokenizer

# Raise it when the same input would give other files.
FORMAT = 1
METADATA = "metadata.json"
END_DTYPE = "<i8"
# Text encoded at a time: enough to keep a tokenizer's threads busy, little enough to hold.
_BATCH_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Sources:
    """The files that text is read from."""

    train: list[Path]
    held_out: list[Path]  # empty: some of train's documents are held out

    @property
    def all(self) -> list[Path]:
        return [*self.train, *self.held_out]

    def key_of(self, path: Path) -> str:
        """The config key that names a file."""
        return "text_files" if path in self.train else "eval_text_files"


def build(config: DataConfig, tokenizer: Tokenizer, sources: Sources, directory: Path) -> None:
    """Write the tokens of all text into `directory`: for train and held_out each,

    <name>.tokens  every document's [bos] tokens [eos] one after the other, uint16 or uint32
    <name>.ends    where each document ends in it, int64 [documents]

    and metadata.json. Raises InputError for text that cannot be read or split.
    """
    started = time.monotonic()
    terminal = sys.stderr.isatty()
    files = "1 text file" if len(sources.all) == 1 else f"{len(sources.all)} text files"
    print(f"tokenising {files}, once, into {directory.parent}", file=sys.stderr, flush=True)
    # The first pass finds every fault of the input before the long second one, and what the split depends on.
    train = _Documents(sources.train, "text_files", config.text_column)
    held_out = _Documents(sources.held_out, "eval_text_files", config.text_column)
    train_hashes, held_out_hashes = digests(train), digests(held_out)
    for documents, hashes in ((train, train_hashes), (held_out, held_out_hashes)):
        if documents.paths and not len(hashes):
            raise InputError(f"{documents.key}: no text in {documents.paths[0]}{' ...' * (len(documents.paths) > 1)}")
    split = Split() if sources.held_out else plan_split(train_hashes, config.eval_fraction)
    characters = train.characters + held_out.characters
    overlapping = 0
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    with ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(total=characters, desc="tokenising", unit="char", unit_scale=True, disable=not terminal)
        )
        train_writer = stack.enter_context(_Writer(directory, "train", tokenizer, dtype))
        held_out_writer = stack.enter_context(_Writer(directory, "held_out", tokenizer, dtype))
        for text in train:
            if _contains(held_out_hashes, digest(text)):
                overlapping += 1
            else:
                for writer, part in zip((train_writer, held_out_writer), split.parts(text), strict=True):
                    writer.add(part)
            bar.update(len(text))
        for text in held_out:
            held_out_writer.add(text)
            bar.update(len(text))
    if not train_writer.ends:
        raise InputError("eval_text_files: they hold every document of text_files, so none is left to train on")
    written = [f"{name}.{kind}" for name in ("train", "held_out") for kind in ("tokens", "ends")]
    metadata = {
        "format": FORMAT,
        "dtype": dtype,
        "tokenizer": tokenizer.fingerprint,
        "inputs": [str(path) for path in sources.all],
        "characters": characters,
        "empty_documents": train.empty + held_out.empty,
        "overlapping_documents": overlapping,
        "tail_held_out": split.tail_fraction > 0,
        "files": {name: sampled_hash(directory / name) for name in written},
    }
    (directory / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
    tokens = train_writer.tokens + held_out_writer.tokens
    print(f"tokenised {tokens:,} tokens in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


class _Documents:
    """The documents of some files that hold any text; counts what went by in the last pass."""

    def __init__(self, paths: Sequence[Path], key: str, text_column: str) -> None:
        self.paths = paths
        self.key = key
        self._text_column = text_column
        self.characters = 0
        self.empty = 0

    def __iter__(self) -> Iterator[str]:
        self.characters = self.empty = 0
        for path in self.paths:
            for text in read_documents(path, text_column=self._text_column, key=self.key):
                self.characters += len(text)
                if text:
                    yield text
                else:
                    self.empty += 1


class _Writer:
    """Appends documents to <name>.tokens, and at its end writes <name>.ends."""

    def __init__(self, directory: Path, name: str, tokenizer: Tokenizer, dtype: str) -> None:
        self.ends = array("q")
        self.tokens = 0
        self._directory = directory
        self._name = name
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._bos, self._eos = (
            np.array([] if i is None else [i], np.int32) for i in (tokenizer.bos_id, tokenizer.eos_id)
        )
        self._texts: list[str] = []
        self._waiting = 0

    def __enter__(self) -> Self:
        self._file = (self._directory / f"{self._name}.tokens").open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with self._file:
            if kind is None:
                self._flush()
                (self._directory / f"{self._name}.ends").write_bytes(np.array(self.ends, END_DTYPE).tobytes())

    def add(self, text: str) -> None:
        """Queue a document, or nothing if it is empty."""
        if text:
            self._texts.append(text)
            self._waiting += len(text)
            if self._waiting >= _BATCH_CHARACTERS:
                self._flush()

    def _flush(self) -> None:
        for ids in self._tokenizer.encode_batch(self._texts):
            document = np.concatenate([self._bos, ids, self._eos]).astype(self._dtype)
            if len(document):  # without bos and eos, a tokenizer may make nothing of a text
                self._file.write(document.tobytes())
                self.tokens += len(document)
                self.ends.append(self.tokens)
        self._texts.clear()
        self._waiting = 0


def _contains(hashes: np.ndarray, value: int) -> bool:
    """Whether sorted hashes hold a value."""
    at = int(np.searchsorted(hashes, np.uint64(value)))
    return at < len(hashes) and int(hashes[at]) == value
