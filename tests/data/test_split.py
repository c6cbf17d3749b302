import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import InputError
from maxlite.data.split import digests, plan_split

some_texts = st.lists(st.text(min_size=1, max_size=5), min_size=2, max_size=60)


def held_out(texts, fraction):
    split = plan_split(digests(texts), fraction)
    return {text for text in texts if split.parts(text)[1]}


@settings(max_examples=100, deadline=None)
@given(some_texts, st.floats(0.001, 0.999))
def test_about_the_share_asked_for_and_never_all_or_none(texts, fraction):
    distinct = set(texts)
    out = held_out(texts, fraction)
    if len(distinct) > 1:
        assert 1 <= len(out) < len(distinct)
    if len(distinct) == len(texts):
        assert abs(len(out) - fraction * len(texts)) <= 1


@settings(max_examples=100, deadline=None)
@given(st.sets(st.text(max_size=5), min_size=3, max_size=60), st.text(min_size=6, max_size=9), st.floats(0.01, 0.9))
def test_another_document_moves_at_most_one(texts, more, fraction):
    texts = sorted(texts)
    assert len(held_out(texts, fraction) ^ (held_out([more, *texts], fraction) - {more})) <= 1


def test_order_does_not_matter_and_zero_holds_out_nothing():
    texts = [str(i) for i in range(50)]
    assert held_out(texts, 0.1) == held_out(texts[::-1], 0.1)
    assert len(held_out(texts, 0.1)) == 5
    assert not held_out(texts, 0)


@pytest.mark.parametrize(
    ("text", "train"),
    [
        ("one one one\n\ntwo two two\n\nthree", "one one one\n\ntwo two two\n\n"),
        ("one one one\ntwo two two\nthree", "one one one\ntwo two two\n"),
        ("one one one two two two three", "one one one two two two "),
        ("x" * 100, "x" * 80),
        # No paragraph ends near the place, so a line does.
        ("a\n\n" + "line of text\n" * 100, "a\n\n" + "line of text\n" * 80),
    ],
)
def test_the_end_of_a_single_text_is_held_out(text, train):
    for copies in (1, 3):
        split = plan_split(digests([text] * copies), 0.2)
        assert split.parts(text) == (train, text[len(train) :])


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("ab \n"), min_size=1, max_size=80), st.floats(0.001, 0.999))
def test_the_parts_of_a_single_text_are_the_text(text, fraction):
    train, out = plan_split(digests([text]), fraction).parts(text)
    assert train + out == text
    assert train
    assert out or len(text) == 1


def texts_of(dataset, batches):
    ids = [int(i) for batch in batches for i in batch["inputs"].ravel()]
    return dataset.tokenizer.decode(ids)


def test_no_held_out_text_is_trained_on(make_config, open_text, write_jsonl, paragraphs):
    documents = [paragraphs(seed) for seed in range(12)]
    path = write_jsonl([*documents, *documents[:4]])  # a copy follows its document to its side
    dataset = open_text(make_config(text_files=[str(path)], eval_fraction=0.3, enable_data_shuffling=False))
    steps = int(dataset.steps_per_epoch)
    train = texts_of(dataset, map(dataset.train_batch, range(1, steps + 1)))
    for seed in range(12):
        heading = f"Chapter {seed}.0:"
        out = sum(heading in dataset.tokenizer.decode(doc) for doc in held_out_documents(dataset))
        assert (heading in train) == (out == 0)


def held_out_documents(dataset):
    stream = dataset._cache.held_out
    return [stream.tokens[a:b] for a, b in zip([0, *stream.ends], stream.ends, strict=False)]


def test_eval_files(make_config, open_text, write_jsonl, paragraphs):
    train = write_jsonl([paragraphs(seed) for seed in range(8)])
    out = write_jsonl([paragraphs(3), paragraphs(77)], "out.jsonl")
    dataset = open_text(make_config(text_files=[str(train)], eval_text_files=[str(out)]))
    assert len(dataset._cache.train.ends) == 7
    assert len(dataset._cache.held_out.ends) == 2
    assert "left out: 1 document of text_files, held out by eval_text_files" in dataset.describe()
    with pytest.raises(InputError, match=r"^eval_text_files: they hold every document of text_files"):
        open_text(make_config(text_files=[str(out)], eval_text_files=[str(train), str(out)]))


def test_one_text(make_config, open_text, tmp_path, paragraphs):
    path = tmp_path / "book.txt"
    path.write_text(paragraphs(1, 40))
    dataset = open_text(make_config(text_files=[str(path)], eval_fraction=0.1))
    (train,) = [dataset.tokenizer.decode(dataset._cache.train.tokens)]
    (out,) = map(dataset.tokenizer.decode, held_out_documents(dataset))
    assert train + out == path.read_text()
    assert out.startswith("Chapter 1.36")
    assert "the end of the only text" in dataset.describe()
