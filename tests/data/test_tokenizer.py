import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxlite.config import DataConfig, InputError
from maxlite.data import load_tokenizer
from maxlite.data.text import bundled_corpora, read_documents
from maxlite.data.tokenizer import BUNDLED_MODEL

REPOSITORY = Path(__file__).parents[2]
BUNDLED = load_tokenizer(DataConfig())
BYTE = load_tokenizer(DataConfig(tokenizer_type="byte"))

# Any character but surrogates, which are no text, with those that tokenizers stumble over more often.
texts = st.text(
    st.one_of(st.sampled_from(" \u2581\n\0\t\r\u2028a1<>"), st.characters(exclude_categories=["Cs"])), max_size=60
)


@pytest.mark.parametrize("tokenizer", [BUNDLED, BYTE], ids=["bundled", "byte"])
def test_any_text_comes_back(tokenizer):
    @settings(max_examples=300, deadline=None)
    @given(texts)
    @example("")
    @example(" \u2581\u2581 a\u2581b ")
    @example("\0\0")
    @example("  two  spaces \r\n\n\n tab\t ")
    @example("<s></s><unk><0x0A>\u2047\ufffd\ufeff")
    @example("\U0010ffff e\u0301 \u00e9")
    def check(text):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all()
        assert tokenizer.decode(ids) == text
        assert [list(ids)] == [list(batch) for batch in tokenizer.encode_batch([text])]

    check()


@pytest.mark.parametrize("corpus", bundled_corpora())
def test_bundled_text_comes_back(corpus):
    for text in list(read_documents(bundled_corpora()[corpus], text_column="text", key="text_files"))[::12]:
        assert BUNDLED.decode(BUNDLED.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from(" \n\tabcthe.,'1\u00e9\u4e00"), max_size=200))
def test_words_one_by_one_give_the_ids_of_the_whole_text(text):
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(BUNDLED_MODEL))
    assert BUNDLED.encode(text).tolist() == library.encode(text)


def test_word_memory_is_bounded(monkeypatch):
    tokenizer = load_tokenizer(DataConfig())
    monkeypatch.setattr(tokenizer, "_MAX_CACHED_WORDS", 5)
    texts = [f"words {i} and words {i + 1} again\n" for i in range(20)]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert len(tokenizer._words) <= 8


def test_bundled_and_byte_ids():
    assert (BUNDLED.vocab_size, BUNDLED.bos_id, BUNDLED.eos_id) == (8192, 1, 2)
    assert (BYTE.vocab_size, BYTE.bos_id, BYTE.eos_id) == (258, 256, 257)
    assert BYTE.encode("a\u00e9").tolist() == [97, 195, 169]


def test_special_ids_decode_to_nothing_and_foreign_ids_to_a_mark():
    assert BYTE.decode([256, 104, 105, 257]) == "hi"
    assert BYTE.decode([104, 300, -1]) == "h\ufffd\ufffd"
    assert BUNDLED.decode([1, *BUNDLED.encode("hi"), 2]) == "hi"
    assert BUNDLED.decode([9000, -5]) == " \u2047  \u2047 "


def test_training_again_makes_the_bundled_file(tmp_path):
    output = tmp_path / "again.model"
    subprocess.run([sys.executable, "scripts/train_tokenizer.py", output], cwd=REPOSITORY, check=True)
    assert output.read_bytes() == BUNDLED_MODEL.read_bytes()


@pytest.fixture
def hugging_face(tmp_path):
    """Path of a small byte-level tokenizer.json, the kind of GPT-2 and Llama 3."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(["some text to learn from, some more text"] * 3, trainer)
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    return path


def test_hugging_face(hugging_face):
    tokenizer = load_tokenizer(DataConfig(tokenizer_type="huggingface", tokenizer_path=str(hugging_face)))
    text = " some text,\n\u00e9\u2581 more"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]) == text
    assert tokenizer.encode_batch([text, "a"])[0].tolist() == tokenizer.encode(text).tolist()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.vocab_size == len(json.loads(hugging_face.read_text())["model"]["vocab"])


def test_hugging_face_settings_beside_it_name_the_special_tokens(hugging_face):
    settings = hugging_face.with_name("tokenizer_config.json")
    config = DataConfig(tokenizer_type="huggingface", tokenizer_path=str(hugging_face))
    before = load_tokenizer(config)
    settings.write_text(json.dumps({"eos_token": {"content": "s"}, "bos_token": None}))
    after = load_tokenizer(config)
    assert after.eos_id == after.encode("s")[0] != before.eos_id
    assert after.fingerprint != before.fingerprint
    for damaged in ("{", "[]", "null"):
        settings.write_text(damaged)
        with pytest.raises(InputError, match=r"tokenizer_path: .*tokenizer_config\.json"):
            load_tokenizer(config)


def test_another_sentencepiece_model_encodes_as_the_library_does(tmp_path):
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some text to learn from", "and some more text"] * 5),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        bos_id=-1,
        minloglevel=2,
    )
    path = tmp_path / "other.model"
    path.write_bytes(model.getvalue())
    tokenizer = load_tokenizer(DataConfig(tokenizer_path=str(path)))
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = ["  some  more text\nto learn", "text"]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == library.encode(texts)
    assert tokenizer.bos_id is None
    assert tokenizer.fingerprint != BUNDLED.fingerprint


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
@pytest.mark.parametrize(
    "content", [b"", b"not a tokenizer", b'{"version": "1.0"}', BUNDLED_MODEL.read_bytes()[:9999]]
)
def test_damaged_file(tmp_path, capfd, kind, content):
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"tokenizer_path: {path}: not a .*tokenizer_type") as error:
        load_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_path=str(path)))
    assert len(error.value.problems) == 1
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer_path": "no/such.model"}, r"no/such\.model: no such file; null takes the bundled"),
        ({"tokenizer_path": str(BUNDLED_MODEL.parent)}, r"is a directory; name the file: .*bpe8192\.model"),
        ({"tokenizer_type": "huggingface"}, r"needs the path of a tokenizer\.json"),
        ({"tokenizer_type": "byte", "tokenizer_path": "x"}, r"takes no file; set tokenizer_path=null"),
    ],
)
def test_wrong_path(keys, message):
    with pytest.raises(InputError, match=f"^tokenizer_path: .*{message}"):
        load_tokenizer(DataConfig(**keys))


def test_a_hugging_face_tokenizer_that_cannot_spell_the_text(tmp_path):
    import tokenizers

    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0}, unk_token="[UNK]")).save(str(path))
    tokenizer = load_tokenizer(DataConfig(tokenizer_type="huggingface", tokenizer_path=str(path)))
    assert tokenizer.encode("known").tolist() == [0]
    with pytest.raises(InputError, match=rf"tokenizer_path: {path}: cannot spell"):
        tokenizer.encode("unknown")
