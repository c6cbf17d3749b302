import itertools
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import DataConfig, InputError
from maxlite.data import open_dataset
from maxlite.data.tokenizer import ByteTokenizer

KEYS = {"inputs", "inputs_position", "inputs_segmentation", "targets", "targets_segmentation"}


def same(a, b):
    return a.keys() == b.keys() == KEYS and all(np.array_equal(a[name], b[name]) for name in KEYS)


@pytest.fixture(params=["text", "synthetic"])
def open_any(request, make_config, open_text):
    """Opens the same small data set, of each type."""
    config = make_config(dataset_type=request.param)
    return lambda **keys: open_text(config, **keys)


def test_shapes(open_any):
    with open_any() as dataset, dataset.train_batches(0) as batches:
        for batch in (next(batches), dataset.train_batch(9), *itertools.islice(dataset.eval_batches(-1), 2)):
            assert batch.keys() == KEYS
            assert {(values.shape, values.dtype) for values in batch.values()} == {((4, 32), np.dtype(np.int32))}


def test_batch_n_does_not_depend_on_what_was_read_before(open_any):
    with open_any() as dataset, dataset.train_batches(0) as batches:
        in_order = list(itertools.islice(batches, 60))
    again = open_any()
    steps = list(range(1, 61))
    random.Random(0).shuffle(steps)
    for step in steps:
        assert same(again.train_batch(step), in_order[step - 1])


@pytest.mark.parametrize("start", [0, 1, 7, 40, 10_000_000])
def test_an_iterator_goes_on_from_any_step(open_any, start):
    with open_any() as dataset, dataset.train_batches(start) as batches:
        for step in range(start + 1, start + 12):
            assert same(next(batches), dataset.train_batch(step))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_rows_of_processes_make_up_the_global_batch(open_any, processes):
    whole = open_any(global_batch_size=8, eval_batch_size=4)
    parts = [
        open_any(
            global_batch_size=8,
            eval_batch_size=4,
            rows=slice(8 // processes * i, 8 // processes * (i + 1)),
            eval_rows=slice(4 // processes * i, 4 // processes * (i + 1)),
        )
        for i in range(processes)
    ]
    assert {part.fingerprint for part in parts} == {whole.fingerprint}

    def joined(batches):
        return {name: np.concatenate([batch[name] for batch in batches]) for name in KEYS}

    for step in (1, 2, 33):
        assert same(joined([part.train_batch(step) for part in parts]), whole.train_batch(step))
    for batch, *others in zip(whole.eval_batches(), *(part.eval_batches() for part in parts), strict=True):
        assert same(joined(others), batch)


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sequence_once_an_epoch(make_config, open_text, shuffle):
    dataset = open_text(make_config(enable_data_shuffling=shuffle), global_batch_size=1)
    windows = int(dataset.steps_per_epoch)
    assert windows > 50
    epochs = [
        [dataset.train_batch(step)["inputs"].tobytes() for step in range(first + 1, first + windows + 1)]
        for first in (0, windows, 2 * windows)
    ]
    assert len(set(epochs[0])) == windows
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert (epochs[0] != epochs[1] != epochs[2] != epochs[0]) == shuffle


def test_batches_run_over_the_end_of_an_epoch(make_config, open_text):
    one = open_text(make_config(), global_batch_size=1)
    four = open_text(make_config(), global_batch_size=4)
    step = int(four.steps_per_epoch) + 1
    rows = [one.train_batch(4 * (step - 1) + i)["inputs"] for i in range(1, 5)]
    assert np.array_equal(np.concatenate(rows), four.train_batch(step)["inputs"])


@settings(max_examples=20, deadline=None)
@given(seed=st.sampled_from([0, 1, 2**32 - 1]), step=st.integers(1, 10**9), size=st.integers(1, 9))
def test_synthetic_rows_depend_on_seed_step_and_row_alone(seed, step, size):
    config = DataConfig(dataset_type="synthetic", data_shuffle_seed=seed, max_target_length=8)
    sizes = {"vocab_size": 50, "eval_batch_size": 1}
    batch = open_dataset(config, global_batch_size=size, **sizes).train_batch(step)
    wide = open_dataset(config, global_batch_size=size + 3, **sizes).train_batch(step)
    assert np.array_equal(batch["inputs"], wide["inputs"][:size])
    assert ((batch["inputs"] >= 0) & (batch["inputs"] < 50)).all()
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert (batch["targets_segmentation"] == 1).all()


def test_synthetic_has_no_text(make_config, open_text):
    dataset = open_text(make_config(dataset_type="synthetic"))
    assert dataset.tokenizer is None
    assert dataset.num_eval_batches == 0
    assert list(dataset.eval_batches()) == []
    assert "synthetic" in dataset.describe()
    assert not same(dataset.train_batch(1), dataset.train_batch(2))


@pytest.mark.parametrize("size", [1, 3, 4, 50])
def test_evaluation_counts_each_held_out_token_once(make_config, open_text, size):
    dataset = open_text(make_config(eval_fraction=0.2), eval_batch_size=size)
    batches = list(dataset.eval_batches(-1))
    assert len(batches) == dataset.num_eval_batches
    assert {batch["inputs"].shape for batch in batches} == {(size, 32)}
    targets = np.concatenate([batch["targets"][batch["targets_segmentation"] > 0] for batch in batches])
    stream = dataset._cache.held_out
    not_first = np.delete(np.asarray(stream.tokens), [0, *stream.ends[:-1]])
    assert np.array_equal(np.bincount(targets, minlength=300), np.bincount(not_first, minlength=300))


def test_a_limited_evaluation_is_the_start_of_the_whole(make_config, open_text):
    dataset = open_text(make_config(eval_fraction=0.5))
    whole = list(dataset.eval_batches())
    assert [len(list(dataset.eval_batches(limit))) for limit in (0, 2, 10**6)] == [0, 2, len(whole)]
    assert all(same(a, b) for a, b in zip(dataset.eval_batches(2), whole, strict=False))


def test_nothing_held_out(make_config, open_text):
    dataset = open_text(make_config(eval_fraction=0))
    assert dataset.num_eval_batches == 0
    assert list(dataset.eval_batches()) == []
    assert "0 documents, 0 tokens held out" in dataset.describe()


def test_every_evaluation_batch_has_a_target(make_config, open_text, write_jsonl, monkeypatch):
    """Documents of one token, from a tokenizer without bos and eos, have none."""
    monkeypatch.setattr(ByteTokenizer, "bos_id", None)
    monkeypatch.setattr(ByteTokenizer, "eos_id", None)
    train = str(write_jsonl(["text to train on " * 9]))

    def held_out(*texts):
        path = str(write_jsonl(texts, "held_out.jsonl"))
        return open_text(make_config(text_files=[train], eval_text_files=[path], max_target_length=4))

    letters = [chr(ord("a") + i % 26) for i in range(100)]
    none = held_out(*letters)
    assert none.num_eval_batches == 0
    assert list(none.eval_batches()) == []
    few = held_out(*letters, "some words")
    assert few.num_eval_batches == 1
    assert all(batch["targets_segmentation"].any() for batch in few.eval_batches())


def test_fingerprint_tells_sequences_of_batches_apart(make_config, open_text, write_jsonl, paragraphs):
    def fingerprint(size=4, **keys):
        return open_text(make_config(**keys), global_batch_size=size).fingerprint

    base = fingerprint()
    assert base == fingerprint()
    other_text = str(write_jsonl([paragraphs(seed) for seed in range(19)], "other.jsonl"))
    different = [
        fingerprint(5),
        fingerprint(data_shuffle_seed=1),
        fingerprint(enable_data_shuffling=False),
        fingerprint(max_target_length=33),
        fingerprint(eval_fraction=0.3),
        fingerprint(tokenizer_type="sentencepiece"),
        fingerprint(text_files=[other_text]),
        fingerprint(dataset_type="synthetic"),
    ]
    assert len({base, *different}) == 9


def test_description(make_config, open_text, tmp_path):
    text = open_text(make_config()).describe()
    for part in ("19 documents", "1 document, ", "held out", "sequences: ", "of 32 tokens", "an epoch is ", "258 ids"):
        assert part in text
    assert str(tmp_path / "cache") in text


def test_threads_end_with_the_iterator_and_with_the_data_set(make_config, open_text):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name.startswith("grain")]

    with open_text(make_config()) as dataset:
        with dataset.train_batches(0) as batches:
            next(batches)
            started = threads()
            assert started
        left_open = dataset.train_batches(5)
        next(left_open)
        started += threads()
    left_open.close()
    for thread in started:
        thread.join(timeout=10)
    assert not threads()


def test_an_iterator_left_open_does_not_hinder_the_end_of_the_program(make_config):
    config = make_config(dataset_type="synthetic")
    program = (
        "from maxlite.config import DataConfig; from maxlite.data import open_dataset\n"
        f"data = open_dataset(DataConfig(**{config.model_dump()!r}), vocab_size=9, global_batch_size=2,"
        " eval_batch_size=2)\n"
        "batches = data.train_batches(0); next(batches)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (run.stdout, run.stderr) == ("", "")


def test_data_is_imported_without_jax():
    program = "import sys, maxlite.data; sys.exit('jax' in sys.modules or 'grain' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_model_too_small_for_the_tokenizer(make_config, open_text):
    with pytest.raises(InputError, match=r"^vocab_size=256: the tokenizer has 258 ids; set vocab_size=258 or more"):
        open_text(make_config(), vocab_size=256)


def test_text_shorter_than_a_sequence(make_config, open_text, write_jsonl):
    config = make_config(text_files=[str(write_jsonl(["short text"]))], eval_fraction=0, max_target_length=12)
    with pytest.raises(InputError, match=r"^max_target_length=12: .* 12 tokens .*set max_target_length=11 or less"):
        open_text(config)
    assert open_text(config.model_copy(update={"max_target_length": 11})).steps_per_epoch == 0.25


@pytest.mark.parametrize("call", [lambda d: d.train_batch(0), lambda d: d.train_batches(-1)])
def test_steps_before_the_first(open_any, call):
    with pytest.raises(ValueError, match="step"):
        call(open_any())
