import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.data.windows import PADDING, TokenStream, cut_windows


def stream_of(lengths):
    """Documents of these lengths, whose tokens are 1, 2, 3, ... over all of them."""
    return TokenStream(np.arange(1, sum(lengths) + 1, dtype=np.uint16), np.cumsum(lengths))


def test_a_batch_written_out():
    batch = cut_windows(stream_of([3, 4, 2]), np.array([0, 1, PADDING]), 5)
    expected = {
        "inputs": [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [0] * 5],
        "inputs_position": [[0, 1, 2, 0, 1], [0, 1, 0, 1, 0], [0] * 5],
        "inputs_segmentation": [[1, 1, 1, 2, 2], [1, 1, 2, 2, 0], [0] * 5],
        "targets": [[2, 3, 0, 5, 6], [7, 0, 9, 0, 0], [0] * 5],
        "targets_segmentation": [[1, 1, 0, 2, 2], [1, 0, 2, 0, 0], [0] * 5],
    }
    assert {name: values.tolist() for name, values in batch.items()} == expected
    assert {values.dtype for values in batch.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("tokens", "full", "every"), [(0, 0, 0), (1, 0, 0), (2, 0, 1), (5, 1, 1), (6, 1, 2), (9, 2, 2)]
)
def test_number_of_windows(tokens, full, every):
    stream = TokenStream(np.zeros(tokens, np.uint16), np.array([tokens]))
    assert (stream.full_windows(4), stream.all_windows(4)) == (full, every)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 11))
def test_every_token_but_a_documents_first_is_a_target_once(lengths, length):
    stream = stream_of(lengths)
    batch = cut_windows(stream, np.arange(stream.all_windows(length)), length)
    counted = batch["targets_segmentation"] > 0
    firsts = np.cumsum([1, *lengths[:-1]])
    assert sorted(batch["targets"][counted]) == sorted(set(range(1, sum(lengths) + 1)) - set(firsts))
    # Tokens count up, so a target that counts is its input's successor, and of the same document.
    assert (batch["targets"][counted] == batch["inputs"][counted] + 1).all()
    assert (batch["targets_segmentation"][counted] == batch["inputs_segmentation"][counted]).all()
    assert (batch["targets"][~counted] == 0).all()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([1, 1, 1, 2, 9]), max_size=20), st.integers(1, 11))
def test_evaluation_windows_are_those_with_a_target_that_counts(lengths, length):
    stream = stream_of(lengths)
    batch = cut_windows(stream, np.arange(stream.all_windows(length)), length)
    counted = batch["targets_segmentation"].any(axis=1)
    assert stream.evaluation_windows(length).tolist() == np.flatnonzero(counted).tolist()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 11))
def test_segments_and_positions_tell_documents_apart(lengths, length):
    stream = stream_of(lengths)
    batch = cut_windows(stream, np.arange(stream.all_windows(length)), length)
    for inputs, segments, positions in zip(
        batch["inputs"], batch["inputs_segmentation"], batch["inputs_position"], strict=True
    ):
        held = inputs > 0
        document = np.searchsorted(stream.ends, inputs[held] - 1, side="right")
        assert (segments[held] == document - document[0] + 1).all()
        for segment in set(segments[held]):
            assert positions[segments == segment].tolist() == list(range((segments == segment).sum()))
        assert not segments[~held].any()
        assert not positions[~held].any()


def test_a_documents_end_at_a_windows_end():
    # The border lies between the last input and its target, then between two windows.
    batch = cut_windows(stream_of([4, 4]), np.array([0, 1]), 4)
    assert batch["targets_segmentation"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert batch["inputs_segmentation"].tolist() == [[1] * 4, [1] * 4]
