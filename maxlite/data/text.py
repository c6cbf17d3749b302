"""Documents out of text files: .txt (one document a file), .jsonl, .jsonl.xz, .jsonl.gz, globs, bundled corpora."""

from __future__ import annotations

import glob
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from maxlite.config import InputError

CORPUS_DIRECTORY = Path(__file__).parent / "corpus"
SUFFIXES = (".txt", ".jsonl", ".jsonl.xz", ".jsonl.gz")
_BOM = b"\xef\xbb\xbf"


def bundled_corpora() -> dict[str, Path]:
    """The corpora that come with maxlite, by the name that `text_files` gives them."""
    return {f"corpus:{name}": CORPUS_DIRECTORY / f"{name}.jsonl.xz" for name in ("sotu", "shakespeare")}


def resolve_files(patterns: Sequence[str], key: str) -> list[Path]:
    """Files that the patterns name, in the order of the patterns, a glob's files by name, none twice.

    Raises InputError with one problem per pattern that names no readable text file; `key` is the config key.
    """
    files: dict[Path, None] = {}
    problems = []
    for pattern in patterns:
        try:
            found = _resolve(pattern)
        except InputError as error:
            problems += [f"{key}: {problem}" for problem in error.problems]
        else:
            files.update((path.resolve(), None) for path in found)
    if problems:
        raise InputError(*problems)
    return list(files)


def _resolve(pattern: str) -> list[Path]:
    if pattern.startswith("corpus:"):
        corpora = bundled_corpora()
        if pattern not in corpora:
            raise InputError(f"{pattern} is not a bundled corpus; there are {', '.join(corpora)}")
        return [corpora[pattern]]
    if "://" in pattern:
        raise InputError(f"{pattern} is a URL; give paths of local files")
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise InputError(f"{pattern} is a directory; name its files, for example {pattern.rstrip('/')}/*.txt")
    if path.exists():
        found = [path]
    elif glob.has_magic(pattern):
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = [Path(match) for match in matches if Path(match).is_file()]
        if not found:
            raise InputError(f"{pattern} matches no file")
    else:
        raise InputError(f"{pattern}: no such file (looked for {path.absolute()})")
    unknown = [str(path) for path in found if not path.name.lower().endswith(SUFFIXES)]
    if unknown:
        raise InputError(f"{unknown[0]}: unknown kind of file; text is read from {', '.join(SUFFIXES)}")
    return found


def kind_of(path: Path) -> str:
    """The suffix, one of SUFFIXES, that tells how a file is read."""
    return next(suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix))


def read_documents(path: Path, *, text_column: str, key: str) -> Iterator[str]:
    """The documents of one file, in order; empty ones included. A .txt file is held in memory whole.

    Raises InputError, with file and line or byte, for text that cannot be read; `key` is the config key.
    """
    try:
        if path.name.lower().endswith(".txt"):
            yield _decode(path.read_bytes(), f"{key}: {path}", 0)
        else:
            yield from _read_json_lines(path, text_column, key)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{key}: {path}: damaged or cut short: {error}; make or copy the file again") from error
    except OSError as error:
        raise InputError(f"{key}: {path}: cannot be read: {error.strerror or error}") from error


def _read_json_lines(path: Path, text_column: str, key: str) -> Iterator[str]:
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix.lower(), open)
    offset = 0
    with cast(BinaryIO, opener(path, "rb")) as file:
        for number, line in enumerate(file, start=1):
            start, offset = offset, offset + len(line)
            if line.removeprefix(_BOM).strip():
                where = f"{key}: {path}:{number}"
                yield _text_of(_decode(line, where, start), text_column, where)


def _text_of(line: str, text_column: str, where: str) -> str:
    """The document in one line of JSON."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError, and numbers of too many digits
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: a {type(record).__name__}, not an object such as {{{text_column!r}: ...}}")
    if text_column not in record:
        fields = ", ".join(map(str, record)) or "none"
        raise InputError(f"{where}: no field {text_column!r}; set text_column to one of its fields: {fields}")
    text = record[text_column]
    if not isinstance(text, str):
        raise InputError(f"{where}: field {text_column!r} holds a {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a character: "\ud83d"
        raise InputError(
            f"{where}: field {text_column!r} holds half a surrogate pair at character {error.start}; "
            "write the text again as valid Unicode"
        ) from error
    return text


def _decode(data: bytes, where: str, offset: int) -> str:
    """Text of UTF-8 bytes that lie at `offset` of a file, without the mark that some programs begin files with."""
    if offset == 0 and data.startswith(_BOM):
        data, offset = data[len(_BOM) :], len(_BOM)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise InputError(f"{where}: invalid UTF-8 at byte {at} of the text; convert the file to UTF-8") from error
