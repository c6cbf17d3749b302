"""A fingerprint of every array, computed on its devices: what is restored is compared with what was saved.

Two sums modulo 2^32 of each element's bits, mixed, times an odd weight. The weight of element (i, j, ...) is the
product of one odd pseudo-random number per coordinate of its *global* index, so the result does not depend on
how the array is sharded, and covers device, network and disk alike. Mixing and weights differ between the two sums.

Mixing is one to one, and an odd weight has an inverse: a change of one element changes both sums, always. Any other
change (elements swapped, blocks lost or shifted) escapes both with a chance of about 2^-50. Without mixing, two
flipped sign bits would escape for certain: 2^31 times the sum of two odd weights is 0 modulo 2^32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from maxlite.checkpoint.background import Job

ALGORITHM = "mixed-weighted-sums-2x32"  # part of the format: another way to compute them needs another name
_SEEDS = (0x1B56C4E9, 0x6C8E9CF5)  # of the weights, one for each sum
_MIXERS = (0x7FEB352D, 0x846CA68B)  # odd, one for each sum
_DIMENSION = 0x3C6EF372  # between the seeds of two dimensions: so that no weight of one is another's for 10^8 indexes

Fingerprint = tuple[int, int]


def fingerprint(x: jax.Array) -> jax.Array:
    """The two sums of one array of any shape and dtype, uint32[2]. To be traced."""
    bits = jnp.atleast_1d(_words(x))
    sums = [_weighted_sum(_mix(bits, mixer), seed) for mixer, seed in zip(_MIXERS, _SEEDS, strict=True)]
    return jnp.stack(sums)


def compiled(arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> Job[jax.stages.Compiled]:
    """The function `tuple of arrays -> uint32[number of arrays, 2]`, every device having the whole result.

    Compiled in the background, once in a process for arrays of these shapes, dtypes and shardings.
    """
    signature = tuple((x.shape, np.dtype(x.dtype), x.sharding) for x in arrays.values())
    compiling = _compiling(signature)
    if compiling.done() and compiling.exception() is not None:  # out of memory, say, which passes
        _compiling.cache_clear()
        compiling = _compiling(signature)
    return compiling


@functools.cache
def _compiling(signature: tuple[tuple[tuple[int, ...], np.dtype, Sharding], ...]) -> Job[jax.stages.Compiled]:
    abstract = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in signature)

    def of_all(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([fingerprint(x) for x in arrays])

    jitted = jax.jit(of_all, out_shardings=replicated(abstract[0].sharding))
    return Job("compile-fingerprints", lambda: jitted.lower(abstract).compile())


def named(names: Iterable[str], rows: jax.Array) -> dict[str, Fingerprint]:
    """Fingerprints by name, from uint32[number of names, 2]; waits until they are computed."""
    return {name: of_one(sums) for name, sums in zip(names, np.asarray(rows), strict=True)}


def of_one(sums: jax.Array | np.ndarray) -> Fingerprint:
    """The result of `fingerprint` on the host; waits until it is computed."""
    first, second = np.asarray(sums)
    return int(first), int(second)


def replicated(sharding: Sharding) -> Sharding:
    """The sharding of a small array that every device of `sharding` holds whole."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _mix(bits: jax.Array, mixer: int) -> jax.Array:
    """Maps uint32 one to one to uint32, such that a change of high bits changes low ones too."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(mixer)
    return bits ^ (bits >> 15)


def _weighted_sum(bits: jax.Array, seed: int) -> jax.Array:
    *outer, inner = (_weights(size, seed + dimension * _DIMENSION) for dimension, size in enumerate(bits.shape))
    weighted = bits * functools.reduce(jnp.multiply.outer, outer, jnp.uint32(1))[..., None]
    if outer:
        # A few rows into one first, whole rows at a time: the speed of memory on a processor, where XLA is several
        # times as slow at adding up long columns, and at one sum over everything.
        *lead, rows, row = weighted.shape
        few = next(size for size in range(8, 0, -1) if rows % size == 0)
        weighted = jnp.sum(weighted.reshape(*lead, rows // few, few, row), axis=-2, dtype=jnp.uint32)
    return jnp.sum(weighted * inner, dtype=jnp.uint32)


def _weights(size: int, seed: int) -> jax.Array:
    """Odd pseudo-random numbers, uint32[size]: a multiply-and-shift hash of the index."""
    x = (jax.lax.iota(jnp.uint32, size) + jnp.uint32(seed & 0xFFFFFFFF)) * jnp.uint32(0x9E3779B1)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE3D)
    return (x ^ (x >> 16)) | jnp.uint32(1)


def _words(x: jax.Array) -> jax.Array:
    """The bits of every element as uint32; elements of 64 bits as two, in one more dimension."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:  # by way of the byte: one that is neither 0 nor 1 is damage
        x = x.astype(jnp.uint8)
    if x.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return x.astype(jnp.uint32)
