"""Train the bundled tokenizer, maxlite/data/corpus/bpe8192.model, on the bundled text.

    python scripts/train_tokenizer.py [OUTPUT]

The same sentencepiece version (0.2.3 made the committed file) writes the identical file each time.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from maxlite.data.text import bundled_corpora, read_documents
from maxlite.data.tokenizer import BUNDLED_MODEL

PIECES = 8192


def lines() -> Iterator[str]:
    """Lines of the bundled text: no piece then holds a line break, so text can be encoded line by line."""
    for path in bundled_corpora().values():
        for document in read_documents(path, text_column="text", key="text_files"):
            yield from filter(None, document.split("\n"))


def train() -> bytes:
    """The model file. The flags make it lossless: decode(encode(text)) == text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(),
        model_writer=model,
        model_type="bpe",
        vocab_size=PIECES,
        # Text is taken as it is: no Unicode normalisation, no space added, dropped or merged.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        # What no piece spells is spelt in UTF-8 bytes, so nothing is unknown.
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        max_sentence_length=65536,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLED_MODEL
    model = train()
    output.write_bytes(model)
    print(f"{output}: {len(model):,} bytes, sha256 {hashlib.sha256(model).hexdigest()}")


if __name__ == "__main__":
    main()
