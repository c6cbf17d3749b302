"""Text tokenised once, kept on disk and memory-mapped.

<data_cache_directory>/tokens/<key>/ holds one tokenised data set; the key is a hash of all that its tokens depend
on, the bytes of the input files first. A directory is built under another name and renamed when it is whole, so
what bears a key's name is finished. It may be deleted at any time no run uses it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxlite.config import DataConfig, InputError
from maxlite.data.build import END_DTYPE, FORMAT, METADATA, Sources, build
from maxlite.data.fingerprint import content_hash, file_state, sampled_hash
from maxlite.data.locks import exclusive, published_directory, remove_directory, remove_leftovers
from maxlite.data.text import kind_of, resolve_files
from maxlite.data.tokenizer import Tokenizer
from maxlite.data.windows import TokenStream


@dataclass(frozen=True)
class TokenCache:
    """A finished cache: its two streams of tokens, and what its metadata tell."""

    path: Path
    train: TokenStream
    held_out: TokenStream
    characters: int  # of all text
    empty_documents: int  # left out
    overlapping_documents: int  # left out of train: eval_text_files holds them too
    tail_held_out: bool  # there is one text, and its end is held out
    digest: str  # of the train tokens and document borders


class _Damaged(Exception):
    """A cache that cannot be used; the message says why."""


def open_cache(config: DataConfig, tokenizer: Tokenizer) -> TokenCache:
    """The tokens of the config's text, out of the cache, or tokenised now. Safe in many processes at once.

    Raises InputError for text that cannot be read, and for a cache directory that cannot be written.
    """
    sources = Sources(
        train=resolve_files(config.text_files, "text_files"),
        held_out=resolve_files(config.eval_text_files, "eval_text_files"),
    )
    root = _root(config)
    states, hashes = [], {}
    for path in sources.all:
        try:
            states.append(file_state(path))
            hashes[path] = content_hash(path, root / "hashes")
        except OSError as error:
            raise InputError(f"{sources.key_of(path)}: {path}: cannot be read: {error.strerror or error}") from error
    target = root / "tokens" / _key(config, tokenizer, sources, hashes)
    try:
        try:
            return _load(target)
        except FileNotFoundError:
            pass
        except _Damaged as error:
            print(f"the token cache {target} is damaged ({error}): tokenising again", file=sys.stderr, flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process, which is tokenising the text into {target}"
        with exclusive(target.with_suffix(".lock"), waiting):
            _build_unless_there(config, tokenizer, sources, states, target)
        return _load(target)
    except (OSError, _Damaged) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(
            f"data_cache_directory: cannot keep tokenised text in {target.parent}: {reason}; "
            "make room there, or set data_cache_directory to a directory that can be written"
        ) from error


def _root(config: DataConfig) -> Path:
    directory = config.data_cache_directory
    if "://" in directory:
        raise InputError(f"data_cache_directory: {directory} is a URL; give a local directory")
    try:
        return Path(directory).expanduser()
    except RuntimeError as error:  # a user id without a home
        raise InputError(f"data_cache_directory: {directory}: {error}; give a directory without ~") from error


def _build_unless_there(
    config: DataConfig, tokenizer: Tokenizer, sources: Sources, states: list[list[int]], target: Path
) -> None:
    remove_leftovers(target.parent, held=target.name)
    if target.exists():
        try:
            _load(target)
        except _Damaged:
            remove_directory(target)
        else:
            return  # another process made it while we waited
    with published_directory(target) as directory:
        build(config, tokenizer, sources, directory)
        changed = [
            path
            for path, state in zip(sources.all, states, strict=True)
            if not path.exists() or file_state(path) != state
        ]
        if changed:
            named_by = sources.key_of(changed[0])
            raise InputError(f"{named_by}: {changed[0]}: changed while it was read; start again when it is complete")


def _key(config: DataConfig, tokenizer: Tokenizer, sources: Sources, hashes: Mapping[Path, str]) -> str:
    """Hash of everything that the cached tokens depend on."""
    # Paths are not part of it: the same bytes give the same tokens wherever they lie.
    depends_on = {
        "format": FORMAT,
        "train": [[kind_of(path), hashes[path]] for path in sources.train],
        "held_out": [[kind_of(path), hashes[path]] for path in sources.held_out],
        "text_column": config.text_column,
        "eval_fraction": 0.0 if sources.held_out else config.eval_fraction,
        "tokenizer": tokenizer.fingerprint,
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:32]


def _load(path: Path) -> TokenCache:
    """Open a finished cache. Raises FileNotFoundError where there is none, _Damaged where it cannot be used."""
    if not path.is_dir():
        raise FileNotFoundError(path)
    try:
        metadata = json.loads((path / METADATA).read_bytes())
        for name, sha256 in metadata["files"].items():
            if sampled_hash(path / name) != sha256:
                raise _Damaged(f"{name} is not as it was written")
        return TokenCache(
            path=path,
            train=_stream(path, "train", metadata["dtype"]),
            held_out=_stream(path, "held_out", metadata["dtype"]),
            characters=metadata["characters"],
            empty_documents=metadata["empty_documents"],
            overlapping_documents=metadata["overlapping_documents"],
            tail_held_out=metadata["tail_held_out"],
            digest=hashlib.sha256(
                "".join(metadata["files"][f"train.{kind}"] for kind in ("tokens", "ends")).encode()
            ).hexdigest(),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(f"{type(error).__name__} {error}") from error


def _stream(path: Path, name: str, dtype: str) -> TokenStream:
    tokens, ends = _mapped(path / f"{name}.tokens", dtype), _mapped(path / f"{name}.ends", END_DTYPE)
    if len(tokens) != (ends[-1] if len(ends) else 0):
        raise _Damaged(f"{name}.ends does not fit {name}.tokens")
    return TokenStream(tokens, ends)


def _mapped(path: Path, dtype: str) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))
