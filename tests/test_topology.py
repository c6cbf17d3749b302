"""TPU slices by name: which there are, their shapes, and what is answered to a name that is none."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.config import InputError
from maxlite.topology import GENERATIONS, _slices, parse_topology

EVERY = sorted((generation, size) for generation, g in GENERATIONS.items() for size in _slices(g))


# As the cloud's pages and MaxText's table have them.
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v4-8", "2x2x1"),
        ("v4-4096", "8x16x16"),
        ("v5e-8", "2x4"),
        ("v5e-256", "16x16"),
        ("v5litepod-16", "4x4"),
        ("v5p-8", "2x2x1"),
        ("v5p-64", "2x4x4"),
        ("v5p-128", "4x4x4"),
        ("V5P-128 ", "4x4x4"),
        ("v5p-640", "4x4x20"),
        ("v5p-1024", "8x8x8"),
        ("v5p-1152", "4x12x12"),
        ("v5p-6912", "12x12x24"),
        ("v5p-7552", "4x4x236"),
        ("v5p-12288", "16x16x24"),
        ("v6e-128", "8x16"),
        ("tpu7x-128", "4x4x4"),
        ("tpu7x-18432", "16x24x24"),
    ],
)
def test_names_mean_the_slices_that_the_cloud_sells(name, shape):
    assert parse_topology(name).shape == shape


@given(st.sampled_from(EVERY))
def test_the_number_counts_cores_or_chips(slice_):
    generation, size = slice_
    topology = parse_topology(f"{generation}-{size}")
    assert math.prod(topology.bounds) * GENERATIONS[generation].cores == size
    assert topology.name == f"{generation}-{size}"
    doubled = topology.doubled()
    assert doubled is None or doubled.chips == 2 * topology.chips


@given(st.sampled_from(sorted(GENERATIONS)), st.integers(0, 10**9))
def test_a_wrong_number_is_answered_with_near_ones(generation, size):
    name = f"{generation}-{size}"
    if size in _slices(GENERATIONS[generation]):
        return
    with pytest.raises(InputError) as caught:
        parse_topology(name)
    nearest = [part for part in str(caught.value).replace(",", " ").split() if part.startswith(f"{generation}-")]
    assert all(parse_topology(each).generation == generation for each in nearest)
    assert nearest


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("v5p-100", ["v5p-64", "v5p-128", "count cores"]),
        ("v7x-128", ["tpu7x-128"]),
        ("v5-128", ["v5p-128", "v5e-128"]),
        ("v5p", ["v5p-8"]),
        ("v5p-4x4x4", ["v5p-"]),
        ("", ["v5p-8", "v6e-1"]),
    ],
)
def test_a_wrong_name_is_answered_with_near_ones(name, near):
    with pytest.raises(InputError) as caught:
        parse_topology(name)
    assert all(words in str(caught.value) for words in near)
