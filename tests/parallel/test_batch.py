"""Batch sizes: MaxText's convention, and what is said when rows do not come out whole."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.config import InputError, ParallelConfig
from maxlite.parallel import batch_sharding, global_batch_size, make_mesh, process_rows, to_device


@pytest.mark.parametrize(
    ("per_device", "devices", "accumulation", "shards", "rows"),
    [(8, 1, 1, 1, 8), (2, 8, 4, 8, 64), (0.25, 8, 1, 2, 2), (0.1, 30, 2, 3, 6), (1.5, 4, 1, 2, 6)],
)
def test_rows(per_device, devices, accumulation, shards, rows):
    assert global_batch_size(per_device, devices, accumulation, shards) == rows


def test_refusal_shows_the_arithmetic_and_the_nearest_fit():
    with pytest.raises(InputError) as error:
        global_batch_size(0.25, 8, 4, 8)
    assert str(error.value) == (
        "per_device_batch_size=0.25 x 8 devices = 2 rows in a micro-batch, not whole rows that split evenly into "
        "8 parts; the nearest that fits is per_device_batch_size=1.0"
    )


@given(st.floats(0.01, 20), st.integers(1, 600), st.integers(1, 4), st.data())
def test_suggestion_is_accepted(per_device, devices, accumulation, data):
    shards = data.draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    try:
        rows = global_batch_size(per_device, devices, accumulation, shards)
    except InputError as error:
        per_device = float(re.search(r"fits is per_device_batch_size=(\S+)", str(error)).group(1))
        rows = global_batch_size(per_device, devices, accumulation, shards)
    assert rows % (shards * accumulation) == 0
    assert rows > 0


def test_one_process_has_every_row():
    sharding = batch_sharding(make_mesh(ParallelConfig(), jax.devices()[:1]))
    assert process_rows(sharding, 6) == slice(0, 6)
    batch = {"inputs": np.arange(12, dtype=np.int32).reshape(6, 2)}
    placed = to_device(batch, sharding)
    assert placed["inputs"].sharding == sharding
    np.testing.assert_array_equal(placed["inputs"], batch["inputs"])
