"""Text to token ids and back: sentencepiece (one is bundled), Hugging Face tokenizer.json, bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np

from maxlite.config import DataConfig, InputError

BUNDLED_MODEL = Path(__file__).parent / "corpus" / "bpe8192.model"

# sentencepiece writes a space as this character, so a text that holds it needs care.
_SPACE_MARK = "\u2581"


class Tokenizer(Protocol):
    """What every tokenizer does. Ids are int32 and hold no bos or eos unless the caller adds them."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str  # changes when any text could be encoded differently

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 [tokens]."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32 [tokens] each."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids. Ids outside the vocabulary show as a replacement mark, bos and eos as nothing."""
        ...


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of the config. Raises InputError where its file is missing, of another kind or damaged."""
    if config.tokenizer_type == "byte":
        if config.tokenizer_path is not None:
            raise InputError("tokenizer_path: tokenizer_type=byte takes no file; set tokenizer_path=null")
        return ByteTokenizer()
    if config.tokenizer_type == "sentencepiece":
        path = BUNDLED_MODEL if config.tokenizer_path is None else Path(config.tokenizer_path).expanduser()
        return SentencePieceTokenizer(path, _read(path, "*.model"))
    if config.tokenizer_path is None:
        raise InputError("tokenizer_path: tokenizer_type=huggingface needs the path of a tokenizer.json")
    path = Path(config.tokenizer_path).expanduser()
    return HuggingFaceTokenizer(path, _read(path, "tokenizer.json"))


def _read(path: Path, names: str) -> bytes:
    if path.is_dir():
        files = ", ".join(str(file) for file in sorted(path.glob(names))) or f"no {names} in it"
        raise InputError(f"tokenizer_path: {path} is a directory; name the file: {files}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"tokenizer_path: {path}: no such file; null takes the bundled tokenizer") from None
    except OSError as error:
        raise InputError(f"tokenizer_path: {path}: cannot be read: {error.strerror or error}") from error


def _fingerprint(kind: str, data: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + data).hexdigest()


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; bos is 256, eos is 257. Lossless for any text."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = _fingerprint("byte", b"")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        # 0xFF occurs in no UTF-8 text, so an id outside the vocabulary decodes to U+FFFD.
        special = (self.bos_id, self.eos_id)
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids) if i not in special).decode(errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece model. Lossless for any text with the bundled one; another keeps what its rules keep."""

    # Where no piece reaches over the start of a word or a line break, encoding word by word gives the ids of
    # the whole text, and each word only once.
    _WORD = re.compile(rf" *[^ \n{_SPACE_MARK}]+| +|[\n{_SPACE_MARK}]")
    _MAX_CACHED_WORDS = 500_000  # about 100 MB
    _PROBE = " a  b\tc\n\n d\u00e9 e\u0301 \ufb01 \uff21 "

    def __init__(self, path: Path, data: bytes) -> None:
        """`data` holds the bytes of `path`. Raises InputError if they are not a sentencepiece model."""
        import sentencepiece

        try:
            if not data:
                raise ValueError("the file is empty")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except Exception as error:  # the library's own types of error differ between versions
            raise InputError(
                f"tokenizer_path: {path}: not a sentencepiece model, or damaged ({_first_line(error)}); "
                "give a .model file, or set tokenizer_type"
            ) from error
        self.vocab_size = self._model.vocab_size()
        self.bos_id = _id_or_none(self._model.bos_id())
        self.eos_id = _id_or_none(self._model.eos_id())
        self.fingerprint = _fingerprint("sentencepiece", data)
        self._words: dict[str, list[int]] | None = {} if self._splits_at_words() else None
        self._mark_ids = self._byte_ids(_SPACE_MARK)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._words is None:
            return [np.asarray(ids, np.int32) for ids in self._model.encode(list(texts), num_threads=-1)]
        return [self._encode_words(text, self._words) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        unknown = self._model.unk_id()
        return self._model.decode([i if 0 <= i < self.vocab_size else unknown for i in map(int, ids)])

    def _encode_words(self, text: str, known: dict[str, list[int]]) -> np.ndarray:
        words = self._WORD.findall(text)
        distinct = set(words)
        new = [word for word in distinct if word not in known]
        if len(known) + len(new) > self._MAX_CACHED_WORDS:
            known.clear()
            new = list(distinct)
        known.update(zip(new, self._model.encode(new), strict=True))
        if _SPACE_MARK in distinct and self._mark_ids is not None:
            # The library would take the character for a space; its UTF-8 bytes come back as themselves.
            known[_SPACE_MARK] = self._mark_ids
        return np.fromiter(chain.from_iterable(map(known.__getitem__, words)), np.int32)

    def _splits_at_words(self) -> bool:
        """Whether word by word is exact: text is not normalised, and no piece goes on past a word or line."""
        if self._model.normalize(self._PROBE) != self._PROBE.replace(" ", _SPACE_MARK):
            return False
        pieces = self._model.id_to_piece(list(range(self.vocab_size)))
        return not any(_SPACE_MARK in piece.lstrip(_SPACE_MARK) or "\n" in piece[:-1] + piece[1:] for piece in pieces)

    def _byte_ids(self, character: str) -> list[int] | None:
        """Ids that spell a character byte by byte; None where the model has no byte pieces."""
        ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in character.encode()]
        return ids if all(self._model.is_byte(i) for i in ids) else None


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library."""

    # Names that model families give them; a tokenizer_config.json beside the file goes before these.
    _BOS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>")
    _EOS = ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>")

    def __init__(self, path: Path, data: bytes) -> None:
        """`data` holds the bytes of `path`. Raises InputError if they are not a tokenizer.json."""
        import tokenizers

        self._path = path
        try:
            self._model = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception
            raise InputError(
                f"tokenizer_path: {path}: not a tokenizer.json, or damaged ({_first_line(error)}); "
                "give a tokenizer.json, or set tokenizer_type"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        # Ids need not be dense: added tokens may lie past a gap.
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        named = _special_tokens(path.with_name("tokenizer_config.json"))
        self.bos_id = self._first_id([named.get("bos_token"), *self._BOS])
        self.eos_id = self._first_id([named.get("eos_token"), *self._EOS])
        self.fingerprint = _fingerprint(f"huggingface bos={self.bos_id} eos={self.eos_id}", data)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise InputError(
                f"tokenizer_path: {self._path}: cannot spell all of the text ({_first_line(error)}); "
                "give a tokenizer with an unknown token or byte fallback"
            ) from error
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        special = (self.bos_id, self.eos_id)
        return self._model.decode([i for i in map(int, ids) if i not in special], skip_special_tokens=False)

    def _first_id(self, names: Sequence[str | None]) -> int | None:
        ids = (self._model.token_to_id(name) for name in names if name)
        return next((i for i in ids if i is not None), None)


def _special_tokens(path: Path) -> dict[str, str]:
    """bos_token and eos_token as a tokenizer_config.json names them; nothing where there is no such file."""
    try:
        settings = json.loads(path.read_bytes())
        if not isinstance(settings, dict):
            raise ValueError("it holds no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"tokenizer_path: {path}, beside the tokenizer, cannot be read: {error}") from error
    names = {}
    for kind in ("bos_token", "eos_token"):
        token = settings.get(kind)
        content = token.get("content") if isinstance(token, dict) else token  # both forms are in use
        if isinstance(content, str):
            names[kind] = content
    return names


def _id_or_none(index: int) -> int | None:
    return index if index >= 0 else None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
