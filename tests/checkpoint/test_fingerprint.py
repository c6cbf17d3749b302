"""Fingerprints: what they are, that shardings do not matter, and that every kind of change does.

Run as a program it compares many shardings with the definition, in a process of 8 devices.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.checkpoint import fingerprint

WORD = 1 << 32
MIXERS, SEEDS, DIMENSION = (0x7FEB352D, 0x846CA68B), (0x1B56C4E9, 0x6C8E9CF5), 0x3C6EF372
DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "uint8",
    "int16",
    "int32",
    "uint32",
]
DTYPES += ["bool", "complex64"]
WIDE = ["float64", "int64", "uint64", "complex128"]  # where jax has them
SHAPES = [(), (1,), (7,), (24, 8), (3, 5, 7), (2, 1, 9, 4)]

compute = jax.jit(fingerprint.fingerprint)


def weight(index, seed):
    x = (index + seed) * 0x9E3779B1 % WORD
    x = (x ^ x >> 15) * 0x85EBCA77 % WORD
    x = (x ^ x >> 13) * 0xC2B2AE3D % WORD
    return x ^ x >> 16 | 1


def define(array):
    """The fingerprint by its definition: element by element, in integers without a limit."""
    array = np.asarray(array)
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    if array.dtype.itemsize == 8:
        array = np.ascontiguousarray(array)[..., None].view(np.uint32)
    elif array.dtype.kind != "i":
        array = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    sums = []
    for mixer, seed in zip(MIXERS, SEEDS, strict=True):
        total, weights = (
            0,
            [[weight(i, seed + d * DIMENSION) for i in range(n)] for d, n in enumerate(array.shape or (1,))],
        )
        for index, bits in np.ndenumerate(np.atleast_1d(array)):
            mixed = int(bits) % WORD
            mixed = (mixed ^ mixed >> 16) * mixer % WORD
            term = mixed ^ mixed >> 15
            for dimension, i in enumerate(index):
                term *= weights[dimension][i]
            total += term
        sums.append(total % WORD)
    return tuple(sums)


def random_array(shape, dtype, seed=0):
    """Every pattern of bits that the dtype has."""
    dtype, rng = jnp.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    data = rng.bytes(dtype.itemsize * int(np.prod(shape)))
    return np.frombuffer(data, dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_what_the_definition_says(dtype):
    for shape in SHAPES if dtype in ("float32", "bfloat16") else [(7,), (3, 5, 7)]:
        array = random_array(shape, dtype)
        assert fingerprint.of_one(compute(array)) == define(array), shape


GOLDEN = (1602830773, 1138761996)  # made by `define`


def test_golden_values():
    # Part of the format. They change only together with fingerprint.ALGORITHM.
    assert fingerprint.ALGORITHM == "mixed-weighted-sums-2x32"
    assert fingerprint.of_one(compute(jnp.arange(12, dtype=jnp.float32).reshape(3, 4) - 5)) == GOLDEN


def test_is_the_same_under_every_sharding_in_every_dtype():
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    child = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert child.stdout == "compared\n", child.stderr


def shardings(shape, all_of_them):
    """Ways to lay the shape out over 8 devices: whole, over one, two and all axes of the mesh."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    specs = [P()]
    if shape and shape[-1] % 8 == 0:
        specs += [P(*[None] * (len(shape) - 1), ("b", "c", "a"))]
    if len(shape) > 1:
        specs += [P("a", "b"), P(("a", "c")), P(("c", "b"), "a")] if all_of_them else [P(("c", "b"), "a")]
    return [NamedSharding(mesh, spec) for spec in specs]


def compare_shardings():
    for dtype in DTYPES + WIDE:
        common = dtype in ("float32", "bfloat16")
        for shape in [(), (7,), (24,), (24, 8), (8, 16, 24)] if common else [(16, 8)]:
            array = random_array(shape, dtype)
            wanted = define(array)
            for sharding in shardings(shape, common):
                x = jax.device_put(array, sharding)
                rows = fingerprint.compiled({"x": x}).result()((x,))
                assert rows.sharding.is_fully_replicated
                assert fingerprint.named(["x"], rows) == {"x": wanted}, (dtype, shape, sharding)
    print("compared")


# A few shapes, so that little is compiled.
arrays = st.builds(
    random_array,
    st.sampled_from([(24,), (4, 6), (2, 3, 4)]),
    st.sampled_from(["float32", "bfloat16", "int8", "complex64"]),
    st.integers(0, 2**32 - 1),
)
places = st.integers(0, 23)


def sums(array):
    return fingerprint.of_one(compute(array))


def words(array):
    """The array's elements as integers, in a flat copy; and the way back."""
    kind = f"u{array.dtype.itemsize}"
    flat = array.copy().view(kind).reshape(-1)
    return flat, lambda: flat.view(array.dtype).reshape(array.shape)


@given(arrays, places, st.data())
def test_any_change_of_one_element_changes_both_sums(array, place, data):
    before = sums(array)
    flat, back = words(array)
    flat[place] ^= flat.dtype.type(data.draw(st.integers(1, 2 ** (8 * min(array.dtype.itemsize, 4)) - 1)))
    after = sums(back())
    assert after[0] != before[0]
    assert after[1] != before[1]


@given(arrays, places, places)
def test_two_different_elements_swapped_are_noticed(array, left, right):
    flat, back = words(array)
    assume(flat[left] != flat[right])
    flat[[left, right]] = flat[[right, left]]
    assert sums(back()) != sums(array)


@given(arrays, st.integers(0, 15), st.sets(places, min_size=2))
def test_the_same_bit_flipped_in_several_elements_is_noticed(array, low, several):
    flat, back = words(array)
    bit = 8 * flat.dtype.itemsize - 1 - low % (8 * flat.dtype.itemsize)  # from the sign downwards
    flat[list(several)] ^= flat.dtype.type(1 << bit)
    assert sums(back()) != sums(array)


@given(arrays, places, st.integers(1, 24), st.booleans())
def test_a_block_lost_or_shifted_is_noticed(array, start, length, lost):
    flat, back = words(array)
    block = flat[start : start + length]
    changed = np.zeros_like(block) if lost else np.roll(block, 1)
    assume(not np.array_equal(block, changed))
    flat[start : start + length] = changed
    assert sums(back()) != sums(array)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_a_transposed_square_is_noticed(seed):
    array = random_array((6, 6), "float32", seed)
    assert sums(array.T.copy()) != sums(array)


def test_byte_that_is_no_boolean_is_noticed():
    array = np.array([1, 0, 1, 0], np.uint8)
    for byte in (2, 3, 128, 255):
        damaged = array.copy()
        damaged[2] = byte
        assert sums(damaged.view(bool)) != sums(array.view(bool))


if __name__ == "__main__":
    compare_shardings()
