"""Small data sets on disk."""

import json

import pytest

from maxlite.config import DataConfig
from maxlite.data import open_dataset


def _paragraphs(seed, count=6):
    return "\n\n".join(f"Chapter {seed}.{i}: " + f"word{seed * 7 + i} and more, " * 5 for i in range(count))


@pytest.fixture
def paragraphs():
    """Readable text that no other seed makes."""
    return _paragraphs


@pytest.fixture
def write_jsonl(tmp_path):
    """Writes documents, one line each, and gives the path."""

    def write(texts, name="docs.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write


@pytest.fixture
def make_config(tmp_path, write_jsonl):
    """A config of 20 small documents and the byte tokenizer, with keys changed."""

    def make(**keys):
        if "text_files" not in keys:
            keys["text_files"] = [str(write_jsonl([_paragraphs(seed) for seed in range(20)]))]
        defaults = {"data_cache_directory": str(tmp_path / "cache"), "tokenizer_type": "byte", "max_target_length": 32}
        return DataConfig(**defaults | keys)

    return make


@pytest.fixture
def open_text():
    """open_dataset with sizes that fit small data sets."""

    def open_(config, **keys):
        return open_dataset(config, **{"vocab_size": 8192, "global_batch_size": 4, "eval_batch_size": 4} | keys)

    return open_
